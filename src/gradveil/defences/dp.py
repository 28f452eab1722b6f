"""Clipping and the mechanisms of differential privacy, fixed and decaying over rounds.

Gradients get shorter as training goes on; a fixed bound soon clips nothing, and its noise drowns what is left (Wei et
al. 2021). In round n = 0, 1, ... both are multiplied by decay^n. Since the noise is a constant multiple of what one
example can change, every round promises what the first does: the accounting is that of a fixed clip, whatever number of
the round a server tells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import refuse
from gradveil.core.noise import Noise, NoiseSpec, Uniform
from gradveil.core.settings import BOUND, KEPT, Choice, Flag, collect
from gradveil.core.tree import Tensors, root, tmap
from gradveil.core.types import Context, Multiplier, Stage, Transform
from gradveil.defences.additive_noise import Gaussian

SCOPE = Choice(("all", "layer"))
"""Whether the norm is taken over all parameters together, or each parameter tensor is clipped by itself."""


@dataclass(frozen=True)
class Clip(Transform):
    """Scale by 1 / max(1, ||g|| / norm), where ||g|| is taken over all layers together (Abadi et al. 2016, Alg. 1).

    With `per_example` every example's gradient is clipped before they are averaged: the first half of DP-SGD. With
    `scope="layer"` each parameter tensor g_l is scaled by its own 1 / max(1, ||g_l|| / norm) (Wei et al. 2021).

    What is not finite, or so long that the square of its norm is not, becomes zero: the bound has to hold for every
    example, whatever is in it.
    """

    norm: float
    per_example: bool = False
    scope: Literal["all", "layer"] = "all"
    stage: ClassVar[Stage] = Stage.CLIP
    guarantee: ClassVar[str] = "bounds the norm; no formal privacy guarantee without noise"
    identity_settings: ClassVar = {"norm": float("inf")}

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("norm", BOUND), ("per_example", Flag()), ("scope", SCOPE))
        refuse(collect("clip", ((name, allowed, getattr(self, name)) for name, allowed in settings)))

    def bound(self, layers: int) -> float:
        """Return the greatest norm that an update of so many parameter tensors can have: norm sqrt(L) by layers.

        >>> Clip(2.0).bound(9), Clip(2.0, scope="layer").bound(9)
        (2.0, 6.0)
        """
        return self.norm * math.sqrt(layers) if self.scope == "layer" else self.norm

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare `factor`, the scale in (0, 1], or one `factor.<parameter>` a layer; they may be pinned."""
        dtype = next(iter(params.values())).dtype
        factor = Noise((), Uniform(), neutral=1.0, dtype=dtype, lower=0.0, upper=1.0)
        if self.scope == "layer":
            return NoiseSpec(dict.fromkeys(params, factor)).under("factor")
        return NoiseSpec({"factor": factor})

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Scale the whole update by one factor, or each layer by its own."""
        if "factor" in noise:
            pinned = dict.fromkeys(update, noise["factor"])
        else:
            pinned = {name: noise[f"factor.{name}"] for name in update if f"factor.{name}" in noise}
        missing = update.keys() - pinned.keys()
        squares = {name: value.square().sum() for name, value in update.items()} if missing else {}
        factors = {**self._factors(squares), **pinned} if missing else pinned
        if self.norm < math.inf:
            update = {name: torch.nan_to_num(value, 0.0, 0.0, 0.0) for name, value in update.items()}
        return {name: value * factors[name] for name, value in update.items()}, state

    def _factors(self, squares: Mapping[str, Tensor]) -> Tensors:
        """Return 1 / max(1, ||g|| / norm) for all tensors together, or for each; zero where a square is not finite."""
        if self.scope == "layer":
            return tmap(self._factor, squares)
        return dict.fromkeys(squares, self._factor(torch.stack(list(squares.values())).sum(0)))

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Multiply by what the norms decide."""
        return Multiplier(numbers=self._factors, keeps_direction=self.scope == "all")

    def _factor(self, square: Tensor) -> Tensor:
        if self.norm == math.inf:
            return torch.ones_like(square)
        finite = square.isfinite()
        length = root(torch.where(finite, square, 0.0))
        return torch.where(finite, 1 / (length / self.norm).clamp(min=1), 0.0)


BASELINE = 1e-6
"""The least share of clip and noise: float32 could not tell smaller ones from nothing."""


def share(decay: float, number: int) -> float:
    """Return what clip and noise are multiplied by in round `number` = 0, 1, ...

    >>> [share(0.5, number) for number in (0, 1, 2, 1000)]
    [1.0, 0.5, 0.25, 1e-06]
    """
    return max(decay**number, BASELINE)


@dataclass(frozen=True)
class FadingClip(Clip):
    """A `Clip` to norm decay^n in round n."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        super().__post_init__()
        refuse(collect("clip", (("decay", KEPT, self.decay),)))

    def in_round(self, number: int) -> Clip:
        """Return the clip of a round."""
        return Clip(self.norm * share(self.decay, number), self.per_example, self.scope)


@dataclass(frozen=True)
class FadingNoise(Gaussian):
    """`Gaussian` noise of std decay^n in round n."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        super().__post_init__()
        refuse(collect("gaussian", (("decay", KEPT, self.decay),)))

    def in_round(self, number: int) -> Gaussian:
        """Return the noise of a round."""
        now = share(self.decay, number)
        return Gaussian(self.std * now, self.on, None if self.scaled_to is None else self.scaled_to * now)
