"""Custom stages, and the privacy found for a client that uses them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.client import Client, Local
from gradveil.core.noise import Key, Noise, NoiseSpec, Normal, Uniform
from gradveil.core.tree import tmap
from gradveil.core.types import Batch, BatchTransform, Context, Stage, Transform
from gradveil.defences import Chain, Clip, Defence, Gaussian, chain, parse
from gradveil.defences.guarantees import examine
from gradveil.defences.privacy_warnings import suspicions
from gradveil.theory.accounting import Participation
from tests.laws.cases import Tiny, draw_batch

PLAIN = Client(Tiny())
TRAINED = Client(Tiny(), local=Local(2, 0.3, steps=3))
BATCH = draw_batch(Key(0))
LAYERS = len(PLAIN.trained())


def found(defence: str | Defence, client: Client = PLAIN):
    built = parse(defence) if isinstance(defence, str) else defence
    return examine(built(client), BATCH)


def multipliers(defence: str | Defence, client: Client = PLAIN):
    return {m.unit: m.multiplier for m in found(defence, client).mechanisms}


def warned(defence: str | Defence, training: Participation | None = None, client: Client = PLAIN) -> list[str]:
    problems = [*suspicions((parse(defence) if isinstance(defence, str) else defence)(client), BATCH, training)]
    assert all(problem.severity == "warning" for problem in problems)
    return [f"{problem.where}: {problem.what}" for problem in problems]


class Peeking(Transform):
    """Scales by the mean of the private inputs."""

    stage = Stage.QUANTISE

    def apply(self, update, state, noise, context: Context):
        return tmap(lambda value: value * context.batch.inputs.mean(), update), state


class Counting(Transform):
    """Scales by the number of classes in the private batch."""

    stage = Stage.QUANTISE

    def apply(self, update, state, noise, context: Context):
        return tmap(lambda value: value * len(context.batch.targets.unique()), update), state


class Differentiating(Transform):
    """Sends the gradient once more, beside the noise."""

    stage = Stage.QUANTISE

    def apply(self, update, state, noise, context: Context):
        assert context.gradient is not None
        return tmap(torch.add, update, context.gradient(context.batch)), state


@dataclass(frozen=True)
class Seeded(Transform):
    """Draws its noise from a seed in the program: the same for all who run it."""

    stage: ClassVar[Stage] = Stage.NOISE

    def apply(self, update, state, noise, context):
        return {
            n: v + torch.randn(v.shape, generator=Key(3).generator(), dtype=v.dtype) for n, v in update.items()
        }, state


@dataclass(frozen=True)
class Deaf(Normal):
    """A law that does not listen to its generator."""

    def sample(self, shape, dtype, generator):
        return super().sample(shape, dtype, Key(3).generator())


@dataclass(frozen=True)
class Repeating(Gaussian):
    """Declares its noise, and draws the same for every key."""

    def noise(self, params):
        return NoiseSpec({n: Noise(tuple(p.shape), Deaf(), dtype=p.dtype) for n, p in params.items()})


class Mixing(BatchTransform):
    """Adds a neighbour to every example."""

    def noise(self, batch):
        return NoiseSpec()

    def apply(self, batch, noise, domain):
        return Batch(batch.inputs + batch.inputs.roll(1, 0), batch.targets)


def after_dp(transform: Transform) -> Defence:
    return parse("dp(clip=1, sigma=2)") + Defence("mine", send=chain(mine=transform))


class Loose(Clip):
    """Clips to three times the norm that it declares."""

    def apply(self, update, state, noise, context):
        return Clip(3 * self.norm).apply(update, state, noise, context)


class Faint(Gaussian):
    """Adds a third of the noise that it declares."""

    def in_round(self, number):
        return Gaussian(self.std / 3)


class Even(Clip):
    """Clips nothing: its factors are ones, whatever the norms are."""

    def _factors(self, squares):
        return tmap(torch.ones_like, squares)


class Narrow(Gaussian):
    """Declares noise of another law than the one that it is accounted for."""

    def noise(self, params):
        return NoiseSpec({n: Noise(tuple(p.shape), Uniform(-1e-3, 1e-3), dtype=p.dtype) for n, p in params.items()})


class Silent(Chain):
    """Skips its stages."""

    def apply(self, update, state, noise, context):
        return update, state


class Documented(Gaussian):
    """Describes itself differently, and does the same."""

    guarantee: ClassVar[str] = "that of the house"
