"""Soteria and Outpost: hide the entries that reveal most of the inputs, in each local step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vjp, vmap

from gradveil.core.errors import fail
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Normal, Uniform
from gradveil.core.settings import Checked, Positive, Range, Strength
from gradveil.core.tree import Tensors, counter, select, straight_through, tmap, under
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences.entry import PRUNED, DefenceEntry
from gradveil.defences.pruning import below, smallest_mask

Percentile = Annotated[float, Range(0, 100, high_open=True)]
"""A percentile below the largest."""
AT_ONCE = 64
"""Features differentiated in one batch: each holds one more backward pass."""


@dataclass(frozen=True)
class Soteria(Checked, Transform):
    """Zero the columns of the last linear layer's weight gradient whose q_f is below the p-th percentile.

    q_f = sum over the batch of ||dr_f/dx_b|| / (|r_bf| + delta), where r_b [F] is what that layer takes for example b
    (Sun et al. 2021, after their sec. 4); x_b of a text are its word embeddings. Biases and other layers stay. Of equal
    features the first go first, and ceil(p (F - 1) / 100) go, as a percentile has it. delta = 0.1 is the authors'
    program's.

    `variant="published_code"` divides by r_bf + delta, and zeroes where |q_f| is below the percentile of the signed q:
    the same wherever features are above -delta, but for ties; where many are negative, fewer columns go, or none.

    The mask is an intermediate `mask.<weight>` [F], a constant for the derivative; the zero columns show it.
    """

    percentile: Annotated[Percentile, "Percentile below which features are set to zero."] = 60.0
    delta: Annotated[Positive, "Number that is added to a feature before it divides."] = 0.1
    variant: Annotated[
        Literal["paper", "published_code"], "The paper's choice of features, or that of the authors' program."
    ] = "paper"
    label: ClassVar[str] = "soteria"
    stage: ClassVar[Stage] = Stage.PRUNE
    identity_settings: ClassVar = {"percentile": 0.0}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Draw nothing; refuse a client that trains no linear layer before its first update."""
        classifier(params)
        return NoiseSpec()

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the mask of features, which may be pinned."""
        name = classifier(params)
        shape, law = (params[name].shape[1],), Bernoulli(1 - self.percentile / 100)
        dtype = params[name].dtype
        mask = Noise(shape, law, neutral=1.0, dtype=dtype, lower=0.0, upper=1.0, discrete=True)
        return NoiseSpec({f"mask.{name}": mask})

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply the columns by the mask, which is computed from the batch unless it is pinned."""
        if not self.percentile:
            return update, state
        name = classifier(update)
        pinned = noise.get(f"mask.{name}")
        mask = self._mask(name, context) if pinned is None else pinned
        return {**update, name: update[name] * mask.to(update[name].dtype)}, state

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read the mask off the zero columns."""
        name = classifier(sent)
        return {f"mask.{name}": (sent[name] != 0).any(0).to(sent[name].dtype)}

    def _mask(self, name: str, context: Context) -> Tensor:
        with torch.no_grad():
            layer, relevance = self.relevance(context)
        if f"{layer}.weight" != name:
            what = f"acts on '{layer}.weight', and the last matrix that this client trains is '{name}'"
            raise fail("soteria", what, "train the last linear layer, and nothing of two dimensions after it")
        if self.variant == "published_code":
            return relevance.abs() >= percentile(relevance, self.percentile)
        return ~smallest_mask(relevance, below(self.percentile, len(relevance)))

    def relevance(self, context: Context) -> tuple[str, Tensor]:
        """Compute the last linear layer's path and q [F], by one batched backward pass for every 64 features."""
        if context.features is None:
            what = "needs the features of the client's model, and its context has none"
            raise fail("soteria", what, "use it where the mean over the batch is defended, by a Client")
        features, still = context.features, context.batch._replace(inputs=context.batch.inputs.detach())
        layer = ""

        def values(perturbation: Tensor) -> Tensor:
            nonlocal layer
            with context.perturbation.added(still, perturbation) as batch:
                layer, found = features(batch)
            return found

        r, pull = vjp(values, context.perturbation.zeros(still.inputs))[:2]
        if r.dim() != 2:
            what = f"takes features [B, F], and '{layer}' is given {tuple(r.shape)}"
            raise fail("soteria", what, "end the model with a linear classifier of one vector an example")

        def lengths(direction: Tensor) -> Tensor:
            # The same direction for all examples, each of which depends on its own input: one pass gives dr_f/dx_b for
            # every b.
            return pull(direction.expand_as(r))[0].flatten(1).norm(dim=1)

        directions = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        slopes = vmap(lengths, chunk_size=AT_ONCE)(directions).mT
        each = slopes / ((r.abs() if self.variant == "paper" else r) + self.delta)
        taken = context.included
        if taken is not None:  # an example that was not drawn may be no number
            weights = taken.to(each.dtype).unsqueeze(1)
            each = torch.where(weights != 0, weights * each, 0.0)
        return layer, each.sum(0)


def percentile(values: Tensor, share: float) -> Tensor:
    """Return NumPy's percentile of numbers [F], in between two of them by a straight line.

    >>> percentile(torch.tensor([4.0, 1.0, 2.0]), 75)
    tensor(3.)
    """
    ordered = values.sort().values
    place = share / 100 * (len(values) - 1)
    low = int(place)
    return torch.lerp(ordered[low], ordered[min(low + 1, len(values) - 1)], place - low)


