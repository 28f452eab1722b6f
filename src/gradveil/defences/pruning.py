"""Pruning: send zeros in place of the smallest entries, and of the largest."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Normal
from gradveil.core.settings import Checked, Kept, Share
from gradveil.core.tree import Tensors, peak, plain, select, tmap, under
from gradveil.core.types import Context, Multiplier, Stage, Transform
from gradveil.defences.entry import DUAL, ORDERED, DefenceEntry

Floats = NDArray[np.float32]


class Border(NamedTuple):
    """Where n numbers are parted after the r-th smallest magnitude, of equal ones the first as smaller."""

    last: np.float32
    """The r-th smallest magnitude: those above it are on the upper side."""
    ties: int
    """How many entries of this magnitude are on the upper side, too: the last ones."""


_BLOCK = 1 << 16
"""Entries that stay in a core's cache while several operations pass over them (256 KiB)."""
_STRIDES = (61, 31, 13, 5)
"""Primes: a step of nine would see one place of every 3x3 kernel only."""
_SAMPLE = 2048
"""Entries that a sample should have."""
_DEVIATIONS = 4.0
"""Half of a bracket, in standard deviations of a random sample's count below the border."""


def borders(values: Floats, ranks: tuple[int, ...]) -> list[Border] | None:
    """Part n numbers after each rank r = 1, ..., n - 1; None if not all are finite.

    A sample brackets each border. One pass counts what is below the bracket and takes out the few percent within it,
    and only those are ordered. Where a sample misled, all numbers are: the result is exact in any case.

    >>> [tuple(border) for border in borders(np.array([3, -1, 0, 3], dtype=np.float32), (1, 3))]
    [(np.float32(0.0), 0), (np.float32(3.0), 1)]
    """
    brackets = [_bracket(values, rank) for rank in ranks]
    below = [0 for _ in ranks]
    near: list[list[Floats]] = [[] for _ in ranks]
    for block in _magnitudes(values):
        if not math.isfinite(block.max()):
            return None
        for i, (low, high) in enumerate(brackets):
            less = block < low
            below[i] += int(np.count_nonzero(less))
            # Below `low` both are true and above `high` both are false: they differ within the bracket.
            near[i].append(block[np.flatnonzero(less != (block <= high))])
    found: list[Border] = []
    for rank, less, parts in zip(ranks, below, near, strict=True):
        within, place = np.concatenate(parts), rank - less
        if not 0 < place <= len(within):
            within, place = np.abs(values), rank
        within.partition(place - 1)
        last = within[place - 1]
        found.append(Border(last, int(np.count_nonzero(within[place:] == last))))
    return found


def _magnitudes(values: Floats) -> Iterator[Floats]:
    """Yield the magnitudes block by block, each in the place of the last."""
    room = np.empty(min(_BLOCK, len(values)), dtype=values.dtype)
    for at in range(0, len(values), _BLOCK):
        part = values[at : at + _BLOCK]
        yield np.abs(part, out=room[: len(part)])


def _bracket(values: Floats, rank: int) -> tuple[np.float32, np.float32]:
    """Guess two magnitudes between which those on both sides of a border lie."""
    stride = next((s for s in _STRIDES if len(values) >= s * _SAMPLE), 1)
    sample = np.abs(values[::stride])
    share, size = rank / len(values), len(sample)
    # Standard deviation of a binomial count.
    spread = _DEVIATIONS * math.sqrt(size * share * (1 - share)) + 2
    low, high = max(0, int(size * share - spread)), min(size - 1, int(size * share + spread))
    sample.partition((low, high))
    return sample[low], sample[high]


def above(values: Floats, border: Border) -> NDArray[np.bool_]:
    """Mark the upper side of a border among numbers that are not negative; five times as fast as torch on a CPU."""
    marked = values > border.last
    marked[tied(values, border)] = True
    return marked


def tied(values: Floats, border: Border) -> NDArray[np.intp]:
    """Return the places of the ties on the upper side."""
    if not border.ties:
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.abs(values) == border.last)[-border.ties :]


LARGE = 4096
"""From this many entries on, thresholds by sampling are faster than ordering all on a CPU."""


