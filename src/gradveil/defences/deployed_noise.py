"""Clips and noise of deployed clients: exact clips, and normal noise on a grid.

A simulation adds floating-point noise. A deployed client must not: the set of possible sums depends on the value that
the noise is added to. `deployed` replaces all noise that a guarantee counts by the following.

**The argument.** Let C bound what one unit can change the vector x of d entries by, and let the grid be the multiples
of g, a power of two with g sqrt(d) <= C / 512.

1. x is rounded to the grid in float64. Each entry moves by g / 2 at most, so neighbours stay within
   C + g sqrt(d) <= C (1 + 1/512) for all data: nothing here is random.
2. Another C / 512 is left for rounding in float64 and float32 before that: examples are clipped one by one in float64
   and added up in float64, so that B examples are at most B^2 C 2^-52 off; where the rounding of an example's
   gradient depends on its neighbours in the batch (relatively 1e-6, on 1,000 examples 1e-3) it is covered as well.
3. The noise is n = rint(s z / g) steps, z normal, with s = sigma C (1 + 1/256): sigma times what neighbours can differ
   by. The multiplier that is accounted for stays sigma. `gradveil.core.secure_noise` draws n exactly.
4. x / g is a whole number, so x / g + rint(s z / g) = rint(x / g + s z / g): what is sent is a function of x + s z, the
   mechanism that all accountants take, and of nothing else. It is added up without rounding: below 2^53 steps. The
   update's dtype comes last, and is as much a function of it as every later stage.

The mean over a batch is on a grid of its own: C is then the clip norm over the number of examples (of Poisson sampling
the expected number), which no example changes. The division comes before the rounding, so nothing is divided after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.chain import Chain
from gradveil.core.errors import UNFIT, fail
from gradveil.core.noise import Noise, NoiseSpec
from gradveil.core.secure_noise import Rounded
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Context, Transform
from gradveil.defences.additive_noise import Gaussian, clamped
from gradveil.defences.dp import Clip
from gradveil.defences.guarantees import counted, known, stages

SLACK = 2.0**-8
"""Relative allowance beyond the bound: half for the grid, half for floating-point rounding."""


@dataclass(frozen=True)
class Grid:
    """Multiples of `step`, a power of two."""

    step: float

    @staticmethod
    def of(bound: float, entries: int) -> Grid:
        """Return the grid for vectors of so many entries, of which one unit can change no more than `bound`.

        >>> Grid.of(1.0, 11_000_000).step == 2.0**-21
        True
        """
        return Grid(2.0 ** math.floor(math.log2(bound * SLACK / 2 / math.sqrt(entries))))

    def scale(self, std: float) -> float:
        """Return the standard deviation of the noise in steps, enlarged by the slack."""
        return std * (1 + SLACK) / self.step


@dataclass(frozen=True)
class LatticeGaussian(Gaussian):
    """`Gaussian` noise of `std` on the mean in whole steps of a grid, on an update that is rounded to it."""

    grid: Grid = Grid(1.0)

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare an integer number of steps for each parameter."""
        law = Rounded(self.grid.scale(self.std))
        return NoiseSpec({name: Noise(tuple(p.shape), law, dtype=torch.int64) for name, p in params.items()})

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Round to the grid and add integer steps; only the final conversion to the update's dtype rounds again."""
        sent = {
            name: (value.double() / self.grid.step).round_().add_(noise[name]).mul_(self.grid.step)
            for name, value in clamped(update, self.clamp).items()
        }
        return {name: value.to(context.params[name].dtype) for name, value in sent.items()}, state


@dataclass(frozen=True)
class ExactClip(Clip):
    """`Clip` in float64: norms are computed from materialised gradients, and examples are summed in float64."""

    exact: ClassVar[bool] = True

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Scale in float64."""
        return super().apply({name: value.double() for name, value in update.items()}, state, noise, context)


@dataclass(frozen=True)
class Deployed:
    """A client with deployable noise."""

    client: Client
    without: str | None
    """Why some counted noise is not on a grid, which voids the guarantee; None if all of it is."""


def deployed(client: Client, batch: Batch) -> Deployed:
    """Replace the clips and the noise that the client's guarantee counts by exact clips and noise on a grid.

    Pass the client of a round (`scheduled`). Consecutive noises are drawn as one, with the sum of their variances. A
    client without a guarantee stays as it is. A client whose model or loss cannot be copied is refused, because every
    example needs its own copy.
    """
    chain = [stage for slot in (client.step, client.send) for _, stage in stages(slot)]
    runs = counted(client, batch)
    if not runs:
        return Deployed(client, None)
    params = client.params()
    entries = sum(params[name].numel() for name in client.trained())
    for index, stage in enumerate(chain):
        if known(stage, Clip):
            assert isinstance(stage, Clip)
            chain[index] = ExactClip(**{field.name: getattr(stage, field.name) for field in fields(Clip)})
    without = None
    for run in runs:
        if run.floating:
            without = f"noise in floating point ('{run.floating}') comes before the noise that counts"
        first, *rest = run.places
        noisy = chain[first]
        assert isinstance(noisy, Gaussian)
        grid = Grid.of(run.bound, entries)
        chain[first] = LatticeGaussian(math.sqrt(run.variance), clamp=noisy.clamp, grid=grid)
        for place in rest:
            chain[place] = Gaussian(0.0)
    if any(stage.exact for stage in chain if stage.per_example):
        try:
            client.objective.copied()
        except UNFIT as error:
            remedy = "remove objects that copy.deepcopy refuses, such as computed tensors, locks or open files"
            raise fail("client", f"has a model or a loss that cannot be copied ({error})", remedy) from error
    steps = len(stages(client.step))
    step, send = _like(client.step, chain[:steps]), _like(client.send, chain[steps:])
    return Deployed(replace(client, step=step, send=send), without)


def _like(slot: Transform | None, chain: list[Transform]) -> Transform | None:
    """Replace the stages of a slot and keep their names."""
    if slot is None or chain == [slot]:
        return slot
    if not isinstance(slot, Chain):
        return chain[0]
    return Chain(tuple((name, stage) for (name, _), stage in zip(slot, chain, strict=True)))
