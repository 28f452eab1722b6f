"""Sampling: send a few entries, chosen at random and enlarged so that the mean is the gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.core.allowed import SHARE, collect
from gradveil.core.errors import refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, peak, select, tmap
from gradveil.core.types import Context
from gradveil.defences.prune import Pruning, share
from gradveil.defences.quantise import uniform
from gradveil.defences.selection import smallest_mask


@dataclass(frozen=True)
class MinMax(Pruning):
    """Keep each layer's k entries of largest w = (1/u - 1) g^2 and send g + C/g, C the (k+1)-th largest w.

    u ~ U[0, 1) is named like its parameter, k = P - floor(ratio * P) of P entries. Given the other entries one is kept
    with probability g^2 / (g^2 + C), so the mean of what is sent is g, and its sign never changes. It is the sampler
    that GLAUS (Yang et al. 2023) attacks.

    The neutral u = 1 is never drawn. It makes w and C zero: all is sent as it is, or with a pinned mask what that
    keeps. The zeros show the masks, but they are no `mask.*`, which attackers infer by themselves: to compare only what
    was drawn, as with pruned entries, throws away that small entries were left out, and does worse than the mean.
    """

    ratio: float
    prefix: ClassVar[str] = "kept"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        refuse(collect("minmax", (("ratio", SHARE, self.ratio),)))

    def removed(self) -> float:
        """Return the share of entries set to zero."""
        return self.ratio

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one uniform number an entry."""
        return uniform(params)

    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Keep the largest entries of each layer's weights w."""
        return tmap(self._keep_largest, update)

    def _keep_largest(self, weight: Tensor) -> Tensor:
        flat = weight.flatten()
        return ~smallest_mask(flat, share(self.ratio, flat.numel())).reshape(weight.shape)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Weigh, select (or take the pinned masks), and enlarge what is kept."""
        weights = {name: _weight(value, noise[name]) for name, value in update.items()}
        pinned = select(noise, self.prefix)
        missing = update.keys() - pinned.keys()
        drawn = self.masks(tmap(torch.detach, weights)) if missing else {}
        kept = {name: pinned[name].bool() if name in pinned else drawn[name] | (noise[name] >= 1) for name in update}
        return {name: _enlarged(value, weights[name], kept[name]) for name, value in update.items()}, state

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read the masks off the support, if it is still there: an entry rounded to zero would pass for C."""
        return super().evidence(sent, exact) if exact else {}

    def only_masks(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Tensors | None:
        """Return None: what is kept is enlarged as well, by more than one number."""
        return None

    def smallest(self) -> Mapping[str, Any]:
        """Nothing is removed."""
        return {"ratio": 0.0}


def _weight(value: Tensor, u: Tensor) -> Tensor:
    return (1 / u.clamp_min(torch.finfo(u.dtype).eps / 2) - 1) * value.square()


def _enlarged(value: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """Add C/g, where C is the largest weight that was left out."""
    left = peak(torch.where(kept, torch.zeros_like(weight), weight))
    there = kept & (value != 0)
    safe = torch.where(there, value, torch.ones_like(value))
    return torch.where(there, value + left / safe, torch.zeros_like(value))
