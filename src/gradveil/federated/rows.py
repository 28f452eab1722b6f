"""Rows of a layer's update, and differences of two rows, compared with single examples' inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GRADIENTS: dict[int, Callable[..., Tensor]] = {3: grad.conv1d_weight, 4: grad.conv2d_weight, 5: grad.conv3d_weight}
_SAME = 1 - 1e-6
"""The cosine of two units' errors that are one and the same up to a factor."""
_ROUNDING = 1e-10
_MADE = 1e-4
"""What is left of errors that are made of others, as a share of them."""
_PARTNERS, _LOOKED = 3, 256
"""How many partners a unit has, and the units that have any: at least so many, or twice the examples."""
_SEVERAL = 4
"""The fewest examples (or groups of them) that units are compared by: many units have the same two or three."""
_BLOCK = 1024
"""Units that are compared at once, so that wide layers take little memory."""

Pairs = tuple[Tensor, Tensor, Tensor]
"""Places of first and second rows, and the factors that the second ones are multiplied by."""


def unit_scales(errors: Tensor) -> Tensor:
    """Return each unit's largest error of [..., K], or 1 where it has none.

    Each row of a gradient is as exact as its own numbers: a unit whose errors are 1e-25 times those of the others shows
    its examples as well as they do. Units are therefore judged each on its own scale.

    >>> unit_scales(torch.tensor([[1.0, 1e-25, 0.0], [-4.0, 0.0, 0.0]])).tolist() == [4.0, torch.tensor(1e-25), 1.0]
    True
    """
    largest = errors.abs().flatten(0, -2).amax(0) if len(errors) else errors.new_ones(errors.shape[-1])
    return torch.where(largest > 0, largest, 1.0)


@dataclass(frozen=True)
class Owned:
    """Units, or differences of units, of which one example has nearly all the error."""

    rows: Tensor
    """Their places [n]."""
    owner: Tensor
    """Their examples [n]."""

    @staticmethod
    def of(sizes: Tensor, least: float) -> Owned:
        """Find them in sizes of errors [B, K], on each unit's own scale, by an example's least share of a unit's sum.

        >>> Owned.of(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), 0.99).rows
        tensor([0])
        """
        total, (most, owner) = sizes.sum(0), sizes.max(0)
        rows = ((most > least * total) & (total > 0)).nonzero().flatten()
        return Owned(rows, owner[rows])

    @property
    def examples(self) -> frozenset[int]:
        """The examples."""
        return frozenset(self.owner.tolist())


def shared_support(support: Tensor) -> tuple[int, Tensor, int]:
    """Compare units by the examples that have an error there at all [B, K].

    Returns the number of units with an error of four or more examples but not of all, the places of those that have
    just the examples of another such unit, and the number of groups of examples. Examples that no unit tells apart
    are one group: copies of an image would make units alike. Groups without any error do not count.

    >>> first_four = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [0.0]])
    >>> shared_support(torch.cat([torch.eye(6), first_four, 2 * first_four], 1) != 0)
    (2, tensor([6, 7]), 6)
    """
    support = support.unique(dim=0)
    support = support[support.any(1)]
    count = support.sum(0)
    places = ((count >= _SEVERAL) & (count < len(support))).nonzero().flatten()
    if not len(places):
        return 0, places, len(support)
    _, group, units = support[:, places].unique(dim=1, return_inverse=True, return_counts=True)
    return len(places), places[units[group] > 1], len(support)