def ends_mask(magnitude: Tensor, bottom: int, top: int = 0) -> Tensor:
    """Mark the `bottom` smallest and `top` largest entries along the last dimension: exactly so many.

    Entries must not be negative. Of equal entries the first count as smaller. Works under `vmap`; has no derivative.

    >>> ends_mask(torch.tensor([1.0, 1.0, 3.0, 2.0, 3.0]), 1, 1).int().tolist()
    [1, 0, 0, 0, 1]
    """
    assert min(bottom, top) >= 0, (bottom, top)
    assert bottom + top <= magnitude.shape[-1], (bottom, top)
    return _Ends.apply(magnitude, bottom, top)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def smallest_mask(magnitude: Tensor, count: int) -> Tensor:
    """Mark the `count` smallest entries along the last dimension.

    >>> smallest_mask(torch.tensor([0.0, 2.0, 0.0, 0.0]), 2).int().tolist()
    [1, 0, 1, 0]
    """
    return ends_mask(magnitude, count)


def without_ends(value: Tensor, bottom: int, top: int = 0) -> Tensor:
    """Return a tensor with the `bottom` smallest and `top` largest of all its magnitudes set to zero.

    Equal to `value` times the mask of what `ends_mask` does not mark, and computed like that under a
    derivative or `vmap`. A plain tensor on the CPU needs no mask, only its thresholds.

    >>> without_ends(torch.tensor([1.0, -4.0, 3.0, 2.0]), 1, 1)
    tensor([0., 0., 3., 2.])
    """
    if not (bottom or top):
        return value
    if plain(value) and value.device.type == "cpu" and value.dtype == torch.float32:
        found = _by_thresholds(value, bottom, top) if value.numel() >= LARGE else _by_places(value, bottom, top)
        if found is not None:
            return found
    removed = ends_mask(value.detach().abs().flatten(), bottom, top).reshape(value.shape)
    return value * (~removed).to(value.dtype)


def _by_places(value: Tensor, bottom: int, top: int) -> Tensor | None:
    """Order a small tensor; None if an entry is not finite."""
    flat = value.flatten()
    order = flat.abs().argsort(stable=True)
    out = flat.clone()
    out[order[:bottom]] = 0.0
    # Not -top, which for 0 would take all.
    out[order[len(order) - top :]] = 0.0
    # Finite numbers whose sum overflows are left to the slower way, too.
    return out.view(value.shape) if math.isfinite(flat.sum().item()) else None


def _by_thresholds(value: Tensor, bottom: int, top: int) -> Tensor | None:
    """Subtract what is above the upper threshold from what is above the lower one; None if an entry is not finite."""
    size = value.numel()
    if bottom == size or top == size:
        return torch.zeros_like(value)
    flat = value.flatten()
    found = borders(flat.numpy(), tuple(rank for rank in (bottom, size - top) if 0 < rank < size))
    if found is None:
        return None
    # hardshrink keeps what is above its threshold in magnitude: the ties on the upper side are put back below.
    parts = [F.hardshrink(flat, float(border.last)) for border in found]
    for part, border in zip(parts, found, strict=True):
        if border.ties and border.last:  # which zeros are sent makes no difference
            places = torch.as_tensor(tied(flat.numpy(), border))
            part[places] = flat[places]
    if not bottom:
        return (flat - parts[0]).view(value.shape)
    return (parts[0].sub_(parts[1]) if top else parts[0]).view(value.shape)


def ends_mask_by_order(magnitude: Tensor, bottom: int, top: int = 0) -> Tensor:
    """`ends_mask` by `kthvalue` and running counts of the ties: any device and dtype, no host reads."""
    removed = torch.zeros_like(magnitude, dtype=torch.bool)
    if bottom:
        threshold = magnitude.kthvalue(bottom, dim=-1, keepdim=True).values
        below, ties = magnitude < threshold, magnitude == threshold
        spare = bottom - below.sum(-1, keepdim=True)
        removed = below | (ties & (ties.cumsum(-1) <= spare))
    if top:
        # Turned around, so that of equal entries the last ones are the largest.
        removed = removed | ends_mask_by_order(-magnitude.flip(-1), top).flip(-1)
    return removed


