"""Defences that spend noise, or zeros, where they hide most of the inputs for what they cost in utility.

After Chen, Gürsoy and Lei 2024, "Optimal Defenses Against Gradient Reconstruction Attacks": both minimise the
information sum_i ||dg_i/dx||^2 / s_i^2 that the update g has of the inputs x, under a bound of the utility lost. The
row norms are estimated by forward-mode products with random directions, as named noise (`gradveil.theory.sensitivity`).

With local training the norms are those of the gradient of all examples at the round's global parameters, with the
model's own noise (dropout) switched off, and stand in for those of the update. Of defences of each example that come
before (`clip-example`), they know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.allowed import BOUND, COUNT, SHARE, STRENGTH, Flag, collect
from gradveil.core.errors import refuse
from gradveil.core.noise import Noise, NoiseSpec, Normal, Uniform
from gradveil.core.tree import Tensors, below, norm, root, select, tmap, under
from gradveil.core.types import Context, Stage
from gradveil.defences.fitted import FORM, Fitted
from gradveil.defences.probed import OF, SHRINK, of_layer
from gradveil.defences.prune import SCOPE, Magnitude, rest
from gradveil.theory.sensitivity import norms
from gradveil.theory.utility import expected, global_ratio, optimal_variances

FLOOR = {"entry": 1e-8, "clamped": 1e-6, "layer": 1e-6}
"""Smallest |g| that a ratio is divided by: of an entry, of one that may be clamped, of a whole layer."""
CAP = 1e6
"""Largest ratio. These are the constants of the authors' program; the paper leaves them open."""


