"""Additive noise on what is sent, declared by name with a standard distribution."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.noise import Laplace, Law, Noise, NoiseSpec, Normal
from gradveil.core.settings import Bound, Checked, Range, Strength
from gradveil.core.tree import Tensors
from gradveil.core.types import Context, Multiplier, Stage, Transform
from gradveil.defences.entry import DefenceEntry

On = Annotated[Literal["mean", "sum"], "What the noise is scaled for: the mean over the batch, or the sum before it."]
Std = Annotated[Strength, "Standard deviation of the noise."]
Clamp = Annotated[Bound, "Magnitude to which entries are cut before the noise."]


def clamped(update: Tensors, bound: float) -> Tensors:
    """Cut every entry to [-bound, bound]; an infinite bound changes nothing."""
    return {n: value.clamp(-bound, bound) for n, value in update.items()} if math.isfinite(bound) else update


class Additive(Transform):
    """Base of transforms that add independent noise of one law to every entry."""

    stage: ClassVar[Stage] = Stage.NOISE

    @abstractmethod
    def variance(self, examples: int) -> float:
        """Return one over the Fisher information of an entry's place, on the mean over so many examples."""

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Nothing is done while all of the noise is off."""
        return Multiplier() if params.keys() <= set(off) else None


@dataclass(frozen=True)
class Gaussian(Checked, Additive):
    """Add N(0, std^2) to every entry.

    With `on="sum"` the noise has that standard deviation on the *sum* over the batch, so std / B on the mean that is
    sent: DP-SGD's convention (Abadi et al. 2016, Alg. 1), with std = sigma * tau.

    With a finite `clamp` C, entries are first cut to [-C, C]: the "DP-SGD" of Chen, Gürsoy and Lei 2024. That bounds no
    norm that an accountant could use, but it brings no two updates further apart, so a clip before it still counts.
    """

    std: Std
    on: On = "mean"
    scaled_to: Annotated[float | None, Range(0, low_open=True, unlimited=True, optional=True)] = None
    """The clip norm that the standard deviation was chosen for; checked against what the clips before it bound."""
    clamp: Clamp = math.inf
    label: ClassVar[str] = "gaussian"
    guarantee: ClassVar[str] = "differential privacy only after a clip; an accountant gives epsilon"
    identity_settings: ClassVar = {"std": 0.0, "clamp": math.inf}

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Nothing is done while all of the noise is off and entries are not cut."""
        return None if math.isfinite(self.clamp) else super().multiplier(params, noise, off)

    def on_mean(self, value: float, examples: int) -> float:
        """Convert what is measured where the standard deviation is to the mean over so many examples."""
        return value / examples if self.on == "sum" else value

    def variance(self, examples: int) -> float:
        """Return std^2 on the mean over so many examples."""
        return self.on_mean(self.std, examples) ** 2

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one standard normal tensor a parameter."""
        return _additive(params, Normal())

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Cut the entries, if that is wanted, and add the scaled noise."""
        update = clamped(update, self.clamp)
        std = self.on_mean(self.std, context.divisor)
        if std > torch.finfo(next(iter(update.values())).dtype).max:  # no scalar of this dtype, and the sum is infinite
            return {name: value + std * noise[name] for name, value in update.items()}, state
        return {name: torch.add(value, noise[name], alpha=std) for name, value in update.items()}, state


@dataclass(frozen=True)
class Laplacian(Checked, Additive):
    """Add Laplace(0, scale) to every entry: standard deviation sqrt(2) * scale (Zhu et al. 2019, sec. 5.1).

    It would be differentially private after a clip of the l1 norm. Gradveil's clips bound the l2 norm, by which the l1
    norm of P entries can be sqrt(P) times as long: nothing is promised.
    """

    scale: Annotated[Strength, "Scale of the noise: its standard deviation over the root of two."]
    label: ClassVar[str] = "laplace"
    guarantee: ClassVar[str] = "no formal guarantee: that takes a bound of the l1 norm, and clips bound the l2 norm"
    identity_settings: ClassVar = {"scale": 0.0}

    def variance(self, examples: int) -> float:
        """Return scale^2: half of what is usually called the variance."""
        return self.scale**2

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one Laplace(0, 1) tensor a parameter."""
        return _additive(params, Laplace())

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Add the scaled noise."""
        return {name: torch.add(value, noise[name], alpha=self.scale) for name, value in update.items()}, state


def _additive(params: Mapping[str, Tensor], law: Law) -> NoiseSpec:
    return NoiseSpec({name: Noise(tuple(p.shape), law, neutral=0.0, dtype=p.dtype) for name, p in params.items()})


def _gaussian(std: Std, clamp: Clamp = math.inf) -> Gaussian:
    return Gaussian(std, clamp=clamp)


NOISES = (
    DefenceEntry(
        name="gaussian",
        factory=_gaussian,
        stage="noise",
        description="Add normal noise to the update",
        changes=("send",),
        guarantee=Gaussian.guarantee,
        cost="a random number an entry: 1.1 to 1.3 gradients; all bytes",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        identity={"std": 0.0},
    ),
    DefenceEntry(
        name="laplace",
        factory=Laplacian,
        stage="noise",
        description="Add Laplace noise to the update",
        changes=("send",),
        cost="a random number an entry; all bytes",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        identity={"scale": 0.0},
    ),
)
