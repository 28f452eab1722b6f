"""Optimal noise and pruning: hide most of the inputs for the least loss of utility.

After Chen, Gürsoy and Lei 2024, "Optimal Defenses Against Gradient Reconstruction Attacks": both minimise the
information sum_i ||dg_i/dx||^2 / s_i^2 that the update g has of the inputs x, under a bound of the utility lost. The
row norms are estimated by forward-mode products with random directions, as named noise
(`gradveil.theory.input_jacobian`). Of texts, x are the word embeddings of their tokens.

With local training the norms are those of the gradient of all examples at the round's global parameters, with the
model's own noise (dropout) switched off, and stand in for those of the update. Of defences of each example that come
before (`clip-example`), they know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.distributions import Agreed
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.noise import Key, Noise, NoiseSpec, Normal, Uniform
from gradveil.core.settings import Checked, Count, Share, Strength, settings_of, unused
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, below, counter, norm, plain, root, select, tmap, under
from gradveil.core.types import Batch, Context, Multiplier, Stage, Transform
from gradveil.defences.additive_noise import Clamp, Std, clamped
from gradveil.defences.entry import PRUNED, DefenceEntry, feedback_argument
from gradveil.defences.pruning import Magnitude, Scope, rest
from gradveil.theory.first_order_utility import expected, global_ratio, optimal_variances
from gradveil.theory.input_jacobian import norms, probe_noise, squared_row_norms

SHRINK = 0.05
"""The weight of a layer's ratio in estimates from few examples, or from an earlier round; ours. Of 0.01 to 0.2 it lost
least of the privacy term on the small CNN, untrained and trained."""
Probes = Annotated[Count, "Number of random directions in which the gradient is differentiated."]
Of = Annotated[Literal["batch", "example"], "What a direction covers: the batch, or one example."]
Every = Annotated[Count, "Rounds from one probing to the next."]
Memory = Annotated[Share, "Weight of what earlier rounds found."]
Form = Annotated[Literal["local", "global"], "What the defence is fitted to: the client's own batch, or public ones."]
Batches = Annotated[Count, "Number of public batches of the global form."]


class Probing(Transform):
    """Base of transforms that estimate ||dg_i/dx||^2 from `probes` directions in each round.

    `of="example"` takes directions of one example each (`client.probing`); `every` looks in every so many rounds, and
    `memory` is the weight of what earlier rounds found, which is then the client's state.
    """

    probes: Probes
    of: Of
    every: Every
    memory: Memory

    @property
    def remembers(self) -> bool:
        """Whether what was found is needed in later rounds."""
        return self.every > 1 or self.memory > 0

    @property
    def rough(self) -> bool:
        """Whether a row may look like zero and not be it."""
        return self.remembers or self.of == "example"

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start in the first round, with nothing found."""
        if not self.remembers:
            return {}
        return {"rounds": counter(params), **under("squares", tmap(torch.zeros_like, params))}

    def later(self, state: Tensors, squares: Mapping[str, Tensor] | None = None) -> Tensors:
        """Return the next state: a round more, and what was found in this one."""
        if not self.remembers:
            return state
        found = {} if squares is None else under("squares", squares)
        return {**state, **found, "rounds": state["rounds"] + 1}

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare `probe`, the directions in which the gradient is differentiated, and where their examples are."""
        if self.of == "batch":
            return probe_noise(batch, self.probes)
        inputs = batch.inputs
        probe = Noise((self.probes, *inputs.shape[1:]), Normal(), neutral=0.0, dtype=inputs.dtype)
        return NoiseSpec({"probe": probe, "offset": Noise((), Uniform(), dtype=inputs.dtype, discrete=True)})

    def squares(self, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Estimate the squared row norms, or take those of an earlier round."""
        if not self.remembers:
            return self._probed(noise, context)
        old, rounds = select(state, "squares"), state["rounds"]
        known = plain(rounds, context.batch.inputs)
        if known and int(rounds) % self.every:
            return old
        found = self._probed(noise, context)
        if self.memory:
            # The first round has nothing to remember.
            kept = torch.where(rounds > 0, self.memory, 0.0)
            found = {name: torch.lerp(value, old[name], kept.to(value.dtype)) for name, value in found.items()}
        # Under vmap each client has its own round: all are probed, and those that are not due keep what they had.
        due = rounds % self.every == 0
        return found if known else {name: torch.where(due, value, old[name]) for name, value in found.items()}

    def _probed(self, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        if self.of == "example":
            if context.sensitivity is None:
                raise self._no_gradient()
            return context.sensitivity(noise["probe"], noise["offset"])
        if context.gradient is None:
            raise self._no_gradient()
        return squared_row_norms(context.gradient, context.batch, noise["probe"], perturbation=context.perturbation)

    def _no_gradient(self) -> GradveilError:
        what = "needs the client's gradient, and its context has none"
        return fail(type(self).__name__, what, "use it where the mean over the batch is defended, by a Client")


def of_layer(sizes: Tensor, squares: Tensor) -> Tensor:
    """Return a layer's ||dg/dx||^2 / ||g||^2 from the squares of both; zero where the gradient is."""
    total = sizes.sum()
    return torch.where(total > 0, squares.sum() / torch.where(total > 0, total, torch.ones_like(total)), 0.0)


_KEY = Key(0, (Stream.PUBLIC, Stream.PROBE))
_DRAWN: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
"""The directions of a few shapes: inside of `vmap` nothing may be drawn."""
_SHAPES = 8


class Fitted(Checked, Probing):
    """Base of transforms that may be fitted to public batches (`form="global"`) in place of the client's own.

    These are the first `batches` of the client's public images, as large as its own batch, at the parameters of the
    round, in directions on which all have agreed. Labels are those of the public images, or all classes in turn
    where none are known. The result does not depend on the client's batch.
    """

    form: Form
    batches: Batches
    own_batch: ClassVar[tuple[str, ...]]
    """Settings of the local form."""

    @property
    def needs_public(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it is fitted to public images."""
        return self.form == "global"

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the directions: those of the global form are of public batches, and the same for all."""
        if not self.needs_public:
            return super().directions(batch)
        shape, dtype = (self.probes, *batch.inputs.shape), batch.inputs.dtype
        drawn = _agreed(shape, dtype)
        return NoiseSpec({"probe": Noise(shape, Agreed(_KEY, shape), neutral=drawn, dtype=dtype, discrete=True)})

    def on_public(self, context: Context, probe: Tensor) -> tuple[list[Tensors], list[Tensors]]:
        """Compute the squared row norms and the gradients of the public batches: of nothing that is private.

        In a batch of clients each has directions of its own, the same for all: with those all would be computed as
        often as there are clients. So the ones that were declared are taken where they are at hand.
        """
        if context.public is None:
            what = "is fitted to public images, and there are none"
            raise fail(f"{type(self).__name__}.form", what, "give Client(domain=Domain(..., public=images))")
        gradient, domain = context.public.gradient, context.public.domain
        probe = _DRAWN.get((tuple(probe.shape), probe.dtype), probe).to(probe.device)
        squares: list[Tensors] = []
        found: list[Tensors] = []
        for batch in domain.batches(context.public.size, self.batches):
            rows = squared_row_norms(gradient, batch, probe, perturbation=context.perturbation)
            squares.append(tmap(torch.detach, rows))
            found.append(tmap(torch.detach, gradient(batch)))
        return squares, found

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse settings of the local form in the global one, and the other way."""
        if self.form == "local":
            yield from unused(self.label, self, ("batches",), "the local form is fitted to no public batch")
        for name in self.own_batch:
            if self.needs_public and getattr(self, name) != getattr(type(self), name):
                what = "is for the client's own batch, of which the global form knows nothing"
                yield Problem(f"{self.label}.{name}", what, "leave it out; fewer batches are cheaper")


def _agreed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if (shape, dtype) not in _DRAWN:
        for old in [*_DRAWN][: len(_DRAWN) - _SHAPES + 1]:
            del _DRAWN[old]
        _DRAWN[shape, dtype] = Agreed(_KEY, shape).sample(shape, dtype, _KEY.generator())
    return _DRAWN[shape, dtype]


SMALLEST = {"entry": 1e-8, "clamped": 1e-6, "layer": 1e-6}
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
    the places of both norms (`gradveil.theory.first_order_utility.global_ratio`; Theorem 3's with a `clamp`), as
    `Fitted` says. Then all clients have the same variances, the server knows them, and they do not depend on the batch:
    no attacker's error can be below a bound (`gradveil bound`). An entry that reveals nothing of any public batch may
    reveal another: it gets the mean ratio, where the theorem would give it no noise.

    The standard deviations are intermediates `scale.<parameter>`: those not pinned are computed from update and batch,
    and an attacker differentiates through them, which takes `probes` forward-mode products an iteration.

    What is cheaper is rougher: `of="example"` takes `probes` directions of one example each (`client.probing`), `every`
    probes in every so many rounds, and `memory` is the weight of what earlier rounds found. Squared row norms are then
    mixed with `SHRINK` of what their layer's ratio would make them, ||dg/dx||^2 / ||g||^2 g_i^2, since a row may be
    zero in what was probed and not in this gradient; an entry that is zero in this gradient gets no noise, whatever was
    probed. (Neither matters to `layerwise`.) The squares are the client's state: an attacker who sees all rounds
    simulates it.
    """

    std: Std
    probes: Probes = 10
    layerwise: Annotated[bool, "Take one ratio for each parameter."] = False
    clamp: Clamp = math.inf
    of: Of = "batch"
    every: Every = 1
    memory: Memory = 0.0
    form: Form = "local"
    batches: Batches = 16
    label: ClassVar[str] = "optimal-noise"
    own_batch: ClassVar[tuple[str, ...]] = ("layerwise", "of", "every", "memory")
    stage: ClassVar[Stage] = Stage.NOISE
    guarantee: ClassVar[str] = (
        "no formal guarantee: the noise depends on the data (on public ones with form=global), so there is no epsilon"
    )
    identity_settings: ClassVar = {"std": 0.0, "clamp": float("inf")}

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
        cut = clamped(update, self.clamp)
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
        entry = squares / sizes.clamp(min=self._smallest**2)
        ratio = root(torch.where(sizes > 0, torch.lerp(entry, of_layer(sizes, squares), SHRINK), 0.0)).clamp(max=CAP)
        return torch.where(value.abs() > self.clamp, 0.0, ratio) if math.isfinite(self.clamp) else ratio

    def _ratio(self, value: Tensor, row: Tensor) -> Tensor:
        if self.layerwise:
            ratio = (norm({"": row}) / norm({"": value}).clamp(min=SMALLEST["layer"])).expand_as(value)
        else:
            ratio = row / value.abs().clamp(min=self._smallest)
        return torch.where(value.abs() > self.clamp, 0.0, ratio.clamp(max=CAP))

    @property
    def _smallest(self) -> float:
        return SMALLEST["clamped" if math.isfinite(self.clamp) else "entry"]


@dataclass(frozen=True)
class OptimalPruning(Fitted, Magnitude):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Zero the share `ratio` of coordinates with the smallest |g_i| / ||dg_i/dx||: worth least for what they reveal.

    Counts and ties are those of `Magnitude`. A coordinate that is not zero but does not depend on the inputs is kept
    before all others, one that is zero goes first. With `mixed`, the paper's mixed defence, a coin decides on the one
    coordinate at the border: it goes with probability ratio P - floor(ratio P), so that ratio P go on average. With
    `scope=layer` each layer tosses its own coin, and a small one may lose all it has.

    `std` is the paper's noisy pruning: N(0, std^2) on what is kept. The masks are still those of the update without
    noise, which is what sets it apart from `gaussian + optimal-prune`.

    `of`, `every` and `memory` make it cheaper and rougher, as they do `OptimalNoise`; squared row norms are then mixed
    with those of the layer's ratio, so that no coordinate passes for one that does not depend on the inputs.

    With `form="global"`, Theorem 4's, the ratio is that of expectations over public batches (`Fitted`), sqrt(E g_i^2 /
    E ||dg_i/dx||^2), which is what `gradveil.theory.first_order_utility.global_masks` goes by: all clients send the
    same coordinates, known to the server, and which they are depends on no client's batch. Error feedback then
    waits for the mask to move.
    """

    scope: Scope = "global"
    probes: Probes = 10
    mixed: Annotated[bool, "Let a coin decide on the entry at the border."] = False
    std: Annotated[Strength, "Standard deviation of the noise on what is kept."] = 0.0
    of: Of = "batch"
    every: Every = 1
    memory: Memory = 0.0
    form: Form = "local"
    batches: Batches = 16
    label: ClassVar[str] = "optimal-prune"
    own_batch: ClassVar[tuple[str, ...]] = ("of", "every", "memory")
    ordered: ClassVar[bool] = False
    identity_settings: ClassVar = {"ratio": 0.0, "std": 0.0}

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

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return the masks if they are pinned, and there is no noise or it is off."""
        noisy = self.std and params.keys() - set(below("normal", off))
        return None if noisy else super().multiplier(params, noise, off)

    def _drawn(self, worth: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        """Choose by worth what is kept; where that is mixed, the coin decides on the coordinate at the border."""
        kept = self.masks(worth)
        if not self.mixed:
            return kept
        coins = {name: noise[f"coin.{name}" if self.scope == "layer" else "coin"] for name in worth}
        tossed = {name: coins[name] < chance for name, chance in self._chances(worth).items()}
        fewer = self.masks(worth, 1)
        return {name: torch.where(tossed[name], fewer[name], kept[name]) for name in worth}

    def _chances(self, worth: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the probability with which the coordinate at each parameter's border is pruned."""
        entries = {name: value.numel() for name, value in worth.items()}
        whole = sum(entries.values())
        return {n: rest(self.ratio, count if self.scope == "layer" else whole) for n, count in entries.items()}

    def public_shares(self, context: Context, probe: Tensor) -> Tensors:
        """Compute the probability 1 - p_i with which the global form keeps each coordinate."""
        worth = self.public_worth(context, probe)
        kept = {name: mask.to(worth[name].dtype) for name, mask in self.masks(worth).items()}
        if not self.mixed:
            return kept
        fewer, chances = self.masks(worth, 1), self._chances(worth)
        # (1 - chance) kept + chance fewer.
        return {name: share - chances[name] * (share - fewer[name].to(share.dtype)) for name, share in kept.items()}

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


_PRUNING = settings_of(OptimalPruning)

INFORMED = (
    DefenceEntry(
        name="optimal-noise",
        factory=OptimalNoise,
        stage="noise",
        description="Add normal noise of mean variance std^2, most where it hides most for what it costs",
        changes=("send",),
        cost="10 forward-mode passes: 16 to 31 gradients, with cheaper settings 2 to 4, of public images 15 a batch; "
        "all bytes",
        citation="Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        traits=("shapes noise",),
        identity={"std": 0.0},
    ),
    DefenceEntry(
        name="optimal-prune",
        factory=OptimalPruning,
        arguments=(*_PRUNING[:-2], feedback_argument(False), *_PRUNING[-2:]),
        stage="prune",
        feedback=False,
        description="Send zeros in place of the entries that are smallest for what they tell of the inputs",
        changes=("send",),
        cost="10 forward-mode passes, 16 gradients, with the cheaper settings of optimal-noise 2 to 4, of public "
        "images 15 a batch; 22% of the bytes at ratio=0.8",
        citation="Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        traits=PRUNED,
        identity={"ratio": 0.0},
    ),
)
