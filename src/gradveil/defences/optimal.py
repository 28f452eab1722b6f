"""Defences that spend noise, or zeros, where they hide most of the inputs for what they cost in utility.

After Chen, Gürsoy and Lei 2024, "Optimal Defenses Against Gradient Reconstruction Attacks": both minimise the
information sum_i ||dg_i/dx||^2 / s_i^2 that the update g has of the inputs x, under a bound of the utility lost. The
row norms are estimated by forward-mode products with random directions, as named noise (`gradveil.theory.sensitivity`).

With local training the norms are those of the gradient of all examples at the round's global parameters, and stand in
for those of the update. Of defences of each example that come before (`clip-example`), they know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.allowed import BOUND, COUNT, SHARE, STRENGTH, Choice, Flag, collect
from gradveil.core.errors import GradveilError, fail, refuse
from gradveil.core.noise import Noise, NoiseSpec, Normal, Uniform
from gradveil.core.tree import Tensors, norm, plain, root, select, tmap, under
from gradveil.core.types import Batch, Context, Stage, Transform
from gradveil.defences.prune import SCOPE, Magnitude, rest
from gradveil.theory.sensitivity import norms, probe_noise, squared_row_norms

FLOOR = {"entry": 1e-8, "clamped": 1e-6, "layer": 1e-6}
"""Smallest |g| that a ratio is divided by: of an entry, of one that may be clamped, of a whole layer."""
CAP = 1e6
"""Largest ratio. These are the constants of the authors' program; the paper leaves them open."""
SHRINK = 0.05
"""The weight of a layer's ratio in estimates from few examples, or from an earlier round; ours. Of 0.01 to 0.2 it lost
least of the privacy term on the small CNN, untrained and trained."""
OF = Choice(("batch", "example"))
"""What a direction is one of."""


