"""Clipping: no update, or no example's gradient, is longer than a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from gradveil.core.allowed import BOUND, Flag, collect
from gradveil.core.errors import refuse
from gradveil.core.noise import Noise, NoiseSpec, Uniform
from gradveil.core.tree import Tensors, norm
from gradveil.core.types import Context, Stage, Transform


@dataclass(frozen=True)
class Clip(Transform):
    """Scale by 1 / max(1, ||g|| / norm), where ||g|| is taken over all layers together (Abadi et al. 2016, Alg. 1).

    With `per_example` every example's gradient is clipped before they are averaged: the first half of DP-SGD.
    """

    norm: float
    per_example: bool = False
    stage: ClassVar[Stage] = Stage.CLIP
    guarantee: ClassVar[str] = "bounds the norm; no formal privacy guarantee without noise"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        refuse(collect("clip", (("norm", BOUND, self.norm), ("per_example", Flag(), self.per_example))))

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare `factor`, the scale in (0, 1], which may be pinned."""
        dtype = next(iter(params.values())).dtype
        return NoiseSpec({"factor": Noise((), Uniform(), neutral=1.0, dtype=dtype, lower=0.0, upper=1.0)})

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Scale the whole update by one factor."""
        factor = noise["factor"] if "factor" in noise else 1 / (norm(update) / self.norm).clamp(min=1)
        return {name: value * factor for name, value in update.items()}, state

    def smallest(self) -> Mapping[str, Any]:
        """Without a bound nothing is clipped."""
        return {"norm": float("inf")}
