"""Rows of a table in the span of a gradient: vectors whose categories are one-hot.

The first layer's gradient D X spans the rows X of a batch. A vector c R of that span is a row if each of its categories
has one 1 and zeros: with the levels of a column given, these are linear equations for c. Levels are given column by
column, and what has no solution is dropped, until few vectors are left. Zeros behind a ReLU prove rows, as in SPEAR
(Dimitrov et al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.spaces import TableColumn

MOST = 100_000
"""Partial solutions that are kept; where there are more, the search ends without a result."""
_CLOSE = 0.02
"""Distance from 0 or 1 up to which an entry of a category is taken for it; rounding of float32 is far below."""
_INDEPENDENT = 1e-4


def rows_in_span(right: Tensor, columns: tuple[TableColumn, ...]) -> Tensor:
    """Return all vectors [m, n] of the span of `right` [k, n] whose categories are one-hot.

    There are none where the search would grow too large, and where categories do not determine the vectors, because two
    rows have the same ones.
    """
    basis = torch.linalg.qr(right.mT)[0].mT
    blocks = [part for part, column in zip(_split(basis, columns), columns, strict=True) if column.levels]
    blocks = [part.mT for part in blocks]
    nodes, free = basis.new_zeros(1, len(basis)), torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
    while blocks:
        # The column with the most levels in the batch leaves the fewest unknowns.
        gains = [_rank(block @ free) if free.shape[1] else 0 for block in blocks]
        block = blocks.pop(max(range(len(blocks)), key=gains.__getitem__))
        nodes, free = _given(nodes, free, block)
        if not 0 < len(nodes) <= MOST:
            return right.new_zeros(0, right.shape[1])
    rows = nodes @ basis
    return rows[:0] if free.shape[1] else rows


def _given(nodes: Tensor, free: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Extend every node by every level of a column; return those with a solution, and the directions left free."""
    levels = len(block)
    one_hot = torch.eye(levels, dtype=block.dtype, device=block.device)
    wanted = one_hot - (nodes @ block.mT).unsqueeze(1)  # [nodes, level, levels]
    # A vector is (node + free s) basis: block free s = e_level - block node, solved by the singular vectors of block
    # free.
    change = block @ free
    left, sizes, turn = torch.linalg.svd(change, full_matrices=True)
    rank = int((sizes > _INDEPENDENT).sum())
    inside = wanted @ left[:, :rank]
    missed = (wanted - inside @ left[:, :rank].mT).abs().amax(-1)
    step = (inside / sizes[:rank]) @ turn[:rank] @ free.mT
    # Here [nodes, level, k] becomes [found, k].
    found = (nodes.unsqueeze(1) + step)[missed < _CLOSE]
    return found, free @ turn[rank:].mT


def _split(rows: Tensor, columns: tuple[TableColumn, ...]) -> tuple[Tensor, ...]:
    return rows.split([column.width for column in columns], -1)


def _rank(matrix: Tensor) -> int:
    return int((torch.linalg.svdvals(matrix) > _INDEPENDENT).sum())


def proven_rows(rows: Tensor, right: Tensor, gradient: Tensor, active: Tensor) -> Tensor:
    """Return which of the rows [m, n] are proven to be of the batch, by a ReLU behind the layer: [m] of bool.

    Only rows at which a unit is active add to its gradient [h, n]. Where the active ones [h, m] are independent, those
    with a coefficient other than zero belong to the batch, and what depends on proven rows does not.
    """
    basis = torch.linalg.qr(right.mT)[0].mT
    places, sums = rows @ basis.mT, gradient @ basis.mT
    proven, alive = (torch.full((len(rows),), value, device=rows.device) for value in (False, True))
    before = -1
    while int(proven.sum()) > before:
        before = int(proven.sum())
        for unit, total in zip(active & alive, sums, strict=True):
            own = unit.nonzero().squeeze(1)
            # Only independent rows have unique coefficients.
            if not 0 < len(own) <= len(basis) or _rank(_unit(places[own])) < len(own):
                continue
            weights = torch.linalg.lstsq(places[own].mT, total.unsqueeze(1)).solution.squeeze(1)
            parts = weights.unsqueeze(1) * places[own]
            size = total.norm()
            if size > 0 and (parts.sum(0) - total).norm() < _CLOSE * size:
                proven[own] |= parts.norm(dim=1) > _CLOSE * size
        kept = torch.linalg.qr(places[proven].mT)[0]
        outside = (places - places @ kept @ kept.mT).norm(dim=1) / places.norm(dim=1)
        alive &= proven | (outside > _CLOSE)
    return proven


def _unit(places: Tensor) -> Tensor:
    return places / places.norm(dim=1, keepdim=True)
