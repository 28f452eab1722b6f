"""Undoing a public batch defence: from the training images to the private images, without secret draws."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Reconstruction, in_closed_form
from gradveil.attacks.undo_batch_defence import policy_of, undone
from gradveil.audit.attack_selection import aimed_at, planted_for, trials
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import recover
from gradveil.client import BatchDefences, Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import Splits, load
from gradveil.defences import parse
from gradveil.metrics import ssim
from tests.audit.runs import config


@cache
def digits() -> Splits:
    return load("digits", size=16)


def client(defence: str, **settings) -> tuple[Client, Knowledge, Batch]:
    """A client behind a defence, public knowledge, and eight private images."""
    public, private = digits().public, digits().private
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    plain = Client(model, domain=Domain(private.space, 10), **settings)
    knowledge = Knowledge(private.space, 10, public=Batch(public.inputs, public.targets))
    return parse(defence)(plain, Key(0)), knowledge, Batch(private.inputs[:8], private.targets[:8])


def read_off(images: Tensor) -> Reconstruction:
    """One client's images, as an attack returns them."""
    one = torch.ones(1)
    return in_closed_form(images.unsqueeze(0), torch.zeros(1, 8).long(), one, one > 0, 0.0, None)


def similarities(defence: str, public: bool = True) -> tuple[Tensor, Tensor]:
    """SSIM to the private images before and after undoing."""
    known, knowledge, batch = client(defence)
    knowledge = knowledge if public else replace(knowledge, public=None)
    batches = BatchDefences(known.batch, known.domain)
    made = batches.apply(batch, batches.spec(batch).sample(Key(3))).inputs
    found = undone(read_off(made), known, knowledge)
    assert torch.equal(found.before_undoing, made.unsqueeze(0))
    pixels = digits().private.space.view
    return tuple(ssim(pixels(images), pixels(batch.inputs)) for images in (made, found.inputs[0]))


@pytest.mark.parametrize(
    ("policy", "public", "least"),
    [("0", True, 0.95), ("2", True, 0.8), ("6-43", True, 0.8), ("6-43", False, 0.6), ("3-1-7+43-18-18", True, 0.5)],
    ids=["invert", "rotate", "shear and shift", "without public images", "hybrid"],
)
def test_geometry_is_inverted_without_its_draws(policy: str, public: bool, least: float) -> None:
    before, after = similarities(f'ats(policy="{policy}")', public)
    assert float(after.mean()) > max(least, float(before.mean()))


def test_images_that_a_transform_does_not_change_stay() -> None:
    """The likeliest of all images that become an image of full contrast would be nearly grey."""
    before, after = similarities('ats(policy="8")')  # autocontrast
    assert float(after.mean()) > float(before.mean()) - 0.01


@pytest.mark.parametrize("number", [1, 15], ids=["contrast", "brightness"])
def test_public_images_identify_the_brightness_draw(number: int) -> None:
    """Both directions explain a fainter image equally well."""
    before, after = similarities(f'ats(policy="{number}")')
    assert float(after.mean()) > float(before.mean())


def test_distinct_draws_are_tried_once() -> None:
    """Directions of a policy that an image did not draw change nothing."""
    counts = {'ats(policy="0")': 1, 'ats(policy="3-1-7")': 8, "ats": 16}
    for defence, ways in counts.items():
        known, knowledge, _ = client(defence)
        assert len(policy_of(known, knowledge).draws) == ways


@pytest.mark.parametrize("defence", ["none", "dp", "label-smoothing", "mixup", "instahide(k=2)"])
def test_mixed_and_unchanged_images_are_not_undone(defence: str) -> None:
    known, knowledge, batch = client(defence)
    mixed = defence in ("mixup", "instahide(k=2)")
    assert (policy_of(known, knowledge) is None) == mixed
    found = undone(read_off(batch.inputs), known, knowledge)
    assert torch.equal(found.inputs[0], batch.inputs)
    assert found.before_undoing is None
    assert bool(found.remarks) == mixed


def test_draws_of_local_training_are_undone_like_those_of_one_gradient() -> None:
    known, knowledge, _ = client("ats", local=Local(steps=4, batch=4, lr=0.1))
    assert len(policy_of(known, knowledge).draws) == 16


@pytest.fixture(scope="module")
def audited() -> dict[str, Row]:
    attacks = ["rob(bins=128)", "rob(bins=128, undo=true)", "cdia(iterations=1, undo=true)"]
    settings = {
        "data": {"name": "digits", "size": 16},
        "client": {"batch": 4},
        "target_clients": 2,
        "defences": ["ats"],
    }
    scene = open_experiment(config(attacks=attacks, **settings))
    return {
        trial.attack: Row(
            0, score(scene, trial, recover(scene, trial, range(2), lambda step: None), TrialNames("a", "b"))
        )
        for trial in trials(scene.config)
    }


def test_a_malicious_server_that_undoes_the_policy_recovers_private_images(audited: dict[str, Row]) -> None:
    plain, undoing = audited["rob(bins=128)"], audited["rob(bins=128, undo=true)"]
    assert undoing.trained_on == plain.trained_on
    assert undoing.trained_on.recovered >= 4
    assert undoing.recovered >= plain.recovered + 3
    assert undoing.attacker == "active"


def test_undoing_search_is_evaluated_at_the_training_images(audited: dict[str, Row]) -> None:
    row = audited["cdia(iterations=1, undo=true)"]
    assert row.health("objective_truth") == pytest.approx(0, abs=0.02)
    assert row.attacker == "adaptive"


@pytest.mark.parametrize("attack", ["analytic", "r-gap"])
def test_analytic_reconstruction_is_undone(attack: str) -> None:
    model = {"name": f"{__name__}:linear"}
    scene = open_experiment(
        config(model=model, data={"name": "digits", "size": 16}, attacks=[attack, f"{attack}(undo=true)"],
               defences=['ats(policy="0-43")'], target_clients=4)
    )  # fmt: skip
    plain, undoing = (recover(scene, trial, range(4), lambda step: None) for trial in trials(scene.config))
    assert torch.equal(undoing.tensors["before_undoing"], plain.tensors["inputs"])
    assert torch.equal(undoing.tensors["at_truth"], plain.tensors["at_truth"])
    row = Row(0, score(scene, trials(scene.config)[1], undoing, TrialNames("a", "b")))
    assert (row.recovered, row.trained_on.recovered, row.attacker) == (4, 4, "adaptive")


def linear(channels: int, size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 10))


def test_undo_without_a_batch_defence_changes_nothing() -> None:
    scene = open_experiment(
        config(attacks=["rob(bins=64)", "rob(bins=64, undo=true)"], defences=["none"], target_clients=2)
    )
    first, second = (recover(scene, trial, range(2), lambda step: None).tensors for trial in trials(scene.config))
    assert torch.equal(first["inputs"], second["inputs"])
    assert "before_undoing" not in second


def test_attacks_on_ats_undo_its_policy() -> None:
    assert "cdia(undo=true)" in aimed_at("ats")
    assert all("undo=true" in text for text in planted_for("ats") if text.startswith(("rob", "curious")))


def test_undo_by_a_non_adaptive_attack_raises() -> None:
    assert make_attack("ig(undo=true)").simulated_client == "full"
    with pytest.raises(GradveilError, match="undo: undoes a batch defence"):
        make_attack("ig(undo=true, simulated_client=naive)")
