"""Public examples beside a batch of one's own: attackers learn from them, rates are held against guesses from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import BASELINES
from gradveil.core.errors import GradveilError
from tests.audit.runs import config
from tests.audit.test_api import ATTACK, audited, examples


def public(count: int = 12, seed: int = 5) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return inputs, torch.arange(count) % 3


def test_adaptive_attackers_learn_from_public_examples() -> None:
    settings = {"defences": ("gaussian(0.1)",), "attacks": (ATTACK, "adaptive"), "iterations": 1, "control": False}
    alone = audited(**settings)
    assert "learned" not in {trial.info["attack"] for trial in alone.trials}
    assert set(alone.trials[0].info["controls"]) == {"wrong_target_client"}
    beside = audited(public=public(), **settings)
    (learned,) = [c for c in beside.trials if (c.info["attack"], c.info["defence"]) == ("learned", "gaussian(0.1)")]
    assert learned.failed is None
    assert "public: 12 images of the same kind, none of a target client" in learned.info["grants"]
    assert set(beside.trials[0].info["controls"]) == {"wrong_target_client", *BASELINES}


def test_a_defence_may_need_them() -> None:
    with pytest.raises(GradveilError, match="mixes with public images, and there are none"):
        audited(defences=("instahide(mix=public)",))
    assert audited(defences=("instahide(mix=public)",), public=public()).trials[0].failed is None


def test_their_range_counts_beside_the_batchs() -> None:
    inputs, targets = public()
    found = audited(public=(3 * inputs, targets), attacks=("learned(epochs=1, width=8)",))
    assert found.trials[0].info["grants"][0].startswith("bounds: ")
    with pytest.raises(GradveilError, match=r"data 'public': pixels .* outside \[0, 1\]"):
        audited(public=(3 * inputs, targets), bounds="unit")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "public: is int"),
        (public()[0], "public: is Tensor"),
        ((torch.zeros(4, 16, 16), torch.zeros(4).long()), r"inputs of shape \(4, 16, 16\), which are neither images"),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4).long()), "inputs of 1 x 8 x 8, the batch of 1 x 16 x 16"),
        ((public()[0], torch.zeros(3).long()), r"holds 12 inputs and targets torch.int64 \(3,\)"),
        ((public()[0], torch.zeros(12)), "targets torch.float32"),
        ((torch.cat([public()[0], examples()[0]]), torch.zeros(14).long()), "holds 2 of the batch's own examples"),
        ((public()[0], torch.full((12,), 3)), "label 3 of image 0 is outside 0 to 2"),
    ],
)
def test_what_is_no_public_data_is_refused(given: object, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        audited(public=given)


def test_a_run_with_other_public_examples_is_not_resumed(tmp_path: Path) -> None:
    settings = {"attacks": ("learned(epochs=1, width=8)",), "out": tmp_path / "run"}
    audited(public=public(), **settings)
    audited(public=public(), **settings)
    with pytest.raises(GradveilError):
        audited(public=public(seed=6), **settings)


def test_target_images_of_a_client_are_training_images_that_no_attacker_knows():
    usual, own = (
        open_experiment(config(data={"name": "digits", "size": 16}, target_images=which))
        for which in ("test", "client")
    )
    assert own.public is not None
    assert usual.public is not None
    held, public, training = (
        {view.mul(1000).round().short().numpy().tobytes() for view in part.views}
        for part in (own.private, own.public, usual.public)
    )
    assert held <= training
    assert not held & public
    assert own.config.digest() != usual.config.digest()
    with pytest.raises(GradveilError, match="target_images"):
        config(target_images="client", train={"rounds": 1})
