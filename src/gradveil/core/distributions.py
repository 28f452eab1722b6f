"""Distributions of what batch defences draw: mixing coefficients, signs, and one choice of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.special import betaincinv  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from gradveil.core.noise import Key, Normal, Source, integers, normal, uniform

_TINY = 1e-12


@dataclass(frozen=True)
class Beta:
    """Beta(alpha, alpha) on (0, 1), by the inverse of its distribution function."""

    alpha: float

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        u = uniform(shape, torch.float64, source)
        return torch.as_tensor(betaincinv(self.alpha, self.alpha, u.numpy())).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return (1 - alpha) sum(ln v + ln(1 - v)), a row: -log density up to a constant."""
        inside = value.reshape(len(value), -1).clamp(_TINY, 1 - _TINY)
        return (1 - self.alpha) * (inside.log() + torch.log1p(-inside)).sum(1)


@dataclass(frozen=True)
class Shares:
    """Coefficients [..., k] that add up to 1: magnitudes of normal numbers over their sum, none of them above `cap`.

    The first two of them add up to `least` or more.
    """

    cap: float = 1.0
    least: float = 0.0

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU; what exceeds the cap, or has too little of the first two, is drawn again."""
        drawn = self._shares(shape, source)
        while bool((bad := (drawn.amax(-1) > self.cap) | (drawn[..., :2].sum(-1) < self.least)).any()):
            drawn = torch.where(bad.unsqueeze(-1), self._shares(shape, source), drawn)
        return drawn.to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return how far the coefficients of each row are from adding up to 1, squared."""
        return (value.sum(-1) - 1).square().reshape(len(value), -1).sum(1)

    def _shares(self, shape: tuple[int, ...], source: Source) -> Tensor:
        size = normal(shape, torch.float64, source).abs()
        return size / size.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Signs:
    """-1 or 1 with equal probability."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        return (2 * integers(2, shape, source) - 1).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return the sum of 1 - v^2, a row: zero at the signs."""
        return (1 - value.square()).flatten(1).sum(1)


@dataclass(frozen=True)
class OneOf:
    """One 1 and otherwise 0 along the last dimension, each place as likely."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        place = integers(shape[-1], shape[:-1], source)
        return torch.nn.functional.one_hot(place, shape[-1]).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return how far the weights of each row are from adding up to 1, squared."""
        return (value.sum(-1) - 1).square().reshape(len(value), -1).sum(1)


@dataclass(frozen=True)
class Agreed:
    """Normal numbers that are the same for everybody: drawn from a key of their own, which is no secret.

    Leading dimensions beyond `shape` (clients that are summed) repeat them.
    """

    key: Key
    shape: tuple[int, ...]
    public: ClassVar[bool] = True
    """A deployment lets it draw nothing from its secret stream."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Return them on the CPU, whatever the source."""
        return Normal().sample(self.shape, dtype, self.key.generator()).expand(shape).clone()

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: nobody has to guess them."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)
