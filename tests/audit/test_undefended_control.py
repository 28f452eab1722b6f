"""An audit without an undefended setting attacks a few undefended clients as a control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.attacks.knowledge import How
from gradveil.attacks.protocol import Prospect
from gradveil.audit.attack_check import complaints
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.preflight import obstacles, open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.trial import recover, sharing
from gradveil.core.errors import Problem
from tests.audit.runs import config as uncontrolled
from tests.audit.runs import execute


def config(**changes: Any) -> RunConfig:
    return uncontrolled(**{"control": True, **changes})


def controls(**changes: Any) -> list[str]:
    return [trial.attack for trial in trials(config(**changes)) if trial.control]


def test_control_runs_where_no_undefended_client_was_asked_for() -> None:
    assert controls(defences=["prune(0.9)"]) == ["ig(iterations=6, report=2)"]
    assert controls(defences=["prune(0.9)", " None "]) == []
    assert controls(defences=["prune(0.9)"], control=False) == []
    assert controls(defences=["prune(0.9)"], observed={"folder": "seen"}) == []


def test_control_has_every_attack_of_every_defence_once() -> None:
    chosen = config(attacks=["adaptive", "ig"], defences=["dropout(0.5)", "dgp"], seeds=[0, 1])
    planned = trials(chosen)
    mine = {trial.attack for trial in planned if not trial.control and trial.seed == 0}
    assert {trial.attack for trial in planned if trial.control and trial.seed == 0} == mine
    assert sum(trial.control for trial in planned) == 2 * len(mine)
    assert len({trial.id for trial in planned}) == len(planned)


def test_control_vouches_for_an_attack_and_is_resumed(tmp_path: Path) -> None:
    chosen = config(defences=["gaussian(0.01)"], target_clients=9, attacks=["ig(iterations=2)"])
    run, first = execute(chosen, tmp_path / "run", share=5)
    rows = [Row(place, trial) for place, trial in enumerate(run.trials)]
    assert [(row.defence, row.is_control, len(row.trial.records)) for row in rows] == [
        ("gaussian(0.01)", False, 9),
        ("none", True, 8),
    ]
    assert first.started == [trial.id for trial in trials(chosen)]
    assert "was not attacked" not in " ".join(complaints(rows[0], rows))
    assert "was not attacked" in " ".join(complaints(rows[0], rows[:1]))
    _, again = execute(chosen, tmp_path / "run", share=5)
    assert again.skipped == set(again.started)


def test_switching_the_control_changes_no_other_trial(tmp_path: Path) -> None:
    chosen = config(defences=["gaussian(0.01)"], target_clients=1, control=False)
    before, _ = execute(chosen, tmp_path / "run")
    after, display = execute(chosen.model_copy(update={"control": True}), tmp_path / "run")
    assert [trial.info["trial"] for trial in display.finished] == [after.trials[1].info["trial"]]
    assert after.trials[0].records == before.trials[0].records
    without, _ = execute(chosen, tmp_path / "run")
    assert [trial.info["control"] for trial in without.trials] == [False]
    grown, display = execute(config(defences=["gaussian(0.01)", "none"], target_clients=1), tmp_path / "run")
    assert [trial.info["control"] for trial in grown.trials] == [False, False]
    assert len(display.finished) == 1


@pytest.mark.parametrize("budget", ["80", None])
def test_control_spends_on_each_client_what_the_attack_spends_on_a_defended_one(budget: str | None) -> None:
    attacks = ["ig(report=1)", "gi(restarts=1, report=1)"]
    experiment = open_experiment(
        config(defences=["prune(0.9)"], attacks=attacks, target_clients=2, budget=budget, iterations=30)
    )
    spent = {
        (trial.attack, trial.control): recover(experiment, trial, range(2), lambda _: None)
        .tensors["iterations"]
        .tolist()
        for trial in trials(experiment.config)
    }
    each = [20, 20] if budget else [30, 30]
    assert spent == {(attack, control): each for attack in attacks for control in (False, True)}
    assert set(sharing(experiment)) == {"prune(0.9)"}


@dataclass(frozen=True)
class Demanding:
    """An attack that needs something of a defence to work on."""

    name: str = "demanding"
    simulated_client: str = "full"
    knowledge: Mapping[str, How] = field(default_factory=dict[str, How])

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        if prospect.simulated_client.send is None:
            yield Problem("defence", "is missing", "attack a defended client")


def test_an_attack_that_does_not_apply_without_a_defence_stops_nothing() -> None:
    chosen = config(defences=["prune(0.9)"], attacks=["ig"])
    found = obstacles(replace(open_experiment(chosen), attacks={"ig": Demanding()}))  # pyright: ignore[reportArgumentType]
    assert found.unfit == {(0, "none", "ig"): "is missing -> attack a defended client"}
    assert found.problems == []
