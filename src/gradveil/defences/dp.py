"""Clipping and the mechanisms of differential privacy, fixed and decaying over rounds.

Gradients get shorter as training goes on; a fixed bound soon clips nothing, and its noise drowns what is left (Wei et
al. 2021). In round n = 0, 1, ... both are multiplied by decay^n. Since the noise is a constant multiple of what one
example can change, every round promises what the first does: the accounting is that of a fixed clip, whatever number of
the round a server sends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.chain import chain
from gradveil.core.errors import fail
from gradveil.core.noise import Noise, NoiseSpec, Uniform
from gradveil.core.settings import Bound, Checked, Kept, Strength
from gradveil.core.tree import Tensors, root, tmap
from gradveil.core.types import Context, Multiplier, Stage, Transform
from gradveil.defences.additive_noise import Gaussian, On
from gradveil.defences.composition import Defence
from gradveil.defences.entry import DefenceEntry

Decay = Annotated[Kept, "Factor of clip and noise from one round to the next."]
Sigma = Annotated[Strength, "Noise multiplier: standard deviation of the noise over the norm."]


@dataclass(frozen=True)
class Clip(Checked, Transform):
    """Scale by 1 / max(1, ||g|| / norm), where ||g|| is taken over all layers together (Abadi et al. 2016, Alg. 1).

    With `per_example` every example's gradient is clipped before they are averaged: the first half of DP-SGD. With
    `scope="layer"` each parameter tensor g_l is scaled by its own 1 / max(1, ||g_l|| / norm) (Wei et al. 2021).

    What is not finite, or so long that the square of its norm is not, becomes zero: the bound has to hold for every
    example, whatever is in it.
    """

    norm: Annotated[Bound, "Largest norm."]
    per_example: Annotated[bool, "Clip each example's gradient, before they are averaged."] = False
    scope: Annotated[Literal["all", "layer"], "Norm of all parameters together, or of each tensor by itself."] = "all"
    label: ClassVar[str] = "clip"
    stage: ClassVar[Stage] = Stage.CLIP
    guarantee: ClassVar[str] = "bounds the norm; no formal privacy guarantee without noise"
    identity_settings: ClassVar = {"norm": float("inf")}

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
            # Infinity times a factor of zero would be NaN.
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
"""The least share of clip and noise: in float32 smaller ones would be zero."""


def share(decay: float, number: int) -> float:
    """Return what clip and noise are multiplied by in round `number` = 0, 1, ...

    >>> [share(0.5, number) for number in (0, 1, 2, 1000)]
    [1.0, 0.5, 0.25, 1e-06]
    """
    return max(decay**number, BASELINE)


@dataclass(frozen=True)
class FadingClip(Clip):
    """A `Clip` to norm decay^n in round n."""

    decay: Decay = 1.0

    def in_round(self, number: int) -> Clip:
        """Return the clip of a round."""
        return Clip(self.norm * share(self.decay, number), self.per_example, self.scope)


@dataclass(frozen=True)
class FadingNoise(Gaussian):
    """`Gaussian` noise of std decay^n in round n."""

    decay: Decay = 1.0

    def in_round(self, number: int) -> Gaussian:
        """Return the noise of a round."""
        now = share(self.decay, number)
        return Gaussian(self.std * now, self.on, None if self.scaled_to is None else self.scaled_to * now)


def _clip(norm: Annotated[Bound, "Largest norm of an update."]) -> Clip:
    return Clip(norm)


def _clip_example(norm: Annotated[Bound, "Largest norm of an example's gradient."]) -> Clip:
    return Clip(norm, per_example=True)


def _dp(
    clip: Annotated[Bound, "Largest norm of an example's gradient."] = 20.0, sigma: Sigma = 1e-3, on: On = "sum"
) -> Defence:
    """DP-SGD: clip each example's gradient to `clip`, then add noise of std sigma * clip on the sum (or mean)."""
    return Defence("dp", step=chain(clip=Clip(clip, per_example=True), noise=_scaled("dp", clip, sigma, on)))


def _fed_cdp(
    clip: Annotated[Bound, "Largest norm of a parameter tensor of an example's gradient."] = 4.0,
    sigma: Sigma = 6.0,
    decay: Decay = 1.0,
) -> Defence:
    """Clip each tensor of each example's gradient, and add noise; both are multiplied by `decay` after every round.

    The authors' schedule could not be verified; this one keeps the noise multiplier, and so what is proven.
    """
    by_layer, noise = Clip(clip, per_example=True, scope="layer"), _scaled("fed-cdp", clip, sigma, "sum")
    if decay != 1:
        by_layer, noise = FadingClip(**_settings(by_layer), decay=decay), FadingNoise(**_settings(noise), decay=decay)
    return Defence("fed-cdp", step=chain(clip=by_layer, noise=noise))


def _user_dp(clip: Annotated[Bound, "Largest norm of an update."] = 1.0, sigma: Sigma = 1.0) -> Defence:
    return Defence("user-dp", send=chain(clip=Clip(clip), noise=_scaled("user-dp", clip, sigma, "mean")))


def _settings(transform: Clip | Gaussian) -> dict[str, Any]:
    return {field.name: getattr(transform, field.name) for field in fields(transform)}


def _scaled(name: str, clip: float, sigma: float, on: Literal["sum", "mean"]) -> Gaussian:
    if sigma and clip == float("inf"):
        raise fail(f"{name}.clip", "is infinite, and the noise is sigma times as large", "give a finite norm")
    return Gaussian(sigma * clip if sigma else 0.0, on, scaled_to=clip)


CLIPS = (
    DefenceEntry(
        name="clip",
        factory=_clip,
        stage="clip",
        description="Scale the update down to a norm",
        changes=("send",),
        guarantee=Clip.guarantee,
        cost="two passes over the update; all bytes",
        citation="Pascanu et al. 2013, On the difficulty of training recurrent neural networks",
        identity={"norm": float("inf")},
    ),
    DefenceEntry(
        name="clip-example",
        factory=_clip_example,
        stage="clip",
        description="Scale each example's gradient down to a norm before averaging",
        changes=("step",),
        guarantee=Clip.guarantee,
        cost="about 2 gradients; all bytes",
        citation="Abadi et al. 2016, Deep Learning with Differential Privacy",
        identity={"norm": float("inf")},
    ),
)
PRIVATE = (
    DefenceEntry(
        name="dp",
        factory=_dp,
        description="DP-SGD: clip each example's gradient, add normal noise of sigma times the clip norm",
        changes=("step",),
        guarantee="differential privacy of examples; epsilon follows from sigma, sampling rate and steps",
        cost="2 gradients; all bytes",
        citation="Abadi et al. 2016, Deep Learning with Differential Privacy",
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="fed-cdp",
        factory=_fed_cdp,
        description="Fed-CDP: clip each example's gradient layer by layer, add normal noise of sigma times the norm",
        changes=("step",),
        guarantee="differential privacy of examples; over L parameter tensors the sensitivity is clip sqrt(L)",
        cost="about 2 gradients; all bytes",
        citation="Wei et al. 2021, Gradient-Leakage Resilient Federated Learning (ICDCS)",
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="user-dp",
        factory=_user_dp,
        description="Clip the whole update that a client sends, add normal noise of sigma times the norm",
        changes=("send",),
        guarantee="differential privacy of clients, towards whoever sees one update or a sum of them",
        cost="a random number an entry; all bytes",
        citation="McMahan et al. 2018, Learning Differentially Private Recurrent Language Models (ICLR)",
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
)
"""Defences with a formal guarantee."""
