"""Quantising: few bits an entry, rounded in a fixed way or at random."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.allowed import BOUND, COUNT, Choice, collect
from gradveil.core.errors import refuse
from gradveil.core.noise import Noise, NoiseSpec, Normal, Uniform
from gradveil.core.tree import Tensors, peak, select, straight_through, under
from gradveil.core.types import Context, Stage, Transform

SIZE = Choice(("mean", "unit"))
"""What a sign is multiplied by: the mean magnitude of its layer, or one."""
_ROUNDING = 1e-5
"""Intervals are wider by this share of a level, more than arithmetic in float32 is wrong by."""
SCALE = Choice(("l2", "max"))
"""What a layer's largest level stands for: the layer's norm, or its largest magnitude."""


class Rounding(Transform):
    """Base of transforms that round: what was sent says in which interval an entry was before.

    What was sent is an intermediate `sent.<parameter>`. Where it is pinned, an entry within the interval that may be
    rounded to it comes out as what was sent, any other as that plus what lies outside: so an attacker who compares is
    charged for nothing that the rounding may have done.
    """

    stage: ClassVar[Stage] = Stage.QUANTISE

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare what was sent, which may be pinned."""
        own = {name: Noise(tuple(p.shape), Normal(), dtype=p.dtype) for name, p in params.items()}
        return NoiseSpec(own).under("sent")

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return what was sent, as it is; nothing where a later transform changed it."""
        return under("sent", sent) if exact else {}

    @abstractmethod
    def interval(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest entries that may be rounded to what was sent."""

    def charged(self, value: Tensor, sent: Tensor) -> Tensor:
        """Add to what was sent by how much an entry lies outside of its interval."""
        low, high = self.interval(sent)
        return sent + (value - torch.minimum(torch.maximum(value.detach(), low), high))


@dataclass(frozen=True)
class Sign(Rounding):
    """Send sign(g) times the mean of |g| in each layer (Bernstein et al. 2018; with the scale Karimireddy et al. 2019).

    The exact derivative is zero. An attacker's is that of g / (|g| + mean |g|), times the scale: an entry that is
    small in its layer may still turn, so it counts more than a large one. With the identity as the surrogate instead,
    an attacker who simulates the signs does worse than one who ignores them. He does better, too, with the masks of
    his own update than with an earlier pruning's zeros pinned: that pruned entries are small is much of what he sees.
    """

    scale: Literal["mean", "unit"] = "mean"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        refuse(collect("sign", (("scale", SIZE, self.scale),)))

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Replace every entry by its sign, zero by zero."""
        seen = select(noise, "sent")
        return {n: self._compared(v, seen[n]) if n in seen else self._signs(v) for n, v in update.items()}, state

    def interval(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the half line of each sign; zero was zero."""
        none = torch.zeros_like(sent)
        return torch.where(sent < 0, -torch.inf, none), torch.where(sent > 0, torch.inf, none)

    def _compared(self, value: Tensor, sent: Tensor) -> Tensor:
        """Bring a layer to the mean magnitude that was sent: an update near zero explains no sign."""
        mean = value.abs().mean()
        return self.charged(value * (peak(sent.abs()) / torch.where(mean > 0, mean, 1.0)), sent)

    def _signs(self, value: Tensor) -> Tensor:
        fixed = value.detach()
        mean = fixed.abs().mean()
        size = mean if self.scale == "mean" else torch.ones_like(mean)
        smooth = value / (fixed.abs() + mean + torch.finfo(value.dtype).tiny)
        return straight_through(size * fixed.sign(), size * smooth)


@dataclass(frozen=True)
class Quantise(Rounding):
    """Round |g| at random to one of 0, s/L, 2s/L, ..., s, so that the mean is g (Alistarh et al. 2017, QSGD).

    s is the layer's Euclidean norm or its largest magnitude, L = `levels`. An entry between two levels is rounded up
    with the probability of its place between them: where u < frac(L |g| / s), with u ~ U[0, 1) named like its
    parameter. One level and the largest magnitude make TernGrad (Wen et al. 2017). A finite `clip` limits |g| to so
    many times the layer's root mean square first, which TernGrad does at 2.5 and which costs the unbiasedness; unlike
    the standard deviation of the paper the root mean square is not zero in a layer of one entry.

    The neutral u = 1 is never drawn: it stands for no rounding, so that what is sent is its mean. An attacker's
    derivative is that of g + (1/2 - u) s/L, rounding's linear part: one in g, and there for whoever optimises u.

    Zeros of an earlier pruning show. Reading an entry that was rounded to zero as pruned is wrong only in the norm.
    """

    levels: int
    scale: Literal["l2", "max"] = "l2"
    clip: float = float("inf")
    shows_zeros: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        checks = (("levels", COUNT, self.levels), ("scale", SCALE, self.scale), ("clip", BOUND, self.clip))
        refuse(collect("quantise", checks))

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one uniform number an entry."""
        return uniform(params)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Round every entry to a level."""
        seen = select(noise, "sent")
        return {
            name: self.charged(value, seen[name]) if name in seen else self._rounded(value, noise[name])
            for name, value in update.items()
        }, state

    def interval(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return one level less and one level more, of the same sign; what the clip may have cut has no upper end.

        A level is the smallest magnitude of the layer: where that is several levels, the interval is only wider.
        """
        size = sent.abs()
        level, top = -peak(torch.where(size > 0, -size, -torch.inf)) * (1 + _ROUNDING), peak(size)
        low, high = size - level, size + level
        if self.scale == "max":
            high = torch.minimum(high, torch.where(top > 0, top * (1 + _ROUNDING), torch.inf))
        if self.clip < float("inf"):
            high = torch.where(size >= (top if self.scale == "max" else top - level), torch.inf, high)
        return torch.where(sent < 0, -high, low), torch.where(sent < 0, -low, high)

    def _rounded(self, value: Tensor, u: Tensor) -> Tensor:
        if self.clip < float("inf"):
            bound = self.clip * value.detach().square().mean().sqrt()
            value = torch.maximum(torch.minimum(value, bound), -bound)
        fixed = value.detach()
        size = fixed.square().sum().sqrt() if self.scale == "l2" else peak(fixed.abs())
        place = fixed.abs() / torch.where(size > 0, size, torch.ones_like(size)) * self.levels
        below = place.floor()
        step = fixed.sign() * size / self.levels
        exact = torch.where(u < 1, step * (below + (u < place - below)), fixed)
        return straight_through(exact, value + step * (0.5 - u))


def uniform(params: Mapping[str, Tensor]) -> NoiseSpec:
    """Declare U[0, 1) for every entry; 1, which is never drawn, switches the randomness off."""
    law = Uniform()
    return NoiseSpec(
        {name: Noise(tuple(p.shape), law, neutral=1.0, dtype=p.dtype, lower=0, upper=1) for name, p in params.items()}
    )
