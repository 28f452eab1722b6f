"""Whose attack a trial is: by what was really handed over, not by what an attack would have taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks import make_attack
from gradveil.audit.attack_check import controls_of, guesses
from gradveil.audit.attack_selection import Attacker, attacker, method
from gradveil.audit.audit_config import ClientConfig
from gradveil.audit.result_rows import Row
from gradveil.audit.threat_model import threat_model
from gradveil.federated.training_config import LocalConfig
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
    assert {key: trial.info["attacker"] for key, trial in told.items()} == {
        ("none", "gi"): "undefended",
        ("none", "gi-strong"): "informed",
        ("prune(0.5)", "gi"): "naive",
        ("prune(0.5)", "gi-strong"): "informed",
    }
    assert all(name.startswith("statistics.") for name in told["none", "gi-strong"].info["secrets"])
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
    assert [trial.info["attacker"] for trial in result.trials] == ["undefended", "naive"]


def test_a_network_that_saw_every_draw_does_not_guess(rows: dict[tuple[str, str], Row]) -> None:
    assert not guesses(rows["precode", "learned"])
    assert guesses(rows["precode", "gpia"])
    assert guesses(rows["precode", "ggl"]), "its generator saw images, and no update"


def test_a_closed_form_with_a_prior_learns_nothing() -> None:
    attack = make_attack("analytic(prior=public)")
    assert attack.simulated_client == "full"
    assert method(attack) == "closed form"


def test_public_images_labels_and_bounds_are_no_secrets(rows: dict[tuple[str, str], Row]) -> None:
    assert len(rows["gaussian", "learned"].info["grants"]) > 0
    assert rows["gaussian", "learned"].secrets == []
    assert rows["gaussian", "wiig"].secrets
    assert all(name.startswith("send.noise") for name in rows["gaussian", "wiig"].secrets)


def test_the_record_says_what_an_attack_used(rows: dict[tuple[str, str], Row]) -> None:
    learned, searched = rows["precode", "learned"], rows["precode", "gpia"]
    assert (learned.method, searched.method, searched.preset) == ("learned", "search", "gpia")
    assert (searched.changes, rows["none", "gpia"].changes) == (["model"], [])
    assert (searched.undefended, rows["none", "gpia"].undefended) == (False, True)
    assert (searched.info["target_iterations"], learned.info["target_iterations"]) == (2, 0)


def test_a_defence_that_was_given_as_an_object_is_met_naively() -> None:
    def of(attack: str, defence: str) -> Attacker:
        return attacker(make_attack(attack), defence, ["model"], False, [])

    assert of("pig", "my own defence") == "naive"
    assert of("ig", "cvb") == "naive"
    assert of("ig(ignore=stochastic)", "dp + cvb") == "aware"
    assert of("pig(simulated_client=full)", "cvb") == "adaptive"


def test_a_changed_model_is_told_whatever_is_said_of_it_and_whoever_was_told_secrets() -> None:
    assert attacker(make_attack("rob"), "none", [], True, []) == "active"
    told = row(0, attack="mine", planted="a block", guard=[], grants=["send.noise.w: its true value"])
    assert (told.attacker, told.planted) == ("informed", True)
    assert "It sends a model with a block (mine)" in threat_model([told], {})


def test_sums_over_clients_are_said() -> None:
    assert ClientConfig(members=3).update_of("image") == "the sum over 3 clients of one gradient of 1 image each"
    local = ClientConfig(batch=4, members=2, local=LocalConfig(steps=2, lr=0.1))
    said = "the sum over 2 clients of local training (T=2 sgd lr=0.1) on 4 images each"
    assert local.update_of("image") == said
    assert row(0, update=said, round=4).setting.title() == f"lenet on faces, {said}, 5 rounds watched"
