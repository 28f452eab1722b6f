"""Restarts of one victim are a group of rows: which of them are given up, and when all have ended."""

from __future__ import annotations

import torch
from torch import Tensor


def rungs(groups: Tensor, iterations: int) -> frozenset[int]:
    """List the iterations after which each group loses its worse half: at 1/2, 1/4, … of the budget, the last first.

    >>> sorted(rungs(torch.zeros(8), 800))
    [100, 200, 400]
    """
    largest = int(groups.unique(return_counts=True)[1].max())
    return frozenset(max(iterations >> rung, 1) for rung in range(1, (largest - 1).bit_length() + 1))


def worse_half(objective: Tensor, groups: Tensor, gone: Tensor) -> Tensor:
    """Mark the worse half of each group's rows that are still there; of an odd number the middle one stays."""
    marked = torch.zeros_like(gone)
    for group in groups[~gone].unique():
        own = ((groups == group) & ~gone).nonzero().flatten()
        order = objective[own].argsort(stable=True)
        marked[own[order[(len(own) + 1) // 2 :]]] = True
    return marked


def with_one_of(groups: Tensor, marked: Tensor) -> Tensor:
    """Mark the rows of every group in which a row is marked."""
    return torch.isin(groups, groups[marked])
