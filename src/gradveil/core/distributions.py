"""Distributions for batch defences: mixing coefficients, signs, and one choice out of several."""

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
        """Return (1 - alpha) sum(ln v + ln(1 - v)) per row: -log density up to a constant."""
        # In float32, 1 - 1e-12 is 1, where the logarithm of 1 - v is not finite.
        inside = value.reshape(len(value), -1).clamp(_TINY, 1 - max(_TINY, torch.finfo(value.dtype).eps))
        return (1 - self.alpha) * (inside.log() + torch.log1p(-inside)).sum(1)


@dataclass(frozen=True)
class Shares:
    """Coefficients [..., k] that add up to 1: magnitudes of normal numbers divided by their sum.

    None is above `cap`; the first two add up to at least `least`.
    """

    cap: float = 1.0
    least: float = 0.0

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU, by rejection sampling."""
        drawn = self._shares(shape, source)
        # Only rows outside of the limits are replaced: a row's law is that of the shares, given the limits.
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
        """Return the sum of 1 - v^2 per row: zero at the signs."""
        return (1 - value.square()).flatten(1).sum(1)


@dataclass(frozen=True)
class OneOf:
    """One-hot vectors along the last dimension, each position equally likely."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU."""
        place = integers(shape[-1], shape[:-1], source)
        return torch.nn.functional.one_hot(place, shape[-1]).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return how far the weights of each row are from adding up to 1, squared."""
        return (value.sum(-1) - 1).square().reshape(len(value), -1).sum(1)


@dataclass(frozen=True)
class Agreed:
    """Normal numbers that all clients share, drawn from a public key.

    Leading dimensions beyond `shape` (clients of an aggregation group) repeat them.
    """

    key: Key
    shape: tuple[int, ...]
    public: ClassVar[bool] = True
    """A deployment accepts that it draws nothing from the secret stream."""

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Return the shared numbers on the CPU, whatever the source."""
        return Normal().sample(self.shape, dtype, self.key.generator()).expand(shape).clone()

    def penalty(self, value: Tensor) -> Tensor:
        """Return zero: the numbers are public."""
        return torch.zeros(len(value), dtype=value.dtype, device=value.device)
