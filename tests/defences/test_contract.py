"""What a user's own stages, batch transforms and surgeries have to keep to: mistakes are told, none is a traceback."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key, Noise, NoiseSpec, Normal
from gradveil.core.types import Batch, BatchTransform, HasMessages, Stage, Transform
from gradveil.defences import Defence, chain, parse
from gradveil.defences.error_feedback import Feedback
from gradveil.defences.user_defence import faults

BATCH = Batch(torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0]))


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Sigmoid(), nn.Linear(3, 3))


def problems_of(defence: Defence) -> str:
    return " | ".join(map(str, faults(defence, defence(Client(net())), BATCH)))


@dataclass(frozen=True, eq=False)
class Own(Transform):
    """A stage of anything."""

    run: Any
    declared: Any = NoiseSpec
    begin: Any = dict
    per_example: bool = False
    stage = Stage.PRUNE

    def noise(self, params):
        return self.declared()

    def init(self, params):
        return self.begin()

    def apply(self, update, state, noise, context):
        return self.run(update, state, noise, context)


@dataclass(frozen=True, eq=False)
class OwnBatch(BatchTransform):
    """A batch transform of anything."""

    run: Any

    def noise(self, batch):
        return NoiseSpec()

    def apply(self, batch, noise, domain):
        return self.run(batch)


def each(change):
    return lambda update, state, noise, context: ({name: change(g) for name, g in update.items()}, state)


STAGES = {
    "apply returns different results": Own(each(lambda g: g + random.random())),
    "apply modifies its input '1.weight' in place": Own(each(lambda g: g.mul_(2))),
    "apply turns finite values into NaN or infinity, in '1.weight'": Own(each(lambda g: g / g.abs())),
    "apply turns a layer gradient of zeros into NaN or infinity, in '1.weight'": Own(each(lambda g: g / g.abs().max())),
    "holds '1.weight' as torch.float32 (48,), but the input is torch.float32 (3, 16)": Own(each(lambda g: g.flatten())),
    "holds '1.weight' as torch.int8": Own(each(lambda g: g.sign().to(torch.int8))),
    "cannot be applied to several clients at once: RuntimeError": Own(each(lambda g: g if g.norm() > 1 else g * 2)),
    "has no derivative": Own(each(lambda g: g.sign() * 0.1)),
    "apply returns dict -> return the update and the state": Own(lambda u, s, n, c: u),
    "apply returns nothing": Own(lambda u, s, n, c: None),
    "the update that apply returns: is list": Own(lambda u, s, n, c: ([*u.values()], s)),
    "lacks '3.bias'": Own(lambda u, s, n, c: ({k: g for k, g in u.items() if k != "3.bias"}, s)),
    "holds unknown names: more": Own(lambda u, s, n, c: (u | {"more": u["3.bias"]}, s)),
    "the state that apply returns: holds unknown names: sum": Own(lambda u, s, n, c: (u, {"sum": u["3.bias"]})),
    "the state that apply returns: lacks 'count'": Own(lambda u, s, n, c: (u, {}), begin=lambda: {"count": BATCH[1]}),
    "apply raised KeyError: 'z' -> correct it: noise holds nothing": Own(lambda u, s, n, c: n["z"]),
    "noise(params) returns dict": Own(each(lambda g: g), declared=dict),
    "init(params): is list": Own(each(lambda g: g), begin=list),
    "keeps a state and acts on each example": Own(each(lambda g: g), begin=lambda: {"m": BATCH[0]}, per_example=True),
}


@pytest.mark.parametrize("problem", STAGES)
def test_check_reports_a_stage_that_breaks_the_contract(problem):
    stage = STAGES[problem]
    result = problems_of(Defence("own", step=chain(mine=stage)))
    assert problem in result
    assert ("step.mine: " if stage.per_example else "step.mine") in result
    if not stage.per_example and not stage.declared():
        assert problem in problems_of(Defence("own", send=chain(back=Feedback(stage)))) or "state" in problem


BATCHES = {
    "apply returns different results": OwnBatch(lambda b: Batch(b.inputs + torch.rand(1), b.targets)),
    "apply returns tuple": OwnBatch(lambda b: (b.inputs, b.targets)),
    "apply returns nothing": OwnBatch(lambda b: None),
    "holds 'inputs' as torch.float32 (1, 1, 4, 4)": OwnBatch(lambda b: Batch(b.inputs[:1], b.targets[:1])),
    "apply returns targets torch.int64 (1,) for 2 examples": OwnBatch(lambda b: Batch(b.inputs, b.targets[:1])),
    "apply modifies its input 'inputs' in place": OwnBatch(lambda b: Batch(b.inputs.mul_(2), b.targets)),
    "batch[0]: apply raised ZeroDivisionError": OwnBatch(lambda b: 1 / 0),
}


@pytest.mark.parametrize("problem", BATCHES)
def test_check_reports_a_batch_transform_that_breaks_the_contract(problem):
    assert problem in problems_of(Defence("own", batch=(BATCHES[problem],)))


SURGERIES = {
    "surgery <lambda>: returned NoneType, not a torch.nn.Module": lambda model, generator: None,
    "surgery <lambda>: it raised ZeroDivisionError": lambda model, generator: 1 / 0,
    "Dropout draws its mask from the global generator": lambda model, generator: nn.Sequential(model, nn.Dropout()),
    "has 2 outputs, too few": lambda model, generator: nn.Sequential(model, nn.Linear(3, 2)),
}


@pytest.mark.parametrize("problem", SURGERIES)
def test_check_reports_a_model_replacement_that_breaks_the_contract(problem):
    try:
        result = problems_of(Defence("own", model=(SURGERIES[problem],)))
    except GradveilError as error:
        result = str(error)
    assert problem in result


def test_check_reports_a_model_replacement_without_its_generator():
    widened = Defence("own", model=(lambda model, generator: nn.Sequential(model, nn.Linear(3, 3)),))
    weights = [widened(Client(net()), Key(seed)).params()["1.weight"] for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def good(name: str) -> Defence:
    class Rounds(Own, HasMessages):
        def announce(self, proposals, previous, number):
            return {"scale": torch.tensor(2.0)}

    noisy = lambda: NoiseSpec({"1.bias": Noise((3,), Normal())})  # noqa: E731
    stages = {
        "noise": Own(lambda u, s, n, c: (u | {"1.bias": u["1.bias"] + n["1.bias"]}, s), declared=noisy),
        "state": Own(lambda u, s, n, c: (u, {"n": s["n"] + 1}), begin=lambda: {"n": torch.zeros(())}),
        "messages": Rounds(lambda u, s, n, c: ({k: g * c.messages["scale"] for k, g in u.items()}, s)),
        "gradient": Own(lambda u, s, n, c: ({k: u[k] + g for k, g in c.gradient(c.batch).items()}, s)),
    }
    return Defence(name, send=chain(own=stages[name]))


@pytest.mark.parametrize("name", ["noise", "state", "messages", "gradient"])
def test_check_accepts_valid_stages(name):
    assert problems_of(good(name)) == ""
    assert problems_of(parse("dropout(where='2')") + good(name)) == ""


WRONG = {
    "defence.send: is Own": lambda own: Defence("x", send=own),
    "defence.send: acts on each example's gradient": lambda own: Defence("x", send=chain(own=own)),
    "defence.batch: is OwnBatch": lambda own: Defence("x", batch=OwnBatch(None)),
    "defence.model: is <function": lambda own: Defence("x", model=net),
    "chain.own: is the class Own -> make one: Own(...)": lambda own: chain(own=Own),
    "chain.own: changes the batch": lambda own: chain(own=OwnBatch(None)),
    "chain.own: is 3, not a Transform": lambda own: chain(own=3),
    "chain.own: has no stage": lambda own: chain(own=type("Bare", (Transform,), {"apply": Own.apply})()),
}


@pytest.mark.parametrize("problem", WRONG)
def test_defence_built_from_wrong_objects_raises(problem):
    with pytest.raises(GradveilError) as error:
        WRONG[problem](Own(None, per_example=True))
    assert problem in str(error.value)
