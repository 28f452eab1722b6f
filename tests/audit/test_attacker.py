"""Whose attack a trial is: by what was really handed over, not by what an attack would have taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit.attack_check import controls_of, guesses
from gradveil.audit.attack_selection import Attacker, attacker, secrets
from gradveil.audit.result_rows import Row, client_words
from gradveil.audit.run_directory import Trial
from gradveil.audit.threat_model import threat_model
from tests.audit.runs import config, execute
from tests.report.trials import row

ATTACKS = (
    "ig(iterations=2)",
    "pig(iterations=2)",
    "gpia(iterations=2)",
    "wiig(iterations=2)",
    "learned(epochs=1, width=8, features=64)",
    "ggl(iterations=2, population=4, width=1, lessons=2)",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    """Real trials, by defence and preset."""
    wanted = config(
        attacks=[*ATTACKS], defences=["none", "precode(k=8)", "gaussian(0.1)", "prune(0.5)"], target_clients=1
    )
    run, _ = execute(wanted, tmp_path_factory.mktemp("run") / "run")
    found = [Row(number, trial) for number, trial in enumerate(run.trials)]
    return {(row.defence.partition("(")[0], row.attack.partition("(")[0]): row for row in found}


@pytest.mark.parametrize(
    ("attack", "on_precode", "on_gaussian", "on_prune"),
    [
        ("ig", "naive", "naive", "naive"),
        ("pig", "aware", "naive", "naive"),
        ("gpia", "adaptive", "adaptive", "adaptive"),
        ("wiig", "informed", "informed", "adaptive"),
        ("learned", "adaptive", "adaptive", "adaptive"),
        ("ggl", "adaptive", "adaptive", "adaptive"),
    ],
)
def test_every_attacker_is_what_the_defence_makes_him(
    rows: dict[tuple[str, str], Row], attack: str, on_precode: Attacker, on_gaussian: Attacker, on_prune: Attacker
) -> None:
    kinds = [rows[defence, attack].attacker for defence in ("none", "precode", "gaussian", "prune")]
    assert kinds == ["undefended", on_precode, on_gaussian, on_prune]


def test_whoever_is_told_true_statistics_is_informed_on_any_client(tmp_path: Path) -> None:
    model = {"name": "convnet", "prepare": True, "options": {"width": 8}}
    attacks = ["gi(iterations=1, restarts=1)", "gi-strong(iterations=1, restarts=1)"]
    wanted = config(
        model=model, attacks=attacks, defences=["none", "prune(0.5)"], target_clients=1, client={"batch": 2}
    )
    run, _ = execute(wanted, tmp_path / "run")
    told = {(trial.info["defence"], trial.info["attack"].partition("(")[0]): trial for trial in run.trials}
    assert {key: attacker(trial.info) for key, trial in told.items()} == {
        ("none", "gi"): "undefended",
        ("none", "gi-strong"): "informed",
        ("prune(0.5)", "gi"): "naive",
        ("prune(0.5)", "gi-strong"): "informed",
    }
    assert all(name.startswith("statistics.") for name in secrets(told["none", "gi-strong"].info))
    found = [Row(number, trial) for number, trial in enumerate(run.trials)]
    controls = {row.attack: controls_of(row, found) for row in found if not row.undefended}
    assert [row.attack for row in controls[attacks[0]]] == attacks[:1]
    assert [row.attack for row in controls[attacks[1]]] == attacks[1:]
    others = [row for row in found if row.attack == attacks[1] or not row.undefended]
    assert controls_of(next(row for row in found if row.attack == attacks[0] and not row.undefended), others) == []


def test_the_closed_form_is_naive() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Sigmoid(), nn.Linear(4, 3))
    batch = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])
    result = gradveil.audit(model, batch, defences=["none", "gaussian(0.1)"], attacks=["analytic"])
    assert [attacker(trial.info) for trial in result.trials] == ["undefended", "naive"]


def test_a_network_that_saw_every_draw_does_not_guess(rows: dict[tuple[str, str], Row]) -> None:
    assert not guesses(rows["precode", "learned"])
    assert guesses(rows["precode", "gpia"])
    assert guesses(rows["precode", "ggl"]), "its generator saw images, and no update"


def test_public_images_labels_and_bounds_are_no_secrets() -> None:
    grants = ["targets: the true labels", "public: 9 images of the same kind", "bounds: the least and greatest value"]
    info = {"defence": "dp", "simulated_client": "full", "knowledge": {"*": "known"}, "grants": grants}
    assert attacker(info) == "adaptive"
    assert attacker({**info, "grants": ["round2.step.noise.w: its true value"]}) == "informed"


def test_a_defence_that_was_given_as_an_object_is_met_naively() -> None:
    assert (
        attacker({"defence": "my own defence", "simulated_client": "naive", "attack": "pig", "grants": []}) == "naive"
    )
    assert attacker({"defence": "cvb", "simulated_client": "naive", "attack": "my own attack", "grants": []}) == "naive"
    assert attacker({"defence": "dp + cvb", "simulated_client": "naive", "attack": "ig(ignore=stochastic)"}) == "aware"
    assert (
        attacker({"defence": "cvb", "simulated_client": "full", "attack": "pig(simulated_client=full)"}) == "adaptive"
    )


def test_a_changed_model_is_told_whatever_is_said_of_it_and_whoever_was_told_secrets() -> None:
    info = {"defence": "none", "simulated_client": "naive", "attack": "mine", "planted": ""}
    assert attacker(info) == "active"
    told = row(0, attack="mine", planted="a block", guard=[], grants=["send.noise.w: its true value"])
    assert (told.attacker, told.planted) == ("informed", True)
    assert "It sends a model with a block (mine)" in threat_model([told], {})


def test_sums_over_clients_are_said() -> None:
    assert client_words("gradient, sum of 3", 3) == "the sum over 3 clients of one gradient of 1 image each"
    local = "local T=2 sgd lr=0.1, sum of 2"
    said = "the sum over 2 clients of local training (T=2 sgd lr=0.1) on 4 images each"
    assert client_words(local, 8) == said
    info = {"model": "m", "data": "d", "client": local, "batch": 8, "round": 4, "defence": "none"}
    assert Row(0, Trial(info, [])).setting.title() == f"m on d, {said}, 5 rounds watched"
