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


class PartLeak(NamedTuple):
    """How many parts of some examples came back."""

    observed: int
    parts: int
    """The parts of these examples."""
    expected: float
    """What the same answers share with other examples, on average."""
    p: float
    """The chance that answers which ignore the update share as much with their own examples."""


def part_leak(shared: Tensor, sizes: Tensor, places: Tensor, labels: Tensor, generator: Generator) -> PartLeak:
    """Test the parts that answers share with their own examples, by orders of the examples of each class.

    Answer b of client v shares `shared[v, b, n]` parts with example n, which has `sizes[n]` parts and the class
    `labels[n]`. Its own examples are `places[v]`, in any order: the best one-to-one match of a batch counts. If an
    answer depends on nothing but the classes, all orders of the examples of a class are equally likely to share as much
    with the answers as the true one; the p-value counts those that do (a permutation test: R. A. Fisher, 1935).

    >>> own = torch.tensor([[0], [1], [2], [3]])
    >>> sizes, labels = torch.full((4,), 6), torch.zeros(4)
    >>> found = part_leak(torch.eye(4)[:, None], sizes, own, labels, torch.Generator().manual_seed(0))
    >>> found.observed, found.parts, round(found.expected), found.p < 0.05
    (4, 24, 1, True)
    """
    observed = float(_matched(shared, places[None]))
    first = max(_FEWEST, _DRAWS // places.shape[1])
    totals = _matched(shared, _orders(first, labels, generator)[:, places])
    if _reached(totals, observed) <= _FEW * first:
        # A p-value above `_FEW` is that of the first orders, one below it is at most that: both keep the level.
        while len(totals) < _DRAWS:
            orders = _orders(min(_FEWEST, _DRAWS - len(totals)), labels, generator)
            totals = torch.cat([totals, _matched(shared, orders[:, places])])
    p = (_reached(totals, observed) + 1) / (len(totals) + 1)
    return PartLeak(int(observed), int(sizes[places].sum()), float(totals.mean()), p)


def _orders(draws: int, labels: Tensor, generator: Generator) -> Tensor:
    """Draw orders [D, N] of the examples, each class by itself."""
    orders = torch.arange(len(labels)).expand(draws, -1).clone()
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
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
