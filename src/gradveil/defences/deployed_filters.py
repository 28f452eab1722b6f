"""Filters that federated-learning frameworks ship: percentile and sparse-vector privacy of NVFlare, Flower's local DP.

NVFlare's filters see d, what was sent divided by the number of local steps, and multiply by it again. Their bound gamma
is meant for differences of weights: where gradients are sent, set it in units of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradveil.core.chain import chain
from gradveil.core.noise import Laplace, Noise, NoiseSpec, Uniform
from gradveil.core.settings import Bound, Checked, Count, Positive, Range
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Context, Multiplier
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.composition import Defence
from gradveil.defences.dp import Clip
from gradveil.defences.entry import ORDERED, PRUNED, DefenceEntry
from gradveil.defences.pruning import Pruning

Gamma = Annotated[Bound, "Magnitude to which each entry is cut, per local step."]
Steps = Annotated[Count, "Local steps that an update sums: entries are divided by it first, and multiplied again last."]


@dataclass(frozen=True)
class Percentile(Checked, Pruning):
    """Zero entries strictly inside the `percentile` of magnitudes, cut the rest to [-gamma, gamma].

    NVFlare's `PercentilePrivacy` (after Shokri and Shmatikov 2015): the percentile is over the entries of all
    parameters together, interpolated between two of them. At the default of 10 it sends the largest 90%. A parameter
    that is a single number passes unchanged.
    """

    percentile: Annotated[float, Range(0, 100), "Percentile of magnitudes below which entries become zero."] = 10.0
    gamma: Gamma = 0.01
    steps: Steps = 1
    label: ClassVar[str] = "percentile"
    ordered: ClassVar[bool] = True
    identity_settings: ClassVar = {"percentile": 0.0, "gamma": math.inf}

    def removed(self) -> float:
        """Return the share of entries set to zero."""
        return self.percentile / 100

    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Keep what is not strictly inside the percentile of all magnitudes."""
        magnitudes = {name: value.abs() for name, value in update.items()}
        ranked = torch.cat([value.flatten() for value in magnitudes.values()]).sort().values
        place = self.percentile / 100 * (len(ranked) - 1)
        lower, upper = ranked[math.floor(place)], ranked[math.ceil(place)]
        cutoff = torch.lerp(lower, upper, place - math.floor(place))
        return {name: (value >= cutoff) | (value.ndim == 0) for name, value in magnitudes.items()}

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Zero the small entries, and cut the others."""
        sent, state = super().apply(update, state, noise, context)
        return _cut(sent, self.gamma * self.steps), state

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Only multiply where nothing is cut."""
        return None if math.isfinite(self.gamma) else super().multiplier(params, noise, off)

    def borders(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the smallest and largest magnitude that was sent of all parameters together."""
        whole = super().borders({"all": torch.cat([value.flatten() for value in sent.values()])})["all"]
        return dict.fromkeys(sent, whole)


def _cut(update: Tensors, bound: float) -> Tensors:
    """Cut the entries of every parameter but single numbers."""
    if not math.isfinite(bound):
        return update
    return {name: value.clamp(-bound, bound) if value.ndim else value for name, value in update.items()}


class SvtBudget(NamedTuple):
    """The epsilons of one round of NVFlare's sparse-vector filter, by its own accounting of pure composition."""

    sent: int
    """n, the entries that are drawn."""
    threshold: float
    query: float
    release: float

    @property
    def total(self) -> float:
        """The epsilon of the round."""
        return self.threshold + self.query + self.release


def svt_budget(entries: int, fraction: float, epsilon: float, noise_var: float) -> SvtBudget:
    """Split the budget of a round: epsilon_threshold : epsilon_query = 1 : (2n)^(2/3), and n noise_var for the values.

    >>> budget = svt_budget(7_033_300, 0.1, 0.1, 0.1)
    >>> budget.sent, round(budget.threshold + budget.query, 9), round(budget.total)
    (703330, 0.1, 70333)
    """
    sent = min(math.ceil(entries * fraction), entries)
    ratio = (2.0 * sent) ** (2 / 3)
    threshold = epsilon / (1 + ratio)
    return SvtBudget(sent, threshold, epsilon - threshold, sent * noise_var)


@dataclass(frozen=True)
class SparseVector(Checked, Pruning):
    """Send noisy values of entries that a noisy threshold lets through, zeros in place of all others.

    NVFlare's `SVTPrivacy`. Of N entries, n = ceil(fraction N) are wanted. With epsilon_t : epsilon_q = 1 : (2n)^(2/3),
    an entry passes if |cut(d)| + Lap(2 gamma n / epsilon_q) >= tau + Lap(gamma / epsilon_t); those that did not are
    asked again with new noise, until n have passed. Of these n are drawn, with or without replacement, and sent as
    cut(d) + Lap(2 gamma / noise_var). The pass in which an entry is let through is geometric, so that one uniform
    number an entry decides it.

    Its `epsilon` is that of the selection only: the values cost n noise_var more, see `svt_budget`. Every further pass
    draws the noise again without a budget, so that not even this sum is a proof.
    """

    fraction: Annotated[float, Range(0, 1, low_open=True), "Share of entries to send."] = 0.1
    epsilon: Annotated[Positive, "Epsilon of the selection alone."] = 0.1
    noise_var: Annotated[Positive, "Epsilon of each value that is sent."] = 0.1
    gamma: Annotated[Positive, "Magnitude to which each entry is cut, per local step."] = 1e-5
    tau: Annotated[float, Range(0), "Threshold before its noise."] = 1e-6
    replace: Annotated[bool, "Draw the entries to send with replacement."] = True
    steps: Steps = 1
    label: ClassVar[str] = "svt"
    guarantee: ClassVar[str] = "no formal guarantee: repeated passes draw noise without a budget, and values cost extra"

    def removed(self) -> float:
        """Return the share of entries set to zero, if no entry is drawn twice."""
        return 1 - self.fraction

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the noise of the threshold, of each question and value, and the order in which entries are drawn."""
        dtype = next(iter(params.values())).dtype
        sent = svt_budget(_count(params), self.fraction, self.epsilon, self.noise_var).sent
        shapes = {name: tuple(value.shape) for name, value in params.items()}
        # In float64, since a hundredth of an entry's probability decides in which pass it is let through.
        asked = {name: Noise(shape, Uniform(), 0.5, torch.float64, discrete=True) for name, shape in shapes.items()}
        values = {name: Noise(shape, Laplace(), 0.0, dtype) for name, shape in shapes.items()}
        drawn = Noise((sent,), Uniform(), 0.5, torch.float64, discrete=True)
        if not self.replace:
            drawn = Noise((_count(params),), Uniform(), 0.5, torch.float64, discrete=True)
        threshold = Noise((), Laplace(), 0.0, torch.float64, discrete=True)
        rest = NoiseSpec({"threshold": threshold, "drawn": drawn})
        return NoiseSpec(asked).under("asked") | NoiseSpec(values).under("value") | rest

    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Keep everything: without their noise it is not known which entries are let through."""
        return {name: torch.ones_like(value, dtype=torch.bool) for name, value in update.items()}

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Choose the entries, cut them, and add the noise of their values."""
        cut = _cut({name: value / self.steps for name, value in update.items()}, self.gamma)
        masks = select(noise, self.prefix)
        if update.keys() - masks.keys():
            masks = {**self._chosen({name: value.detach() for name, value in cut.items()}, noise), **masks}
        scale, values = 2 * self.gamma / self.noise_var, select(noise, "value")
        sent = {name: (cut[name] + scale * values[name]) * masks[name].to(cut[name].dtype) for name in cut}
        whole = {name: sent[name] * self.steps if value.ndim else value for name, value in update.items()}
        return whole, state

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Entries are cut, not only multiplied."""
        return None

    def _chosen(self, cut: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> Tensors:
        """Let entries through, and draw among them: masks of what is sent."""
        magnitude = torch.cat([value.abs().flatten() for value in cut.values()]).double()
        budget = svt_budget(len(magnitude), self.fraction, self.epsilon, self.noise_var)
        threshold = self.tau + self.gamma / budget.threshold * noise["threshold"]
        scale = 2 * self.gamma * budget.sent / budget.query
        asked = select(noise, "asked")
        uniform = torch.cat([asked[name].flatten() for name in cut])
        # An entry is refused j times or more with probability F^j: the inverse of this law at u is log(1 - u) / log F.
        passes = torch.log1p(-uniform) / _log_refused((threshold - magnitude) / scale)
        passes = passes.nan_to_num(torch.inf, torch.inf, torch.inf).floor()  # refused so many times first
        order = passes.argsort(stable=True)
        last = passes[order[budget.sent - 1]]
        # All that pass as early as the n-th one: these are the entries among which n are drawn.
        through = passes <= last
        if self.replace:
            number = through.sum()
            places = order[(noise["drawn"] * number).long().clamp_min(0).minimum(number - 1)]
        else:
            places = torch.where(through, noise["drawn"], torch.inf).argsort(stable=True)[: budget.sent]
        mask = torch.zeros_like(magnitude).scatter(0, places, 1.0)
        sizes = [value.numel() for value in cut.values()]
        parts = torch.split(mask, sizes)
        return {name: part.reshape(cut[name].shape) for name, part in zip(cut, parts, strict=True)}


def _count(params: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in params.values())


def _log_refused(distance: Tensor) -> Tensor:
    """Return log P(Lap(1) < distance)."""
    # log(e^d / 2) for d < 0, else log(1 - e^-d / 2); each is clamped where the other holds.
    below = distance.clamp_max(0) - math.log(2)
    above = torch.log1p(-torch.exp(-distance.clamp_min(0)) / 2)
    return torch.where(distance < 0, below, above)


def _local_dp(
    clip: Annotated[Bound, "`clipping_norm`: largest norm of an update."] = 1.0,
    sensitivity: Annotated[Positive, "What the noise is scaled to: the most that an update can change."] = 1.0,
    epsilon: Annotated[float, Range(0, low_open=True, unlimited=True), "Epsilon that the noise is computed for."] = 1.0,
    delta: Annotated[float, Range(0, 1, low_open=True, high_open=True), "Delta that it is computed for."] = 1e-5,
) -> Defence:
    """Flower's `LocalDpMod`: scale the update by min(1, clip / norm), add N(0, std^2) by the classical formula."""
    std = local_dp_std(sensitivity, epsilon, delta)
    return Defence("local-dp", send=chain(clip=Clip(clip), noise=Gaussian(std, scaled_to=min(sensitivity, clip))))


def local_dp_std(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return sensitivity sqrt(2 ln(1.25 / delta)) / epsilon (Dwork and Roth 2014, proven for epsilon below 1).

    >>> round(local_dp_std(1, 1, 1e-5), 4)
    4.8448
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


FILTERS = (
    DefenceEntry(
        name="percentile",
        factory=Percentile,
        stage="prune",
        description="NVFlare's percentile filter: zero the smallest entries of all layers, cut the others to a bound",
        changes=("send",),
        cost="a sort of the update; 90% of the bytes",
        citation="Shokri and Shmatikov 2015, Privacy-Preserving Deep Learning (CCS); NVIDIA FLARE, PercentilePrivacy",
        traits=ORDERED,
        identity={"percentile": 0.0, "gamma": float("inf")},
    ),
    DefenceEntry(
        name="svt",
        factory=SparseVector,
        stage="svt",
        description="NVFlare's sparse-vector filter: send noisy values of entries that pass a noisy threshold",
        changes=("send",),
        cost="two random numbers an entry and a sort; 11% of the bytes",
        citation="Lyu, Su, Li 2017, Understanding the Sparse Vector Technique for Differential Privacy; NVIDIA FLARE, "
        "SVTPrivacy",
        traits=PRUNED,
    ),
    DefenceEntry(
        name="local-dp",
        factory=_local_dp,
        description="Flower's LocalDpMod: clip the update, add normal noise by the classical formula",
        changes=("send",),
        guarantee="differential privacy of clients, if the sensitivity is what an update can change",
        cost="a random number an entry; all bytes",
        citation="Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy; Flower, LocalDpMod",
        identity={"clip": float("inf"), "epsilon": float("inf")},
    ),
)
"""Filters of NVFlare and Flower."""