@dataclass(frozen=True)
class OptimalNoise(Fitted):
    """Add N(0, s_i^2) with s_i^2 proportional to r_i = ||dg_i/dx|| / |g_i|, scaled so that the mean of s_i^2 is std^2.

    So it adds as much noise as `Gaussian(std)`, elsewhere. With `layerwise` each parameter has one ratio
    ||dg/dx|| / ||g||. With a finite `clamp` C, entries are first cut to [-C, C], and those that were cut get no noise
    (the "optimal DP-SGD" of the paper, which is no differential privacy: the variances depend on the data).

    Where a row of dg/dx is zero (units behind a ReLU that is off) there is no noise, and none of the variance is spent;
    elsewhere ratios are capped. A few entries with tiny gradients can take most of the variance (one of 15,826 in an
    untrained LeNet took 70 %), so equal mean variance is not equal protection: compare by what attackers recover.

    That is the local form, fitted to the client's own batch. With `form="global"` expectations over public batches take
    the places of both norms (`gradveil.theory.utility.global_ratio`; Theorem 3's with a `clamp`), as `Fitted` says.
    Then all clients have the same variances, the server knows them, and they tell nothing of the batch: nobody's error
    can be below a bound (`gradveil bound`). What tells nothing on any public batch may tell of another: it gets the
    mean ratio, where the theorem would give it no noise.

    The standard deviations are intermediates `scale.<parameter>`: those not pinned are computed from update and batch,
    and an attacker differentiates through them, which takes `probes` forward-mode products an iteration.

    What is cheaper is rougher: `of="example"` takes `probes` directions of one example each (`client.probing`), `every`
    probes in every so many rounds, and `memory` is the weight of what earlier rounds found. Squared row norms are then
    mixed with `SHRINK` of what their layer's ratio would make them, ||dg/dx||^2 / ||g||^2 g_i^2, since a row may be
    zero in what was probed and not in this gradient; an entry that is zero in this gradient gets no noise, whatever was
    probed. (Neither matters to `layerwise`.) The squares are the client's state: an attacker who sees all rounds
    simulates it.
    """

    std: float
    probes: int = 10
    layerwise: bool = False
    clamp: float = float("inf")
    of: Literal["batch", "example"] = "batch"
    every: int = 1
    memory: float = 0.0
    form: Literal["local", "global"] = "local"
    batches: int = 16
    stage: ClassVar[Stage] = Stage.NOISE
    guarantee: ClassVar[str] = (
        "no formal guarantee: the noise depends on the data (on public ones with form=global), so there is no epsilon"
    )

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("std", STRENGTH), ("probes", COUNT), ("layerwise", Flag()), ("clamp", BOUND), ("of", OF))
        settings = (*settings, ("every", COUNT), ("memory", SHARE))
        settings = (*settings, ("form", FORM), ("batches", COUNT))
        problems = collect("optimal-noise", ((name, allowed, getattr(self, name)) for name, allowed in settings))
        refuse(problems + self.form_problems("optimal-noise", "layerwise", "of", "every", "memory"))

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one standard normal tensor a parameter: `normal.<parameter>`."""
        return _normal(params)

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the standard deviations, which may be pinned."""
        law = Uniform(0.0, 2 * self.std)
        scales = {name: Noise(tuple(p.shape), law, dtype=p.dtype, lower=0.0) for name, p in params.items()}
        return NoiseSpec(scales).under("scale")

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Cut the entries, if that is wanted, and add the scaled noise."""
        cut = self.cut(update)
        if not self.std:
            return cut, state
        scales, normal = select(noise, "scale"), select(noise, "normal")
        if update.keys() - scales.keys() and self.needs_public:
            scales = {**self.public_scales(context, noise["probe"]), **scales}
        elif update.keys() - scales.keys():
            squares = self.squares(state, noise, context)
            scales = {**self.scales(update, squares), **scales}
            state = self.later(state, squares)
        else:
            state = self.later(state)
        return {name: value + scales[name] * normal[name] for name, value in cut.items()}, state

    def cut(self, update: Tensors) -> Tensors:
        """Cut the entries to [-clamp, clamp]."""
        finite = math.isfinite(self.clamp)
        return {n: value.clamp(-self.clamp, self.clamp) for n, value in update.items()} if finite else update

    def public_scales(self, context: Context, probe: Tensor) -> Tensors:
        """Compute the standard deviations of the global form: of parameters and public images, and nothing else."""
        found = global_ratio(*self.on_public(context, probe), self.clamp)
        ratio = {name: value.clamp(max=CAP) for name, value in found.items()}
        flat = torch.cat([value.flatten() for value in ratio.values()])
        mean = flat.sum() / (flat > 0).sum().clamp(min=1)
        other = torch.where(mean > 0, mean, 1.0)
        ratio = {name: torch.where(value > 0, value, other) for name, value in ratio.items()}
        return norms(optimal_variances(ratio, self.std**2))

    def scales(self, update: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> Tensors:
        """Compute the standard deviation of every coordinate; the mean of their squares is std^2.

        Without any ratio above zero (no probe finds a dependence) all are zero.
        """
        if self.rough and not self.layerwise:
            ratios = tmap(self._rough_ratio, update, squares)
        else:
            ratios = tmap(self._ratio, update, norms(squares))
        mean = torch.stack([r.sum() for r in ratios.values()]).sum() / sum(r.numel() for r in ratios.values())
        share = self.std**2 / torch.where(mean > 0, mean, torch.ones_like(mean))
        return norms({name: ratio * share for name, ratio in ratios.items()})

    def _rough_ratio(self, value: Tensor, squares: Tensor) -> Tensor:
        """Divide squares that are mixed with those of the layer's ratio, in few passes."""
        sizes = value.square()
        entry = squares / sizes.clamp(min=self._floor**2)
        ratio = root(torch.where(sizes > 0, torch.lerp(entry, of_layer(sizes, squares), SHRINK), 0.0)).clamp(max=CAP)
        return torch.where(value.abs() > self.clamp, 0.0, ratio) if math.isfinite(self.clamp) else ratio

    def _ratio(self, value: Tensor, row: Tensor) -> Tensor:
        if self.layerwise:
            ratio = (norm({"": row}) / norm({"": value}).clamp(min=FLOOR["layer"])).expand_as(value)
        else:
            ratio = row / value.abs().clamp(min=self._floor)
        return torch.where(value.abs() > self.clamp, 0.0, ratio.clamp(max=CAP))

    @property
    def _floor(self) -> float:
        return FLOOR["clamped" if math.isfinite(self.clamp) else "entry"]

    def smallest(self) -> Mapping[str, Any]:
        """Without spread there is no noise, without a bound nothing is cut."""
        return {"std": 0.0, "clamp": float("inf")}


