"""The plan of an attack is written before the attack starts, and an interrupted attack takes it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradveil.attacks.inversion import inversion
from gradveil.attacks.protocol import HasPlan, Progress
from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.audit_run import describe, run
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import Store, load_run
from tests.audit.runs import Silent, config, execute
from tests.audit.test_store import assert_same, mode
from tests.audit.test_trial import Recorder


class Stops(Silent):
    """A display at whose first report of an attack somebody presses Ctrl-C."""

    def progress(self, trial: TrialAddress, share: int, step: Progress) -> None:
        raise KeyboardInterrupt


def interrupted(folder: Path, **changes: Any) -> Path:
    """Stop a run within its first trial; return the plan that was written."""
    chosen = config(**changes)
    experiment = open_experiment(chosen)
    with pytest.raises(KeyboardInterrupt), Store(folder).open(describe(chosen, 10**6, "")) as store:
        run(experiment, store, Stops(), 10**6)
    assert load_run(folder).trials == []
    (file,) = folder.glob("plans/*/*.json")
    return file


def at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(inversion, "rows_at_once", lambda *_: rows)


def test_an_interrupted_trial_takes_its_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 2)
    changes: dict[str, Any] = {"target_clients": 3}
    whole, _ = execute(config(**changes), tmp_path / "whole")
    file = interrupted(tmp_path / "run", **changes)
    assert file.name == "0-2.json"
    assert json.loads(file.read_text()) == [2, 1]
    assert [mode(path) for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]
    at_once(monkeypatch, 1)
    resumed, _ = execute(config(**changes), tmp_path / "run")
    assert [trial.info["plan"] for trial in resumed.trials] == [[2, 1], [1, 1, 1]]
    assert not list((tmp_path / "run" / "plans").iterdir())
    assert resumed.trials[0].records[0]["objective"] == whole.trials[0].records[0]["objective"]


def test_resumed_with_another_machine_the_records_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"target_clients": 3, "defences": ["none"]}
    at_once(monkeypatch, 2)
    execute(config(**changes), tmp_path / "whole")
    interrupted(tmp_path / "run", **changes)
    at_once(monkeypatch, 3)
    execute(config(**changes), tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_fresh_start_plans_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 2)
    interrupted(tmp_path / "run")
    at_once(monkeypatch, 1)
    run, _ = execute(config(), tmp_path / "run", fresh=True)
    assert [trial.info["plan"] for trial in run.trials] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(("text", "said"), [("[2", "is not valid JSON"), ("[1]", "covers 1 rows of 2")])
def test_a_damaged_plan_fails_its_trial_once(tmp_path: Path, text: str, said: str) -> None:
    interrupted(tmp_path / "run").write_text(text)
    run, _ = execute(config(), tmp_path / "run")
    assert said in (run.trials[0].failed or "")
    again, _ = execute(config(), tmp_path / "run")
    assert again.trials[0].failed is None


def test_an_attack_need_not_plan() -> None:
    assert not isinstance(Recorder(), HasPlan)
    assert isinstance(inversion.Inversion("ig"), HasPlan)
