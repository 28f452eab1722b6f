"""A custom defence's declared noise is checked against its draws before a bound rests on it."""

from dataclasses import dataclass

import pytest
import torch

from gradveil.client import Client
from gradveil.core.noise import Key, Laplace, Noise, NoiseSpec, Normal, Uniform
from gradveil.core.tree import tmap
from gradveil.defences import Defence, Gaussian, Laplacian, chain
from gradveil.defences.additive_noise import Additive
from gradveil.defences.fisher_information import obstacle
from gradveil.defences.user_defence import faults, misstated
from tests.laws.cases import Tiny, draw_batch

PLAIN = Client(Tiny())
WIDE = Client(Tiny(8))
BATCH = draw_batch(Key(0))


@dataclass(frozen=True)
class Own(Additive):
    """Noise of any law, and any claim."""

    law: Uniform | Normal | Laplace
    claimed: float
    scale: float = 1.0

    def variance(self, examples):
        return self.claimed

    def noise(self, params):
        return NoiseSpec({n: Noise(tuple(p.shape), self.law, dtype=p.dtype) for n, p in params.items()})

    def apply(self, update, state, noise, context):
        return {name: value + self.scale * noise[name] for name, value in update.items()}, state


class OneForAll(Own):
    """Adds one number to all entries, so that their differences have no noise."""

    def noise(self, params):
        return NoiseSpec({"z": Noise((), self.law, dtype=torch.float64)})

    def apply(self, update, state, noise, context):
        return tmap(lambda value: value + noise["z"], update), state


class ByColumns(Own):
    """Adds the same to all rows of a matrix."""

    def apply(self, update, state, noise, context):
        return {n: v + noise[n][:1] if v.dim() > 1 else v + noise[n] for n, v in update.items()}, state


class Multiplied(Own):
    """Multiplies, and adds nothing to what is zero."""

    def apply(self, update, state, noise, context):
        return {name: value * (1 + noise[name]) for name, value in update.items()}, state


class Peeking(Own):
    """Adds more where images are bright."""

    def apply(self, update, state, noise, context):
        return tmap(lambda value, z: value + z * context.batch.inputs.mean(), update, noise), state


class ByLayer(Own):
    """Adds less to some parameters than to others."""

    def apply(self, update, state, noise, context):
        return {n: v + noise[n] * (0.1 if n == "head.weight" else 1.0) for n, v in update.items()}, state


TRUE = [
    Own(Normal(), 1.0),
    Own(Normal(), 0.5),
    Own(Normal(), 1e-12, scale=1e-6),
    Own(Normal(3.0), 9.0),
    Own(Laplace(), 1.0),
    Own(Uniform(-1.0, 1.0), 0.0),
    ByLayer(Normal(), 0.01),
]
FALSE = {
    "variance(4) = 1.2": Own(Normal(), 1.2),
    "variance(4) = 2": Own(Laplace(), 2.0),
    "variance(4) = 0.333": Own(Uniform(-1.0, 1.0), 1 / 3),
    "variance(4) = 1,": OneForAll(Normal(), 1.0),
    "draws of 'block.0.weight'": ByColumns(Normal(), 1.0),
    "depends on the update": Multiplied(Normal(), 1.0),
    "depends on the examples": Peeking(Normal(), 1.0),
    "draws of 'head.weight'": ByLayer(Normal(), 1.0),
}


@pytest.mark.parametrize("stage", TRUE, ids=str)
@pytest.mark.parametrize("client", [PLAIN, WIDE], ids=["small", "large"])
def test_true_claims_are_believed(client, stage):
    assert misstated(stage, client, BATCH) is None


@pytest.mark.parametrize("what", FALSE)
def test_false_claims_are_told_and_nothing_is_bounded(what):
    defence = Defence("own", send=chain(own=FALSE[what]))
    client = defence(WIDE)
    assert what in " | ".join(map(str, faults(defence, client, BATCH)))
    assert what in str(obstacle(client, BATCH))


def test_the_tables_own_noise_says_what_its_draws_say():
    for stage in (Gaussian(0.1), Gaussian(0.4, "sum"), Laplacian(0.1)):
        assert misstated(stage, WIDE, BATCH) is None
    said = obstacle(Defence("own", send=chain(own=Own(Normal(), 1.0)))(WIDE), BATCH)
    assert said is None
