"""Pruning: send zeros in place of the smallest entries, and of the largest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.allowed import SHARE, Choice, collect
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Normal
from gradveil.core.tree import Tensors, peak, plain, select, tmap, under
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences.selection import ends_mask, smallest_mask, without_ends

BORDER = "border"
"""What the borders of the sent magnitudes are called."""
SCOPE = Choice(("layer", "global"))
"""Whether entries compete within their own parameter tensor or with all others."""


class Pruning(Transform):
    """Base of transforms that multiply by a mask of zeros and ones.

    The masks are intermediates named `mask.<parameter>`: pinned ones are used, others computed. Either way they count
    as constants for the derivative, which is exact wherever no entry is at a threshold.

    Where magnitudes decide, the smallest and the largest that was sent, `border.<parameter>` [2], say how large a
    pruned entry can be. Pinned beside the masks they make a pruned entry show by how much it breaks that order, which
    is zero for the true update, instead of zero.
    """

    stage: ClassVar[Stage] = Stage.PRUNE
    guarantee: ClassVar[str] = "no formal guarantee"
    prefix: ClassVar[str] = "mask"
    """What the masks are called: attackers who infer masks infer `mask.*`."""
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
        """Say by how much a pruned magnitude breaks the order, given the smallest and largest that were sent.

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

    def only_masks(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Tensors | None:
        """Return them if all are pinned; beside the borders a pruned entry is no zero."""
        pinned = select(noise, self.prefix)
        return None if params.keys() - pinned.keys() or select(noise, BORDER) else pinned

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
class Magnitude(Pruning):
    """Zero the share `ratio` of smallest magnitude: floor(ratio * P) of P entries, the first of equals first.

    The share is read as it is written in decimal: 0.29 of 100 entries are 29. Since ratio < 1, one entry always stays.
    """

    ratio: float
    scope: Literal["layer", "global"] = "layer"
    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        refuse(collect("prune", (("ratio", SHARE, self.ratio), ("scope", SCOPE, self.scope))))

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

    def smallest(self) -> Mapping[str, Any]:
        """Nothing is removed."""
        return {"ratio": 0.0}


@dataclass(frozen=True)
class Dual(Pruning):
    """Zero the share `top` of largest and `bottom` of smallest magnitude of each parameter (Xue et al. 2024, DGP).

    The paper leaves the rounding open. Here floor(top * P) and floor(bottom * P) entries go, so at least one stays; of
    equal entries the first are the smaller ones, so that the two sets never overlap.
    """

    top: float = 0.05
    bottom: float = 0.75
    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        problems = collect("dgp", (("top", SHARE, self.top), ("bottom", SHARE, self.bottom)))
        if not problems and as_written(self.top) + as_written(self.bottom) >= 1:
            what = f"top + bottom is {as_written(self.top) + as_written(self.bottom)}, which leaves nothing to send"
            problems.append(Problem("dgp", what, "give shares whose sum is below 1"))
        refuse(problems)

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

    def smallest(self) -> Mapping[str, Any]:
        """Nothing is removed."""
        return {"top": 0.0, "bottom": 0.0}


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
    smallest = -peak(torch.where(magnitude > 0, -magnitude, -torch.inf), -torch.inf)
    return torch.stack([smallest, torch.where(smallest < torch.inf, peak(magnitude), smallest)])


def _keep_largest(magnitude: Tensor, ratio: float, more: int) -> Tensor:
    flat = magnitude.flatten()
    return ~smallest_mask(flat, share(ratio, flat.numel()) + more).reshape(magnitude.shape)


def as_written(ratio: float) -> Decimal:
    """Return a share as people write it in decimal: 0.29 of 100 entries are 29."""
    return Decimal(repr(float(ratio)))