def _row(row: Tensor, bottom: int, top: int) -> Tensor:
    """`ends_mask` of one float32 row on the CPU."""
    size, values = len(row), row.numpy()
    ranks = [rank for rank in (bottom, size - top) if 0 < rank < size]
    found = borders(values, tuple(ranks))
    if found is None:
        return ends_mask_by_order(row, bottom, top)
    upper = {rank: above(values, border) for rank, border in zip(ranks, found, strict=True)}
    removed = ~upper[bottom] if bottom in upper else np.full(size, bool(bottom) or top == size)
    if size - top in upper:
        removed |= upper[size - top]
    return torch.as_tensor(removed)


class _Ends(torch.autograd.Function):
    """A function of its own, so that `vmap` hands over whole batches and rows may be treated with host reads."""

    @staticmethod
    def forward(magnitude: Tensor, bottom: int, top: int) -> Tensor:
        """Choose the faster exact way."""
        fast = magnitude.device.type == "cpu" and magnitude.dtype == torch.float32 and magnitude.shape[-1] >= LARGE
        if not fast or not (bottom or top):
            return ends_mask_by_order(magnitude, bottom, top)
        rows = magnitude.reshape(-1, magnitude.shape[-1])
        return torch.stack([_row(row, bottom, top) for row in rows.unbind(0)]).reshape(magnitude.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """There is no derivative."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Pass nothing back."""
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Treat the batch dimension as one more leading dimension."""
        magnitude, bottom, top = args
        assert in_dims[0] is not None
        return ends_mask(magnitude.movedim(in_dims[0], 0), bottom, top), 0


BORDER = "border"
"""Name of the borders of the sent magnitudes."""
Ratio = Annotated[Share, "Share of entries that are set to zero."]
Scope = Annotated[Literal["layer", "global"], "Whether entries compete within their parameter, or with all others."]


class Pruning(Transform):
    """Base of transforms that multiply by a mask of zeros and ones.

    The masks are intermediates named `mask.<parameter>`: pinned ones are used, others computed. Either way they count
    as constants for the derivative, which is exact wherever no entry is at a threshold.

    Where magnitudes decide, the smallest and the largest that was sent, `border.<parameter>` [2], bound a pruned
    entry. Pinned together with the masks they make a pruned entry show by how much it breaks that order, which
    is zero for the true update, instead of zero.
    """

    stage: ClassVar[Stage] = Stage.PRUNE
    guarantee: ClassVar[str] = "no formal guarantee"
    prefix: ClassVar[str] = "mask"
    """Name of the masks: attackers who infer masks infer `mask.*`."""
    ordered: ClassVar[bool] = False
    """Whether the magnitudes that were sent bound those that were not."""

    @abstractmethod
    def removed(self) -> float:
        """Return the share of entries set to zero."""

    @abstractmethod
    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Return one mask a parameter, True where an entry is kept."""

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the masks, which may be pinned."""
        law = Bernoulli(1 - self.removed())
        masks = {
            name: Noise(tuple(p.shape), law, neutral=1.0, dtype=p.dtype, lower=0.0, upper=1.0, discrete=True)
            for name, p in params.items()
        }
        spec = NoiseSpec(masks).under(self.prefix)
        if not self.ordered:
            return spec
        borders = {n: Noise((2,), Normal(1.0), dtype=p.dtype, lower=0.0, discrete=True) for n, p in params.items()}
        return spec | NoiseSpec(borders).under(BORDER)

    def beyond(self, magnitude: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
        """Return by how much a pruned magnitude breaks the order, given the smallest and largest that were sent.

        With this base's pruning of the smallest it is what exceeds the smallest sent.
        """
        return (magnitude - smallest).clamp_min(0)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply by the masks; those that are not pinned are computed from the update itself."""
        pinned = select(noise, self.prefix)
        if not pinned and plain(*update.values()):
            return self.pruned(update), state
        missing = update.keys() - pinned.keys()
        masks = {**self.masks(tmap(torch.detach, update)), **pinned} if missing else pinned
        sent = {name: value * masks[name].to(value.dtype) for name, value in update.items()}
        for name, border in select(noise, BORDER).items():
            value, hidden = update[name], self.bounded(name, masks[name], context).to(update[name].dtype)
            sent[name] = sent[name] + hidden * value.sign() * self.beyond(value.abs(), border[0], border[1])
        return sent, state

    def bounded(self, name: str, mask: Tensor, context: Context) -> Tensor:
        """Mark the entries of a parameter that the order of magnitudes binds: all that were pruned."""
        return 1 - mask

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return the masks if all are pinned; with pinned borders a pruned entry is not zero."""
        pinned = select(noise, self.prefix)
        return None if params.keys() - pinned.keys() or select(noise, BORDER) else Multiplier(pinned)

    def pruned(self, update: Tensors) -> Tensors:
        """Multiply by the masks, or do what comes to the same values faster."""
        masks = self.masks(update)
        return {name: value * masks[name].to(value.dtype) for name, value in update.items()}

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read the masks off the support: an entry that was kept but is zero makes no difference."""
        masks = {f"{self.prefix}.{name}": (value != 0).to(value.dtype) for name, value in sent.items()}
        return {**masks, **under(BORDER, self.borders(sent))} if exact and self.ordered else masks

    def borders(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the smallest and the largest magnitude sent of each parameter; of none sent, no bound."""
        return tmap(_ends, sent)


@dataclass(frozen=True)
class Magnitude(Checked, Pruning):
    """Zero the share `ratio` of smallest magnitude: floor(ratio * P) of P entries, the first of equals first.

    The share is read as it is written in decimal: 0.29 of 100 entries are 29. Since ratio < 1, one entry always stays.
    """

    ratio: Ratio
    scope: Scope = "layer"
    label: ClassVar[str] = "prune"
    ordered: ClassVar[bool] = True
    identity_settings: ClassVar = {"ratio": 0.0}

    def removed(self) -> float:
        """Return the share of entries set to zero."""
        return self.ratio

    def masks(self, update: Mapping[str, Tensor], more: int = 0) -> Tensors:
        """Keep the largest entries of each parameter, or of all parameters together; `more` entries fewer than so."""
        if self.scope == "layer":
            return {name: _keep_largest(value.abs(), self.ratio, more) for name, value in update.items()}
        flat = torch.cat([value.abs().flatten() for value in update.values()])
        parts = torch.split(_keep_largest(flat, self.ratio, more), [value.numel() for value in update.values()])
        return {name: part.reshape(update[name].shape) for name, part in zip(update, parts, strict=True)}

    def pruned(self, update: Tensors) -> Tensors:
        """Cut each parameter at its threshold."""
        if self.scope == "global":
            return super().pruned(update)
        return {name: without_ends(value, share(self.ratio, value.numel())) for name, value in update.items()}

    def borders(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the smallest and largest magnitude of each parameter, or of all together."""
        if self.scope == "layer":
            return super().borders(sent)
        whole = _ends(torch.cat([value.flatten() for value in sent.values()]))
        return dict.fromkeys(sent, whole)


@dataclass(frozen=True)
class Dual(Checked, Pruning):
    """Zero the share `top` of largest and `bottom` of smallest magnitude of each parameter (Xue et al. 2024, DGP).

    This is the paper's Algorithm 1. The defence `dgp` adds error feedback, as its Algorithm 2 does; `feedback=false`
    leaves it out. In a first round both send the same.

    The paper leaves the rounding open. Here floor(top * P) and floor(bottom * P) entries go, so at least one
    stays; of equal entries the first are the smaller ones, so that the two sets never overlap.
    """

    top: Annotated[Share, "Share of the largest entries that are set to zero."] = 0.05
    bottom: Annotated[Share, "Share of the smallest entries that are set to zero."] = 0.75
    label: ClassVar[str] = "dgp"
    ordered: ClassVar[bool] = True
    identity_settings: ClassVar = {"top": 0.0, "bottom": 0.0}

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse shares that leave nothing to send."""
        if sound and (total := as_written(self.top) + as_written(self.bottom)) >= 1:
            what = f"top + bottom is {total}, which leaves nothing to send"
            yield Problem("dgp", what, "give shares whose sum is below 1")

    def removed(self) -> float:
        """Return the share of entries set to zero."""
        return self.top + self.bottom

    def beyond(self, magnitude: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
        """Return the way to the nearer of the two ends, between which all entries are sent."""
        return within(magnitude, smallest, largest)

    def masks(self, update: Mapping[str, Tensor]) -> Tensors:
        """Keep the entries between the two thresholds."""
        return tmap(self._keep_middle, update)

    def _keep_middle(self, value: Tensor) -> Tensor:
        flat = value.abs().flatten()
        removed = ends_mask(flat, share(self.bottom, flat.numel()), share(self.top, flat.numel()))
        return ~removed.reshape(value.shape)

    def pruned(self, update: Tensors) -> Tensors:
        """Cut each parameter at its two thresholds."""
        counts = {name: [share(ratio, g.numel()) for ratio in (self.bottom, self.top)] for name, g in update.items()}
        return {name: without_ends(value, *counts[name]) for name, value in update.items()}


def share(ratio: float, entries: int) -> int:
    """Count floor(ratio * entries) with the ratio as it is written in decimal.

    >>> share(0.29, 100), int(0.29 * 100), share(0.99, 1)
    (29, 28, 0)
    """
    return int(as_written(ratio) * entries)


def rest(ratio: float, entries: int) -> float:
    """Return by how much ratio * entries exceeds `share`: what whole entries cannot make up.

    >>> rest(0.29, 100), rest(0.5, 7)
    (0.0, 0.5)
    """
    return float(as_written(ratio) * entries % 1)


def below(percentile: float, entries: int) -> int:
    """Count the entries below a percentile, ceil(p (n - 1) / 100): NumPy's, where no two entries are equal.

    >>> below(80, 6), below(50, 5), below(0, 9), below(99.9, 1)
    (4, 2, 0, 0)
    """
    return ceil(as_written(percentile) * (entries - 1) / 100)


def within(magnitude: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
    """Return how far a magnitude lies between two ends, from the nearer one; zero outside.

    >>> within(torch.tensor([1.0, 3.0, 6.0, 9.0]), torch.tensor(2.0), torch.tensor(8.0))
    tensor([0., 1., 2., 0.])
    """
    return torch.minimum(magnitude - smallest, largest - magnitude).clamp_min(0)


def _ends(sent: Tensor) -> Tensor:
    """Return the smallest and largest magnitude of what is not zero; where all is, infinity: nothing is known."""
    magnitude = sent.detach().abs()
    # Minus the largest of the negative magnitudes; infinity where there are none.
    smallest = -peak(torch.where(magnitude > 0, -magnitude, -torch.inf), -torch.inf)
    return torch.stack([smallest, torch.where(smallest < torch.inf, peak(magnitude), smallest)])


def _keep_largest(magnitude: Tensor, ratio: float, more: int) -> Tensor:
    flat = magnitude.flatten()
    return ~smallest_mask(flat, share(ratio, flat.numel()) + more).reshape(magnitude.shape)


def as_written(ratio: float) -> Decimal:
    """Return a share as people write it in decimal: 0.29 of 100 entries are 29."""
    return Decimal(repr(float(ratio)))


def _topk(keep: Annotated[Kept, "Share of entries that are sent."]) -> Magnitude:
    return Magnitude(float(1 - as_written(keep)))


PRUNING = (
    DefenceEntry(
        name="prune",
        factory=Magnitude,
        stage="prune",
        feedback=False,
        description="Send zeros in place of the smallest entries, per layer or over all layers",
        changes=("send",),
        cost="a few passes over the update; 22% of the bytes at ratio=0.8",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        traits=ORDERED,
        identity={"ratio": 0.0},
    ),
    DefenceEntry(
        name="topk",
        factory=_topk,
        stage="prune",
        feedback=False,
        description="Send only the largest entries of each layer: prune with the share to keep",
        changes=("send",),
        cost="a few passes over the update: 1.1 to 1.3 gradients; 22% of the bytes at keep=0.2",
        citation="Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent",
        traits=ORDERED,
        identity={"keep": 1.0},
    ),
    DefenceEntry(
        name="dgp",
        factory=Dual,
        stage="prune",
        feedback=True,
        description="Dual gradient pruning: send zeros in place of each layer's largest and smallest entries",
        changes=("send",),
        cost="a few passes over the update: 1.1 to 1.4 gradients; 22% of the bytes",
        citation="Xue et al. 2024, Dual Gradient Pruning (AAAI)",
        traits=DUAL,
        identity={"top": 0.0, "bottom": 0.0},
    ),
)
