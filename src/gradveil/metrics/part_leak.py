"""A test of parts that come back: whether answers share more with their own examples than with others of the class."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

_DRAWS = 9999
"""Orders of the examples that are compared with the true one, at most."""
_FEWEST = 999
"""Orders at least; of batches, whose matches take long, more only where few of these share as much."""
_FEW = 0.01
"""Share of orders up to which more are drawn: a correction for many tests needs smaller p-values."""

_BAND = 5
"""Examples of similar length that are exchanged for each other: fewer leave too few orders."""


class PartLeak(NamedTuple):
    """How many parts of some examples came back."""

    observed: int
    parts: int
    """The parts of these examples."""
    expected: float
    """What the same answers share with other examples, on average."""
    p: float
    """The chance that answers which ignore the update share as much with their own examples."""


def part_leak(
    shared: Tensor, most: Tensor, sizes: Tensor, places: Tensor, groups: Tensor, generator: Generator
) -> PartLeak:
    """Test the parts that answers share with their own examples, by orders of the examples of each group.

    Answer b of client v shares `shared[v, b, n]` parts with example n, of `most[v, b, n]` that their lengths allow;
    the example has `sizes[n]` parts and the group `groups[n]`. Its own examples are `places[v]`, in any order: the best
    one-to-one match of a batch counts. If an answer depends on nothing but the groups, all orders of the examples of a
    group are equally likely to share as much with the answers as the true one; the p-value counts those that do (a
    permutation test: R. A. Fisher, 1935). Compared are the shares of what is allowed, since long texts share more.

    >>> own = torch.tensor([[0], [1], [2], [3]])
    >>> sizes, groups, shared = torch.full((4,), 6), torch.zeros(4), torch.eye(4)[:, None]
    >>> found = part_leak(shared, torch.ones(4, 1, 4), sizes, own, groups, torch.Generator().manual_seed(0))
    >>> found.observed, found.parts, round(found.expected), found.p < 0.05
    (4, 24, 1, True)
    """
    shares = shared / most.clamp(min=1)
    observed = float(_matched(shares, places[None]))
    first = _orders(max(_FEWEST, _DRAWS // places.shape[1]), groups, generator)[:, places]
    totals = _matched(shares, first)
    if _reached(totals, observed) <= _FEW * len(first):
        # A p-value above `_FEW` is that of the first orders, one below it is at most that: both keep the level.
        while len(totals) < _DRAWS:
            orders = _orders(min(_FEWEST, _DRAWS - len(totals)), groups, generator)
            totals = torch.cat([totals, _matched(shares, orders[:, places])])
    p = (_reached(totals, observed) + 1) / (len(totals) + 1)
    expected = float(_matched(shared, first[:_FEWEST]).mean())
    return PartLeak(int(_matched(shared, places[None])), int(sizes[places].sum()), expected, p)


def alike(labels: Tensor, lengths: Tensor) -> Tensor:
    """Return the groups [N] of examples that have one class and similar lengths, at least five of them if there are.

    >>> alike(torch.tensor([0] * 11 + [1]), torch.arange(12)).bincount()
    tensor([6, 5, 1])
    """
    groups, count = torch.empty_like(lengths), 0
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        ordered = members[lengths[members].argsort(stable=True)]
        bands = max(1, len(ordered) // _BAND)
        groups[ordered] = count + torch.arange(len(ordered)) * bands // len(ordered)
        count += bands
    return groups


def _orders(draws: int, groups: Tensor, generator: Generator) -> Tensor:
    """Draw orders [D, N] of the examples, each group by itself."""
    orders = torch.arange(len(groups)).expand(draws, -1).clone()
    for group in groups.unique():
        members = (groups == group).nonzero().flatten()
        orders[:, members] = members[torch.rand(draws, len(members), generator=generator).argsort(1)]
    return orders


def _reached(totals: Tensor, observed: float) -> int:
    """Count the orders that share as much as the true one."""
    return int((totals >= observed - 1e-9).sum())


def _matched(shared: Tensor, places: Tensor) -> Tensor:
    """Return the parts [D] shared with examples [D, V, B], those of each client matched one to one."""
    clients = torch.arange(places.shape[1])[:, None, None]
    answers = torch.arange(places.shape[2])[:, None]
    pairs = shared[clients, answers, places[:, :, None]].double()
    if places.shape[2] == 1:
        return pairs.sum((1, 2, 3))
    every = pairs.flatten(0, 1).numpy()
    best = torch.tensor([float(one[linear_sum_assignment(-one)].sum()) for one in every])
    return best.view(places.shape[:2]).sum(1)