@dataclass(frozen=True)
class OptimalPruning(Fitted, Magnitude):
    """Zero the share `ratio` of coordinates with the smallest |g_i| / ||dg_i/dx||: worth least for what they tell.

    Counts and ties are those of `Magnitude`. A coordinate that is not zero but does not depend on the inputs is kept
    before all others, one that is zero goes first. With `mixed`, the paper's mixed defence, a coin decides on the one
    coordinate at the border: it goes with probability ratio P - floor(ratio P), so that ratio P go on average. With
    `scope=layer` each layer tosses its own coin, and a small one may lose all it has.

    `std` is the paper's noisy pruning: N(0, std^2) on what is kept. The masks are still those of the update without
    noise, which is what sets it apart from `gaussian + optimal-prune`.

    `of`, `every` and `memory` make it cheaper and rougher, as they do `OptimalNoise`; squared row norms are then mixed
    with those of the layer's ratio, so that no coordinate passes for one that does not depend on the inputs.

    With `form="global"`, Theorem 4's, the ratio is that of expectations over public batches (`Fitted`), sqrt(E g_i^2 /
    E ||dg_i/dx||^2), which is what `gradveil.theory.utility.global_masks` goes by: all clients send the same
    coordinates, known to the server, and which they are tells nothing of anybody's batch. Error feedback then waits for
    the mask to move.
    """

    scope: Literal["layer", "global"] = "global"
    probes: int = 10
    mixed: bool = False
    std: float = 0.0
    of: Literal["batch", "example"] = "batch"
    every: int = 1
    memory: float = 0.0
    form: Literal["local", "global"] = "local"
    batches: int = 16
    ordered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("ratio", SHARE), ("scope", SCOPE), ("probes", COUNT), ("mixed", Flag()), ("std", STRENGTH))
        settings = (*settings, ("of", OF), ("every", COUNT), ("memory", SHARE), ("form", FORM), ("batches", COUNT))
        problems = collect("optimal-prune", ((name, allowed, getattr(self, name)) for name, allowed in settings))
        refuse(problems + self.form_problems("optimal-prune", "of", "every", "memory"))

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the coins (`coin`, or `coin.<parameter>`), and one standard normal tensor a parameter.

        The neutral coin is 1, which is never drawn and keeps the coordinate at the border.
        """
        spec = NoiseSpec()
        if self.mixed:
            coin = Noise((), Uniform(), neutral=1.0, dtype=next(iter(params.values())).dtype, lower=0, upper=1)
            of_layers = NoiseSpec(dict.fromkeys(params, coin)).under("coin")
            spec = spec | (of_layers if self.scope == "layer" else NoiseSpec({"coin": coin}))
        return spec | _normal(params) if self.std else spec

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply by the masks; those that are not pinned are computed from the update and its row norms."""
        pinned = select(noise, "mask")
        if self.ratio and update.keys() - pinned.keys() and self.needs_public:
            pinned = {**self._drawn(self.public_worth(context, noise["probe"]), noise), **pinned}
        elif self.ratio and update.keys() - pinned.keys():
            still = context.batch._replace(inputs=context.batch.inputs.detach())
            squares = tmap(torch.detach, self.squares(state, noise, replace(context, batch=still)))
            pinned = {**self._drawn(self.worth(update, squares), noise), **pinned}
            state = self.later(state, squares)
        else:
            state = self.later(state)
        if self.std:
            update = {name: value + self.std * noise[f"normal.{name}"] for name, value in update.items()}
        return super().apply(update, state, under("mask", pinned), context)

    def only_masks(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Tensors | None:
        """Return them if they are pinned, and there is no noise or it is off."""
        noisy = self.std and params.keys() - set(below("normal", off))
        return None if noisy else super().only_masks(params, noise, off)

    def _drawn(self, worth: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        """Choose by worth what is kept; where that is mixed, the coin decides on the coordinate at the border."""
        kept = self.masks(worth)
        if not self.mixed:
            return kept
        entries = {name: value.numel() for name, value in worth.items()}
        if self.scope == "layer":
            tossed = {name: noise[f"coin.{name}"] < rest(self.ratio, count) for name, count in entries.items()}
        else:
            tossed = dict.fromkeys(worth, noise["coin"] < rest(self.ratio, sum(entries.values())))
        fewer = self.masks(worth, 1)
        return {name: torch.where(tossed[name], fewer[name], kept[name]) for name in worth}

    def smallest(self) -> Mapping[str, Any]:
        """Nothing is removed, nothing added."""
        return {"ratio": 0.0, "std": 0.0}

    def public_worth(self, context: Context, probe: Tensor) -> Tensors:
        """Compute sqrt(E g_i^2 / E ||dg_i/dx||^2) of the global form, of parameters and public images."""
        squares, found = self.on_public(context, probe)
        sizes = expected([tmap(torch.square, gradient) for gradient in found])
        return self.worth(norms(sizes), expected(squares))

    def worth(self, update: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> Tensors:
        """Compute |g_i| / ||dg_i/dx|| of every coordinate from squared row norms, as a constant for the derivative."""
        return {name: self._worth(value.detach(), squares[name]) for name, value in update.items()}

    def _worth(self, value: Tensor, square: Tensor) -> Tensor:
        if self.rough:
            sizes = value.square()
            square = torch.lerp(square, of_layer(sizes, square) * sizes, SHRINK)
        row = root(square)
        alone = torch.where(value != 0, torch.inf, 0.0).to(value.dtype)
        return torch.where(row > 0, value.abs() / row, alone)


def _normal(params: Mapping[str, Tensor]) -> NoiseSpec:
    draws = {name: Noise(tuple(p.shape), Normal(), neutral=0.0, dtype=p.dtype) for name, p in params.items()}
    return NoiseSpec(draws).under("normal")