@dataclass(frozen=True)
class OptimalNoise(Transform):
    """Add N(0, s_i^2) with s_i^2 proportional to r_i = ||dg_i/dx|| / |g_i|, scaled so that the mean of s_i^2 is std^2.

    So it adds as much noise as `Gaussian(std)`, elsewhere. With `layerwise` each parameter has one ratio
    ||dg/dx|| / ||g||. With a finite `clamp` C, entries are first cut to [-C, C], and those that were cut get no noise
    (the "optimal DP-SGD" of the paper, which is no differential privacy: the variances depend on the data).

    Where a row of dg/dx is zero (units behind a ReLU that is off) there is no noise, and none of the variance is spent;
    elsewhere ratios are capped. A few entries with tiny gradients can take most of the variance (one of 15,826 in an
    untrained LeNet took 70 %), so equal mean variance is not equal protection: compare by what attackers recover.
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
    stage: ClassVar[Stage] = Stage.NOISE
    guarantee: ClassVar[str] = "no formal guarantee: the noise depends on the data, so there is no epsilon"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("std", STRENGTH), ("probes", COUNT), ("layerwise", Flag()), ("clamp", BOUND), ("of", OF))
        settings = (*settings, ("every", COUNT), ("memory", SHARE))
        refuse(collect("optimal-noise", ((name, allowed, getattr(self, name)) for name, allowed in settings)))

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start in the first round, with nothing found."""
        if not self._remembers:
            return {}
        rounds = next(iter(params.values())).new_zeros(())
        return {"rounds": rounds, **under("squares", tmap(torch.zeros_like, params))}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one standard normal tensor a parameter: `normal.<parameter>`."""
        return _normal(params)

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare `probe`, the directions in which the gradient is differentiated, and where their examples are."""
        if self.of == "batch":
            return probe_noise(batch, self.probes)
        inputs = batch.inputs
        probe = Noise((self.probes, *inputs.shape[1:]), Normal(), neutral=0.0, dtype=inputs.dtype)
        return NoiseSpec({"probe": probe, "offset": Noise((), Uniform(), dtype=inputs.dtype, discrete=True)})

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the standard deviations, which may be pinned."""
        law = Uniform(0.0, 2 * self.std)
        scales = {name: Noise(tuple(p.shape), law, dtype=p.dtype, lower=0.0) for name, p in params.items()}
        return NoiseSpec(scales).under("scale")

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Cut the entries, if that is wanted, and add the scaled noise."""
        finite = math.isfinite(self.clamp)
        cut = {n: value.clamp(-self.clamp, self.clamp) for n, value in update.items()} if finite else update
        if not self.std:
            return cut, state
        scales, normal = select(noise, "scale"), select(noise, "normal")
        if update.keys() - scales.keys():
            squares = self.squares(state, noise, context)
            scales = {**self.scales(update, squares), **scales}
            if self._remembers:
                state = {"rounds": state["rounds"] + 1, **under("squares", squares)}
        elif self._remembers:
            state = {**state, "rounds": state["rounds"] + 1}
        return {name: value + scales[name] * normal[name] for name, value in cut.items()}, state

    def squares(self, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Estimate the squared row norms, or take those of an earlier round."""
        if not self._remembers:
            return self._probed(noise, context)
        old, rounds = select(state, "squares"), state["rounds"]
        known = plain(rounds, context.batch.inputs)
        if known and int(rounds) % self.every:
            return old
        found = self._probed(noise, context)
        if self.memory:
            kept = torch.where(rounds > 0, self.memory, 0.0).to(rounds.dtype)
            found = {name: torch.lerp(value, old[name], kept) for name, value in found.items()}
        due = rounds % self.every == 0
        return found if known else {name: torch.where(due, value, old[name]) for name, value in found.items()}

    def scales(self, update: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> Tensors:
        """Compute the standard deviation of every coordinate; the mean of their squares is std^2.

        Without any ratio above zero (no probe finds a dependence) all are zero.
        """
        if self._rough and not self.layerwise:
            ratios = tmap(self._rough_ratio, update, squares)
        else:
            ratios = tmap(self._ratio, update, norms(squares))
        mean = torch.stack([r.sum() for r in ratios.values()]).sum() / sum(r.numel() for r in ratios.values())
        share = self.std**2 / torch.where(mean > 0, mean, torch.ones_like(mean))
        return norms({name: ratio * share for name, ratio in ratios.items()})

    @property
    def _remembers(self) -> bool:
        return self.every > 1 or self.memory > 0

    @property
    def _rough(self) -> bool:
        return self._remembers or self.of == "example"

    def _probed(self, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        if self.of == "batch":
            return _squares(self, noise["probe"], context)
        if context.sensitivity is None:
            raise _no_gradient(self)
        return context.sensitivity(noise["probe"], noise["offset"])

    def _rough_ratio(self, value: Tensor, squares: Tensor) -> Tensor:
        """Divide squares that are mixed with those of the layer's ratio, in few passes."""
        sizes = value.square()
        total = sizes.sum()
        layer = torch.where(total > 0, squares.sum() / torch.where(total > 0, total, torch.ones_like(total)), 0.0)
        entry = squares / sizes.clamp(min=self._floor**2)
        ratio = root(torch.where(sizes > 0, torch.lerp(entry, layer, SHRINK), 0.0)).clamp(max=CAP)
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
class OptimalPruning(Magnitude):
    """Zero the share `ratio` of coordinates with the smallest |g_i| / ||dg_i/dx||: worth least for what they tell.

    Counts and ties are those of `Magnitude`. A coordinate that is not zero but does not depend on the inputs is kept
    before all others, one that is zero goes first. With `mixed`, the paper's mixed defence, a coin decides on the one
    coordinate at the border: it goes with probability ratio P - floor(ratio P), so that ratio P go on average. With
    `scope=layer` each layer tosses its own coin, and a small one may lose all it has.

    `std` is the paper's noisy pruning: N(0, std^2) on what is kept. The masks are still those of the update without
    noise, which is what sets it apart from `gaussian + optimal-prune`.
    """

    scope: Literal["layer", "global"] = "global"
    probes: int = 10
    mixed: bool = False
    std: float = 0.0
    ordered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("ratio", SHARE), ("scope", SCOPE), ("probes", COUNT), ("mixed", Flag()), ("std", STRENGTH))
        refuse(collect("optimal-prune", ((name, allowed, getattr(self, name)) for name, allowed in settings)))

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

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare `probe`, the directions in which the gradient is differentiated."""
        return probe_noise(batch, self.probes)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply by the masks; those that are not pinned are computed from the update and its row norms."""
        pinned = select(noise, "mask")
        if self.ratio and update.keys() - pinned.keys():
            pinned = {**self._drawn(self.worth(update, noise["probe"], context), noise), **pinned}
        if self.std:
            update = {name: value + self.std * noise[f"normal.{name}"] for name, value in update.items()}
        return super().apply(update, state, under("mask", pinned), context)

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

    def worth(self, update: Mapping[str, Tensor], probe: Tensor, context: Context) -> Tensors:
        """Compute |g_i| / ||dg_i/dx|| of every coordinate, as a constant for the derivative."""
        still = context.batch._replace(inputs=context.batch.inputs.detach())
        found = norms(_squares(self, probe, context, still))
        return {name: _worth(value.detach(), found[name].detach()) for name, value in update.items()}


def _normal(params: Mapping[str, Tensor]) -> NoiseSpec:
    draws = {name: Noise(tuple(p.shape), Normal(), neutral=0.0, dtype=p.dtype) for name, p in params.items()}
    return NoiseSpec(draws).under("normal")


def _worth(value: Tensor, row: Tensor) -> Tensor:
    alone = torch.where(value != 0, torch.inf, 0.0).to(value.dtype)
    return torch.where(row > 0, value.abs() / row, alone)


def _squares(defence: Transform, probe: Tensor, context: Context, batch: Batch | None = None) -> Tensors:
    if context.gradient is None:
        raise _no_gradient(defence)
    return squared_row_norms(context.gradient, batch or context.batch, probe)


def _no_gradient(defence: Transform) -> GradveilError:
    what = "needs the client's gradient, and its context has none"
    return fail(type(defence).__name__, what, "use it where the mean over the batch is defended, by a Client")
