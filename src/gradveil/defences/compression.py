"""Compression: sampling, quantisation, deep gradient compression."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Uniform
from gradveil.core.settings import Bound, Checked, Count, Kept, Range, Share
from gradveil.core.tree import Tensors, counter, peak, plain, select, straight_through, tmap, under
from gradveil.core.types import Context, DrawsEntries, Multiplier, Stage, Transform
from gradveil.defences.entry import PRUNED, DefenceEntry
from gradveil.defences.pruning import Pruning, Ratio, as_written, share, smallest_mask
from gradveil.gradients.fused import in_blocks, with_slope


@dataclass(frozen=True)
class MinMax(Checked, Pruning, DrawsEntries):
    """Keep each layer's k entries of largest w = (1/u - 1) g^2 and send g + C/g, C the (k+1)-th largest w.

    u ~ U[0, 1) is named like its parameter, k = P - floor(ratio * P) of P entries. Given the other entries one is
    kept with probability g^2 / (g^2 + C), so the mean of what is sent is g, and its sign never changes. It is the
    sampler that GLAUS (Yang et al. 2023) attacks.

    The neutral u = 1 is never drawn. It makes w and C zero: all is sent as it is, or with a pinned mask what that
    keeps. The zeros show the masks, but they are no `mask.*`, which attackers infer by themselves: to compare only what
    was drawn, as with pruned entries, throws away that small entries were left out, and does worse than the mean.
    """

    ratio: Ratio
    label: ClassVar[str] = "minmax"
    prefix: ClassVar[str] = "kept"
    identity_settings: ClassVar = {"ratio": 0.0}

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

    def negative_log_likelihood(
        self, update: Mapping[str, Tensor], sent: Mapping[str, Tensor], width: float
    ) -> Tensors:
        """Return -log of the probability g^2 / (g^2 + C) of what is sent, and of C / (g^2 + C) where nothing is.

        v = g + C/g has two roots, of which one is above sqrt(C). The smallest magnitude is about 2 sqrt(C). A value
        counts as sent if it is as near to a root as three widths, in units of sqrt(C).
        """
        return {
            name: self._of_entries(update[name].flatten(1), value.flatten(1), width) for name, value in sent.items()
        }

    def _of_entries(self, value: Tensor, sent: Tensor, width: float) -> Tensor:
        size, sign, scale = sent.abs(), sent.sign(), (3 * width) ** 2
        root = _least(size) / 2
        own, shown = value.detach() / root, size / root
        large = ((shown + (shown.square() - 4).clamp_min(0).sqrt()) / 2).clamp_min(1.0)
        above, below = own * sign - large, own * sign - 1 / large
        odds = 2 * large.log()
        of_large, of_small = odds - above.square() / (2 * scale), -odds - below.square() / (2 * scale)
        kept = torch.logaddexp(of_large, of_small)
        share = (of_large - kept).exp()
        slope = (share * above + (1 - share) * below) * sign / scale
        square = own.square()
        there = sent != 0  # no number, too, must not pass for nothing sent
        unlikely = torch.where(there, torch.log1p(large.square()) - kept, torch.log1p(square))
        return with_slope(value, unlikely, torch.where(there, slope, 2 * own / (1 + square)) / root)

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return None: what is kept is enlarged as well, by more than one number."""
        return None


def _least(size: Tensor) -> Tensor:
    """Return the smallest magnitude [N, 1] of each layer [N, P] that is not zero, and one where all are."""
    least = torch.where(size > 0, size, torch.inf).amin(1, keepdim=True)
    return torch.where(least.isfinite(), least, torch.ones_like(least))


_UNLIKELY = 0.03
"""About twice the smallest probability of an entry that was left out."""


def _weight(value: Tensor, u: Tensor) -> Tensor:
    # u may be 0: the smallest other number of U[0, 1) takes its place.
    return (1 / u.clamp_min(torch.finfo(u.dtype).eps / 2) - 1) * value.square()