def solved(errors: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Find what is left of one example where a group of units is made of another one, by relative errors [B, K].

    The units of a group are open for the same examples (`support`). Where another group is open for one example more,
    and its errors of all others are combinations of the first one's, the same combinations of rows leave that example's
    input alone. Errors of more examples than units are not made of others by chance. Returns the combinations [n, K]
    and the examples [n]. Of single rows and pairs of them (`partners`) it says nothing.

    >>> own = torch.arange(6.0)[:, None]
    >>> group = torch.cat([1 + own, own.square() + 1], 1)
    >>> errors = torch.cat([(own < 4) * group, (own < 5) * group], 1)
    >>> solved(errors, errors != 0)[1]
    tensor([4, 4])
    """
    errors, support, device = errors.cpu().double(), support.cpu(), errors.device
    sure = errors.any(1)
    place = ((support & sure[:, None]).sum(0) >= _SEVERAL).nonzero().flatten()
    found, owner = [errors.new_zeros(0, errors.shape[1])], list[int]()
    if len(place):
        kinds = support[:, place] & sure[:, None]
        kinds, group, units = kinds.unique(dim=1, return_inverse=True, return_counts=True)
        for less, more in _nested(kinds, units):
            rest = kinds[:, less] == kinds[:, more]
            base, others = place[group == less], place[group == more]
            own, wanted = errors[rest][:, base], errors[rest][:, others]
            factors = torch.linalg.pinv(own) @ wanted
            made = (wanted - own @ factors).norm(dim=0) < _MADE * wanted.norm(dim=0)
            rows = errors.new_zeros(int(made.sum()), errors.shape[1])
            rows[torch.arange(len(rows)), others[made]] = 1.0
            rows[:, base] = -factors[:, made].T
            found.append(rows)
            owner += [int((~rest).nonzero())] * len(rows)
    return torch.cat(found).to(device), torch.tensor(owner, dtype=torch.long, device=device)


def _nested(kinds: Tensor, units: Tensor) -> list[list[int]]:
    """Pair the groups of several units with those that have one example more, if fewer units than examples are shared.

    `kinds` [B, G] tells the examples of each group.
    """
    several = (units > 1).nonzero().flatten()
    own = kinds[:, several].double()
    count = own.sum(0)
    within = (own.T @ own == count[:, None]) & (count == count[:, None] + 1) & (units[several] < count)[:, None]
    return several[within.nonzero()[:_LOOKED]].tolist()


def partners(errors: Tensor, scaled: Tensor) -> Pairs:
    """Pair each unit with those whose errors [B, K] are most nearly the same up to a factor.

    Bins of an imprint differ by one example each, whatever their rows, sizes and order are. Of units that are the same
    up to a factor one is taken. Pairs are chosen by scaled errors, in which no example is larger than others.
    """
    unit = scaled / scaled.norm(dim=0).clamp(min=1e-30)
    kept = _distinct(unit)
    unit = unit[:, kept]
    place = torch.arange(len(kept), device=kept.device)
    # Neighbours in an imprint are the most alike of all units: of a wide layer those are looked at.
    most = max(_LOOKED, 2 * len(errors))
    if len(kept) > most:
        alike = torch.cat([_alike(unit, some).amax(1) for some in place.split(_BLOCK)])
        place = alike.topk(most).indices
    count = max(0, min(_PARTNERS, len(kept) - 1))
    near = _alike(unit, place).topk(count, dim=1).indices
    first, second = kept[place].repeat_interleave(count), kept[near.flatten()]
    own, other = errors[:, first], errors[:, second]
    # Off the examples that both have, a quotient is zero or infinite: neither counts.
    ratio = own / other
    ratio = torch.where((own != 0) & ratio.isfinite(), ratio, torch.nan)
    factor = ratio.nanmedian(0).values.nan_to_num(1.0) if len(first) else ratio.new_zeros(0)
    # Where hardly anything is left, the two were the same but for rounding.
    left = (own - factor * other).square().sum(0) > _ROUNDING * own.square().sum(0)
    return first[left], second[left], factor[left]


def _alike(unit: Tensor, some: Tensor) -> Tensor:
    """Return |cos| of some units with all, and -1 with themselves."""
    alike = (unit[:, some].T @ unit).abs()
    return alike.scatter_(1, some[:, None], -1.0)


def _distinct(unit: Tensor) -> Tensor:
    """Return the places of columns of length 1, one of those that are the same up to a sign; none of zeros."""
    mark = torch.linspace(1, 2, len(unit), dtype=unit.dtype, device=unit.device).cos()
    order = (mark @ unit).abs().argsort()
    ordered = unit[:, order]
    same = (ordered[:, 1:] * ordered[:, :-1]).sum(0).abs() > _SAME
    new = torch.cat([same.new_ones(1), ~same]) if len(order) else same
    return order[new & (ordered.square().sum(0) > 0.5)].sort().values


def difference(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Return rows as they are, or each first less its second times the factor."""
    if pairs is None:
        return rows
    first, second, factor = pairs
    factor = factor.view(-1, *[1] * (rows.ndim - 1))
    return rows[first].to(factor) - factor * rows[second].to(factor)


def unscaled(pairs: Pairs | None, scales: Tensor) -> Pairs | None:
    """Return pairs that were found in units on a scale of their own as they are without it, in double precision."""
    if pairs is None:
        return None
    first, second, factor = pairs
    return first, second, factor.double() * scales[first].double() / scales[second].double()


def chosen(pairs: Pairs | None, rows: Tensor) -> Pairs:
    """Return the pairs at some places, or single rows as pairs without a second."""
    if pairs is None:
        return rows, rows, torch.zeros(len(rows), dtype=torch.double, device=rows.device)
    first, second, factor = pairs
    return first[rows], second[rows], factor[rows]


def divided(rows: Tensor, by: Tensor) -> Tensor:
    """Divide rows [K, n] by numbers [K] that are not zero, each as exact as it is by itself."""
    quotients = rows.double() / by.double()[:, None]
    return quotients[quotients.isfinite().all(1)]


@dataclass(frozen=True)
class Inputs:
    """A layer's inputs [B, n]."""

    x: Tensor

    @property
    def variance(self) -> Tensor:
        """Their variance over the examples, that of the median example; over the entries where there is one example.

        One example out of scale would make every other one look close to anything.
        """
        centre = self.x.median(0).values if len(self.x) > 2 else self.x.mean(0) if len(self.x) > 1 else self.x.mean()
        return (self.x - centre).square().mean(1).median().clamp(min=1e-30)

    def pooled(self, rows: Tensor, owner: Tensor, errors: Tensor, most: float) -> set[int]:
        """Return the owners that are read from all of their rows at once, weighted by their errors: noise averages."""
        examples, place = owner.unique(return_inverse=True)
        weighted = errors.double()[:, None] * rows.double()
        sums = weighted.new_zeros(len(examples), rows.shape[1]).index_add_(0, place, weighted)
        return self.near(sums, examples, most)

    def near(self, rows: Tensor, owner: Tensor, most: float) -> set[int]:
        """Return the owners of rows that are their input, up to a factor and this share of the variance."""
        truth, rows = self.x[owner].double(), rows.double()
        factor = (rows * truth).sum(1) / rows.square().sum(1).clamp(min=1e-300)
        error = (truth - factor[:, None] * rows).square().mean(1)
        return set(owner[error < most * self.variance].tolist())

    def solved(self, candidates: Tensor, most: float) -> set[int]:
        """Return the examples that lie at one of the candidates [n, ...]."""
        if not len(candidates):
            return set()
        x = self.x.to(candidates)
        apart = candidates.square().sum(1)[:, None] - 2 * candidates @ x.T + x.square().sum(1)
        return set((apart.amin(0) / self.x.shape[1] < most * self.variance).nonzero().flatten().tolist())

    def snr(self, errors: Tensor) -> float:
        """Return max_e |g_e| / |sum of the others| of the gradients g_e = D_e x_e^T, from their inner products."""
        products = (errors @ errors.T) * (self.x @ self.x.T)
        own = products.diagonal()
        others = products.sum() - 2 * products.sum(1) + own
        return float((own.clamp(min=0) / others.clamp(min=1e-60)).sqrt().max())


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of a layer's weight, of some examples, made from its inputs and errors where they are asked for."""

    module: nn.Module
    parts: list[tuple[Tensor, Tensor]]

    def of(self, place: slice) -> Tensor | None:
        """Sum the gradients [K, ...] of the examples at a place; None where a padding has no formula here."""
        module: Any = self.module
        total: Tensor | None = None
        for x, errors in self.parts:
            if isinstance(module, nn.Linear):
                part = errors[place].flatten(0, -2).T @ x[place].flatten(0, -2)
            elif isinstance(module.padding, str) or module.padding_mode != "zeros":
                return None
            else:
                how = (module.stride, module.padding, module.dilation, module.groups)
                part = _GRADIENTS[x.ndim](x[place], module.weight.shape, errors[place], *how).flatten(1)
            total = part if total is None else total + part
        return total

    def shown(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the examples one of whose own rows is, up to a factor, the row that is sent."""
        found: set[int] = set()
        for example in owned.examples:
            own = self.of(slice(example, example + 1))
            rows = owned.rows[owned.owner == example]
            if own is not None and bool((1 - _agreement(own[rows], sent.flatten(1)[rows]) < most).any()):
                found.add(example)
        return frozenset(found)

    def kept(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the owners of rows that are sent as the whole batch made them, up to a factor."""
        own = self.of(slice(None)) if len(owned.rows) else None
        if own is None:
            return frozenset()
        same = 1 - _agreement(own[owned.rows], sent.flatten(1)[owned.rows]) < most
        return frozenset(owned.owner[same].tolist())

    def agreement(self, sent: Tensor) -> float:
        """Return cos^2 of the whole gradient with what is sent; 1 where it cannot be computed."""
        own = self.of(slice(None))
        return 1.0 if own is None else float(_agreement(own.flatten()[None], sent.flatten()[None]))


def _agreement(own: Tensor, sent: Tensor) -> Tensor:
    """Return cos^2 of each pair of rows."""
    own, sent = own.double(), sent.double()
    sizes = own.norm(dim=1) * sent.norm(dim=1)
    return ((own * sent).sum(1) / sizes.clamp(min=1e-300)).square()
