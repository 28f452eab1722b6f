"""An attack of a user's own that keeps to no protocol: its trial fails and says why; NaN is no success."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge, Known, Neutral
from gradveil.attacks.protocol import Observation, Reconstruction
from gradveil.audit.argument_checks import checked, declared
from gradveil.core.errors import GradveilError
from gradveil.spaces import ImageSpace

KNOWLEDGE = Knowledge(ImageSpace((1, 4, 4)), 3)
SEEN = Observation({}, {}, 2, (0, 1, 2))
ZEROS = torch.zeros(3)
FOUND = Reconstruction(
    torch.zeros(3, 2, 1, 4, 4),
    torch.zeros(3, 2, dtype=torch.long),
    ZEROS,
    ("budget", "converged", "stalled"),
    ZEROS.long(),
    0.0,
    ZEROS.long(),
    torch.zeros(3, 5),
    ZEROS,
)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"inputs": FOUND.inputs[:, 0]}, "inputs: is (3, 1, 4, 4) -> return [V, B, C, H, W], (3, 2, 1, 4, 4) here"),
    ({"inputs": FOUND.inputs[:1]}, "inputs: is (1, 2, 1, 4, 4)"),
    ({"targets": ZEROS.long()}, "targets: is (3,) -> return [V, B] class numbers, (3, 2) here"),
    ({"targets": torch.zeros(3, 2)}, "targets: is torch.float32"),
    ({"objective": 0.0}, "objective: is float -> return a tensor [V]"),
    ({"objectives": ZEROS}, "objectives: is (3,)"),
    ({"iterations": 3, "initial": None}, "initial: is NoneType"),
    ({"status": "converged"}, "status: is 'converged' -> return one word a target client"),
    ({"status": ("fine",) * 3}, "status: is ('fine', 'fine', 'fine')"),
    ({"trace": {4: ZEROS}}, "trace[4]: is (3,)"),
    ({"trace": {"start": FOUND.inputs}}, "trace: has the key 'start'"),
    ({"seconds": None}, "seconds: is None -> return the seconds that the attack took"),
    ({"seconds": -1.0}, "seconds: is -1.0"),
    ({"iterations": ZEROS.long() - 1}, "iterations: is negative"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_reconstruction_is_refused_with_the_attacks_name(change, said):
    with pytest.raises(GradveilError) as error:
        checked("mine", replace(FOUND, **change), SEEN, KNOWLEDGE)
    assert f"attack mine: {said}" in str(error.value)
    assert len(error.value.problems) == len(change)


@pytest.mark.parametrize(("found", "said"), [(None, "returned nothing"), (FOUND.inputs, "returned Tensor")])
def test_what_is_no_reconstruction_is_refused(found, said):
    with pytest.raises(GradveilError, match=said):
        checked("mine", found, SEEN, KNOWLEDGE)


def test_an_image_that_is_none_has_diverged():
    """A gate counts what diverged as recovered, and so never passes on the word of NaN."""
    inputs = FOUND.inputs.clone()
    inputs[1, 1, 0, 2, 2] = torch.nan
    assert checked("mine", replace(FOUND, inputs=inputs), SEEN, KNOWLEDGE).status == ("budget", "diverged", "stalled")
    assert checked("mine", FOUND, SEEN, KNOWLEDGE).status == FOUND.status


def test_an_attack_says_what_it_believes_and_knows_in_words_there_are():
    assert list(declared(make_attack("ig"), public=True)) == []
    wrong = type("Wrong", (), {"name": "wrong", "__call__": lambda self: None, "simulated_client": "adaptive"})()
    wrong.knowledge = {"model.*": "optimise", "send.*": Neutral()}
    assert [problem.where for problem in declared(wrong, public=True)] == ["simulated_client", "knowledge['model.*']"]
    bare = type("Bare", (), {"name": "bare", "__call__": lambda self: None})()
    assert [problem.where for problem in declared(bare, public=True)] == ["simulated_client", "knowledge"]
    for there, missing in (("craft", "planted()"), ("planted", "craft()")):
        half = type("Half", (), {"simulated_client": "naive", "knowledge": {}, there: lambda self: ""})()
        assert [problem.where for problem in declared(half, public=True)] == [missing]


def test_an_attack_of_ones_own_that_asks_for_public_examples_is_told_that_there_are_none():
    mine = type("Mine", (), {"simulated_client": "full", "knowledge": {"public": Known()}})()
    assert [problem.where for problem in declared(mine, public=False)] == ["knowledge['public']"]
    assert list(declared(mine, public=True)) == []
    assert list(declared(make_attack("portfolio"), public=False)) == []