def classifier(params: Mapping[str, Tensor]) -> str:
    """Name the weight of the last linear layer among parameters in the model's order: the last of two dimensions.

    >>> classifier({"conv": torch.zeros(2, 1, 3, 3), "head.weight": torch.zeros(3, 2), "head.bias": torch.zeros(3)})
    'head.weight'
    """
    matrices = [name for name, value in params.items() if value.dim() == 2]
    if not matrices:
        what = "finds no weight of a linear layer among the parameters that are sent"
        raise fail("soteria", what, "train the model's classifier, or choose another defence")
    return matrices[-1]


@dataclass(frozen=True)
class Outpost(Checked, Transform):
    """With probability 1 / (1 + beta i) in step i: zero each layer's small entries, add noise (Wang et al. 2023).

    The entries of a layer W whose magnitude is below its percentile `prune` become zero. Then N(0, (scale min(Var W,
    1))^2) is added to those, zeros too, whose Fisher information, for which stands the mean of g^2 over the first
    dimension, is among the largest `phi` percent of all layers. Percentiles are counts, as in `below`; Var W is the
    population variance. The coin `coin` and the noise `normal.<parameter>` are named; the neutral coin 1/2 does what is
    likelier.

    The paper leaves open whether i starts again in each round. Here it is state, `steps`, and runs on through all
    rounds, from 0 in the first, which is always perturbed.

    The support of what is sent is an intermediate `mask.<parameter>`. A column (entries that differ in the first
    dimension only) that holds a zero was given no noise, so its mask is known; a column without one is computed.
    There an attacker's derivative is that of noise added to g, whether the coin fell so or not, and of the coin by its
    distance from the threshold: with the computed masks as constants, knowing the defence makes an attacker weaker.
    """

    scale: Annotated[Strength, "Standard deviation of the noise, as a multiple of a layer's variance."] = 0.8
    prune: Annotated[Percentile, "Percentile below which entries are set to zero."] = 80.0
    phi: Annotated[float, Range(0, 100), "Percentage of columns that get noise."] = 40.0
    beta: Annotated[Strength, "Rate at which perturbed steps become rarer."] = 0.125
    label: ClassVar[str] = "outpost"
    stage: ClassVar[Stage] = Stage.PRUNE
    identity_settings: ClassVar = {"prune": 0.0, "scale": 0.0}

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start before the first step."""
        return {"steps": counter(params)}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one standard normal tensor a parameter, and the coin."""
        draws = {name: Noise(tuple(p.shape), Normal(), neutral=0.0, dtype=p.dtype) for name, p in params.items()}
        dtype = next(iter(params.values())).dtype
        coin = Noise((), Uniform(), neutral=0.5, dtype=dtype, lower=0.0, upper=1.0)
        return NoiseSpec({"coin": coin}) | NoiseSpec(draws).under("normal")

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the supports, which may be pinned."""
        law = Bernoulli(1 - self.prune / 100)
        masks = {
            name: Noise(tuple(p.shape), law, neutral=1.0, dtype=p.dtype, lower=0.0, upper=1.0, discrete=True)
            for name, p in params.items()
        }
        return NoiseSpec(masks).under("mask")

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Prune and add noise if the coin says so."""
        coin = noise["coin"]
        chance = (1 / (1 + self.beta * state["steps"])).to(coin.dtype)
        hit = (coin < chance).to(coin.dtype)
        still = tmap(torch.detach, update)
        noisy, normal, pinned = self._noisy(still), select(noise, "normal"), select(noise, "mask")
        sent: Tensors = {}
        for name, g in update.items():
            flat = still[name].abs().flatten()
            kept = ~smallest_mask(flat, below(self.prune, flat.numel())).reshape(g.shape)
            risk = context.params[name].var(correction=0).clamp(max=1)
            added = noisy[name] * (self.scale * risk) * normal[name]
            change = g * kept + added - g
            # The slope by the coin is minus what a perturbed step changes.
            smooth = g + hit * added + (chance - coin) * change.detach()
            sent[name] = straight_through(g + hit * change, smooth)
            if name in pinned:
                quiet = (pinned[name] == 0).any(0, keepdim=True)
                sent[name] = torch.where(quiet, g * pinned[name], sent[name])
        return sent, {"steps": state["steps"] + 1}

    def _noisy(self, update: Mapping[str, Tensor]) -> Tensors:
        """Mark the columns of every parameter with the largest mean of g^2: as many of all as `phi` says."""
        fisher = {name: value.square().mean(0, keepdim=True) for name, value in update.items()}
        flat = torch.cat([value.flatten() for value in fisher.values()])
        marked = ~smallest_mask(flat, below(100 - self.phi, flat.numel()))
        parts = torch.split(marked, [value.numel() for value in fisher.values()])
        return {name: part.reshape(fisher[name].shape) for name, part in zip(fisher, parts, strict=True)}

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read off the support: within it, only columns that hold a zero tell more."""
        return under("mask", {name: (value != 0).to(value.dtype) for name, value in sent.items()})


HIDING = (
    DefenceEntry(
        name="soteria",
        factory=Soteria,
        stage="soteria",
        description="Zero the classifier's columns of the features that depend most on the inputs for their size",
        changes=("step",),
        cost="a backward pass for every feature: 55 gradients of a small CNN; all bytes but the classifier's columns",
        citation="Sun et al. 2021, Soteria: Provable Defense against Privacy Leakage in Federated Learning (CVPR)",
        traits=PRUNED,
        identity={"percentile": 0.0},
    ),
    DefenceEntry(
        name="outpost",
        factory=Outpost,
        stage="outpost",
        description="Zero small entries and add noise where gradients are large, ever more seldom as training goes on",
        changes=("step",),
        cost="a few passes and a random number an entry in each step; 45% of the bytes at first, later more often all",
        citation="Wang, Hugh, Li 2023, More than Enough is Too Much: Adaptive Defenses against Gradient Leakage",
        traits=PRUNED,
        identity={"prune": 0.0, "scale": 0.0},
    ),
)