def _enlarged(value: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """Add C/g, where C is the largest weight that was left out."""
    left = peak(torch.where(kept, torch.zeros_like(weight), weight))
    there = kept & (value != 0)
    safe = torch.where(there, value, torch.ones_like(value))
    return torch.where(there, value + left / safe, torch.zeros_like(value))


Level = Annotated[Literal["l2", "max"], "A layer's largest level: its norm, or its largest magnitude."]
Clipped = Annotated[Bound, "Limit of magnitudes before they are rounded, in root mean squares of their layer."]


@dataclass(frozen=True)
class Sign(Checked, Transform):
    """Send sign(g) times the mean of |g| in each layer (Bernstein et al. 2018; with the scale Karimireddy et al. 2019).

    The exact derivative is zero. An attacker's is that of g / (|g| + mean |g|), times the scale: an entry that is
    small in its layer may still turn, so it counts more than a large one. With the identity as the surrogate instead,
    an attacker who simulates the signs does worse than one who ignores them. They do better, too, with the masks of
    their own update than with an earlier pruning's zeros pinned: that pruned entries are small is much of the evidence.
    """

    scale: Annotated[Literal["mean", "unit"], "Factor of the signs: the mean magnitude of their layer, or 1."] = "mean"
    label: ClassVar[str] = "sign"
    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Replace every entry by its sign, zero by zero."""
        return tmap(self._signs, update), state

    def _signs(self, value: Tensor) -> Tensor:
        fixed = value.detach()
        mean = fixed.abs().mean()
        size = mean if self.scale == "mean" else torch.ones_like(mean)
        smooth = value / (fixed.abs() + mean + torch.finfo(value.dtype).tiny)
        return straight_through(size * fixed.sign(), size * smooth)


@dataclass(frozen=True)
class Quantise(Checked, Transform, DrawsEntries):
    """Round |g| at random to one of 0, s/L, 2s/L, ..., s, so that the mean is g (Alistarh et al. 2017, QSGD).

    s is the layer's Euclidean norm or its largest magnitude, L = `levels`. An entry between two levels is rounded up
    with the probability of its place between them: where u < frac(L |g| / s), with u ~ U[0, 1) named like its
    parameter. One level and the largest magnitude make TernGrad (Wen et al. 2017). A finite `clip` limits |g| to so
    many times the layer's root mean square first, which TernGrad does at 2.5 and which costs the unbiasedness; unlike
    the standard deviation of the paper the root mean square is not zero in a layer of one entry.

    The neutral u = 1 is never drawn: it stands for no rounding, so that what is sent is its mean. An attacker's
    derivative is that of g + (1/2 - u) s/L, rounding's linear part: one in g, and not zero in u, for attackers who
    optimise it.

    Zeros of an earlier pruning show. Reading an entry that was rounded to zero as pruned is wrong only in the norm.
    """

    levels: Annotated[Count, "Number of levels above zero."]
    scale: Level = "l2"
    clip: Clipped = float("inf")
    label: ClassVar[str] = "quantise"
    stage: ClassVar[Stage] = Stage.QUANTISE
    shows_zeros: ClassVar[bool] = True

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one uniform number an entry."""
        return uniform(params)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Round every entry to a level."""
        return {name: self._rounded(value, noise[name]) for name, value in update.items()}, state

    def negative_log_likelihood(
        self, update: Mapping[str, Tensor], sent: Mapping[str, Tensor], width: float
    ) -> Tensors:
        """Return -log of the rounding's probabilities: one less the distance to the level, in levels.

        The smallest magnitude of a layer is taken for one level. Where it is several, the law is only wider.
        """
        return {
            name: self._of_entries(update[name].flatten(1), value.flatten(1), width) for name, value in sent.items()
        }

    def _of_entries(self, value: Tensor, sent: Tensor, width: float) -> Tensor:
        size = sent.abs()
        level = _least(size)
        there, levels = size > 0, sent / level
        away = value.detach() / level - levels
        if self.clip < float("inf"):
            # The clip may have cut what is at the top; with the norm it may have been rounded one level down.
            cut = levels.abs() >= levels.abs().amax(1, keepdim=True) - (0.5 if self.scale == "max" else 1.5)
            away = torch.where(cut & (away * sent > 0), 0, away)
        soft = width * levels.abs().mean(1, keepdim=True).clamp_max(1)
        distance = (away.square() + torch.where(there, 0, soft).square()).sqrt().clamp_min(1e-12)
        near, least = 1 - distance, torch.where(there, soft, _UNLIKELY)
        root = (near.square() + least.square()).sqrt()
        # Twice the probability, smoothed: never zero, and without cancellation where it is small.
        likely = torch.where(near > 0, near + root, least.square() / (root - near))
        return with_slope(value, -(likely / 2).log(), away / (distance * root * level))

    def _rounded(self, value: Tensor, u: Tensor) -> Tensor:
        if self.clip < float("inf"):
            bound = self.clip * value.detach().square().mean().sqrt()
            value = torch.maximum(torch.minimum(value, bound), -bound)
        fixed = value.detach()
        size = fixed.square().sum().sqrt() if self.scale == "l2" else peak(fixed.abs())
        place = fixed.abs() / torch.where(size > 0, size, torch.ones_like(size)) * self.levels
        below = place.floor()
        step = fixed.sign() * size / self.levels
        exact = torch.where(u < 1, step * (below + (u < place - below)), fixed)
        return straight_through(exact, value + step * (0.5 - u))


def uniform(params: Mapping[str, Tensor]) -> NoiseSpec:
    """Declare U[0, 1) for every entry; 1, which is never drawn, switches the randomness off."""
    law = Uniform()
    return NoiseSpec(
        {name: Noise(tuple(p.shape), law, neutral=1.0, dtype=p.dtype, lower=0, upper=1) for name, p in params.items()}
    )


@dataclass(frozen=True)
class Dgc(Checked, Transform):
    """Momentum correction and masking (Lin et al. 2018, Deep Gradient Compression).

    u <- m u + g, v <- v + u; each layer sends its `keep` largest of |v|, and there u and v become zero. What was not
    sent stays in v. Parameters of one dimension (biases, norms) are few: they send u itself, keep it, and have no mask.

    In round e = 0, 1, ... the share is keep^((e + 1) / (warmup + 1)), and `keep` from round `warmup` on; the round is
    counted in the state. The paper clips local gradients as well: put `clip` before it for that.
    Masks are named `mask.<parameter>`, like those of pruning, and zeros show them.
    """

    keep: Annotated[Kept, "Share of entries that are sent, after the warm-up."] = 0.001
    momentum: Annotated[Share, "Momentum that the client keeps."] = 0.9
    warmup: Annotated[int, Range(0, integer=True), "Rounds in which the share falls to `keep`."] = 5
    label: ClassVar[str] = "dgc"
    stage: ClassVar[Stage] = Stage.PRUNE
    identity_settings: ClassVar = {"keep": 1.0, "momentum": 0.0}

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Start with no momentum, nothing accumulated, and no round."""
        layers = tmap(torch.zeros_like, {n: p for n, p in params.items() if p.dim() > 1})
        return {"rounds": counter(params), **under("momentum", tmap(torch.zeros_like, params)), **under("left", layers)}

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the masks of the layers, which may be pinned."""
        law = Bernoulli(self.keep)
        masks = {
            n: Noise(tuple(p.shape), law, neutral=1.0, dtype=p.dtype, lower=0.0, upper=1.0, discrete=True)
            for n, p in params.items()
            if p.dim() > 1
        }
        return NoiseSpec(masks).under("mask")

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read the masks off the support: an entry that was kept but is zero makes no difference."""
        return {f"mask.{n}": (value != 0).to(value.dtype) for n, value in sent.items() if value.dim() > 1}

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Accumulate, send the largest entries, and forget what was sent."""
        pinned = select(noise, "mask")
        sent: Tensors = {}
        left: Tensors = {}
        momentum: Tensors = {}
        for name, g in update.items():
            if f"left.{name}" not in state:
                sent[name] = momentum[name] = self._accelerated(g, state[f"momentum.{name}"])[0]
                continue
            given = g, state[f"momentum.{name}"], state[f"left.{name}"]
            fast, total = in_blocks(self._accelerated, *given)
            mask = pinned[name] if name in pinned else self._mask(total.detach(), state["rounds"])
            sent[name], left[name], momentum[name] = in_blocks(_parted, mask, total, fast)
        return sent, {"rounds": state["rounds"] + 1, **under("momentum", momentum), **under("left", left)}

    def _accelerated(self, g: Tensor, momentum: Tensor, *left: Tensor) -> tuple[Tensor, ...]:
        """Return u <- m u + g, and v <- v + u where something was left."""
        fast = self.momentum * momentum + g
        return fast, *(before + fast for before in left)

    def _mask(self, total: Tensor, rounds: Tensor) -> Tensor:
        """Mark the largest entries: as many as this round sends."""
        flat = total.abs().flatten()
        counts = [share(float(1 - as_written(kept)), flat.numel()) for kept in self.shares()]
        if len(set(counts)) == 1 or plain(total, rounds):
            count = counts[min(int(rounds), len(counts) - 1)] if len(set(counts)) > 1 else counts[0]
            return ~smallest_mask(flat, count).reshape(total.shape)
        # The round is a tensor (each target client has its own), so the number to select is one, too: compare ranks.
        rank = flat.argsort(stable=True).argsort()
        removed = torch.tensor(counts, device=flat.device)[rounds.long().clamp(max=len(counts) - 1)]
        return (rank >= removed).reshape(total.shape)

    def shares(self) -> list[float]:
        """Return the share that is kept in each round of the warm-up, and after it.

        >>> [round(share, 3) for share in Dgc(keep=0.001, warmup=2).shares()]
        [0.1, 0.01, 0.001]
        """
        last = int(self.warmup)
        return [*(self.keep ** ((e + 1) / (last + 1)) for e in range(last)), self.keep]


def _parted(mask: Tensor, total: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is sent, what is left, and the momentum of what is left."""
    # Torch converts bytes six times as fast as truth values.
    kept = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).to(total.dtype)
    rest = 1 - kept
    return total * kept, total * rest, momentum * rest


