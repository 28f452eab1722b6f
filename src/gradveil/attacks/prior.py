"""What images look like, as penalties on [N, B, C, H, W]: one number a row."""

from __future__ import annotations

from torch import Tensor


def energy(x: Tensor) -> Tensor:
    """Mean over the images of the Euclidean norm (the l2 prior of Yin et al. 2021)."""
    return x.flatten(2).square().sum(2).clamp_min(1e-24).sqrt().mean(1)
