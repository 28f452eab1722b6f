"""A prior of images that few public images determine: independent normal cosine coefficients.

Each coefficient of an image's discrete cosine transform has the public images' variance (a few low frequencies hold
nearly all of it), and none tells of another. Of all laws with these variances this one has the least information, so
bounds that rest on it are about an attacker who knows nothing else of images. Who knows more may do better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import fail

ROUNDING = 1 / 12 / 255**2
"""Least variance of a coefficient, in pixels of [0, 1]: that of rounding to eight bits."""


@dataclass(frozen=True)
class Spectrum:
    """Variances [C, H, W] of the orthonormal cosine coefficients of images."""

    variances: Tensor

    @property
    def variance(self) -> float:
        """The mean squared error of an attacker who sees no update and answers with the mean image."""
        return float(self.variances.mean())

    def groups(self) -> Tensor:
        """Share the coefficients out by falling variance, 1, 1, 2, 4, 8, ... to a group: masks [G, C, H, W]."""
        order = self.variances.flatten().argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        # Rank 0 is alone, ranks 1; 2 and 3; 4 to 7; ... follow: frexp counts the bits of a number.
        group = torch.frexp(rank.double())[1].reshape(self.variances.shape)
        return torch.stack([group == number for number in range(int(group.max()) + 1)])

    def information(self) -> Tensor:
        """Return the trace [G] of the prior's information over each group: the sum of 1 / variance."""
        return (self.groups() / self.variances).flatten(1).sum(1)


def spectrum(images: Tensor) -> Spectrum:
    """Estimate the variances from public images [N, C, H, W] in pixels of [0, 1].

    >>> flat = torch.tensor([0.25, 0.75]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    >>> [round(v, 3) for v in spectrum(flat).variances.flatten().tolist()]
    [0.5, 0.0, 0.0, 0.0]
    """
    if len(images) < 2:
        raise fail("spectrum.images", f"are {len(images)}, which have no variance", "give at least two public images")
    coefficients = cosine(images.double())
    return Spectrum(coefficients.var(0).clamp(min=ROUNDING))


def cosine(images: Tensor) -> Tensor:
    """Transform images [..., H, W] to their orthonormal cosine coefficients (DCT-II)."""
    rows, columns = (_basis(side, images) for side in images.shape[-2:])
    return rows @ images @ columns.mT


def from_cosine(coefficients: Tensor) -> Tensor:
    """Transform coefficients [..., H, W] back to images: the inverse, and the transpose, of `cosine`."""
    rows, columns = (_basis(side, coefficients) for side in coefficients.shape[-2:])
    return rows.mT @ coefficients @ columns


def _basis(side: int, like: Tensor) -> Tensor:
    """Return C[k, n] = sqrt((1 if k == 0 else 2) / N) cos(pi (n + 1/2) k / N)."""
    places = torch.arange(side, dtype=torch.float64)
    basis = math.sqrt(2 / side) * torch.cos(math.pi * (places + 0.5) * places[:, None] / side)
    basis[0] /= math.sqrt(2)
    return basis.to(like)