def _ternary(clip: Clipped = float("inf")) -> Quantise:
    return Quantise(1, "max", clip)


def _quantise(
    bits: Annotated[int, Range(2, 16, integer=True), "Bits of an entry, of which one is the sign."] = 8,
    scale: Level = "l2",
) -> Quantise:
    return Quantise(2 ** (bits - 1) - 1, scale)


COMPRESSING = (
    DefenceEntry(
        name="sign",
        factory=Sign,
        stage="sign",
        feedback=False,
        description="Send one bit an entry, its sign, and the mean magnitude of each layer",
        changes=("send",),
        cost="one pass over the update; 7% of the bytes",
        citation="Bernstein et al. 2018, signSGD: Compressed Optimisation for Non-Convex Problems",
    ),
    DefenceEntry(
        name="ternary",
        factory=_ternary,
        stage="quantise",
        description="Round every entry at random to minus, zero or plus its layer's largest magnitude",
        changes=("send",),
        cost="a random number an entry; 2% of the bytes",
        citation="Wen et al. 2017, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
        traits=("draws entries",),
    ),
    DefenceEntry(
        name="quantise",
        factory=_quantise,
        stage="quantise",
        description="Round every entry at random to a sign and a level, in so many bits together",
        changes=("send",),
        cost="a random number an entry; 7% of the bytes",
        citation="Alistarh et al. 2017, QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        traits=("draws entries",),
    ),
    DefenceEntry(
        name="minmax",
        factory=MinMax,
        stage="sample",
        description="Send a few entries drawn at random, larger ones more often, enlarged so that the mean is right",
        changes=("send",),
        cost="a random number an entry; 22% of the bytes at ratio=0.8",
        citation="MinMax sampling, as Yang et al. 2023 (GLAUS) attack it",
        traits=("draws entries",),
        identity={"ratio": 0.0},
    ),
    DefenceEntry(
        name="dgc",
        factory=Dgc,
        stage="dgc",
        description="Deep gradient compression: momentum kept by the client, its largest accumulated entries sent",
        changes=("send",),
        cost="a few passes, two copies of the update kept: 1.3 to 1.5 gradients; 34% of the bytes at first, later 0.4%",
        citation="Lin et al. 2018, Deep Gradient Compression: Reducing the Communication Bandwidth (ICLR)",
        traits=PRUNED,
        identity={"keep": 1.0, "momentum": 0.0},
    ),
)
