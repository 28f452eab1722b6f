"""Exact selection of the smallest and largest entries: the costly part of pruning, kept small and fast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGE = 8192
"""From this many entries on, a histogram is faster than `kthvalue` on a CPU (4x at two million)."""
_SHIFT = 16
_BINS = 1 << 15


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


def ends_mask_by_order(magnitude: Tensor, bottom: int, top: int = 0) -> Tensor:
    """`ends_mask` by `kthvalue` and running counts of the ties: any device and dtype, no host reads."""
    removed = torch.zeros_like(magnitude, dtype=torch.bool)
    if bottom:
        threshold = magnitude.kthvalue(bottom, dim=-1, keepdim=True).values
        below, ties = magnitude < threshold, magnitude == threshold
        spare = bottom - below.sum(-1, keepdim=True)
        removed = below | (ties & (ties.cumsum(-1) <= spare))
    if top:
        removed = removed | ends_mask_by_order(-magnitude.flip(-1), top).flip(-1)
    return removed


def _row_by_histogram(row: Tensor, bottom: int, top: int) -> Tensor:
    """`ends_mask` of one float32 row on the CPU.

    The bits of non-negative floats are ordered as integers, so a histogram of the upper 16 finds the bin of a
    threshold, and only that bin's few entries are ordered.
    """
    upper = row.view(torch.int32) >> _SHIFT
    below = torch.bincount(upper, minlength=_BINS).cumsum(0)
    removed = torch.zeros_like(row, dtype=torch.bool)
    if bottom:
        threshold = _order_statistic(row, upper, below, bottom)
        removed = row < threshold
        spare = bottom - int(removed.sum())
        removed[(row == threshold).nonzero().squeeze(-1)[:spare]] = True
    if top:
        threshold = _order_statistic(row, upper, below, row.numel() - top + 1)
        above = row > threshold
        spare = top - int(above.sum())
        ties = (row == threshold).nonzero().squeeze(-1)
        above[ties[len(ties) - spare :]] = True
        removed |= above
    return removed


def _order_statistic(row: Tensor, upper: Tensor, below: Tensor, count: int) -> Tensor:
    """Return the `count`-th smallest entry."""
    place = int(torch.searchsorted(below, count))
    before = int(below[place - 1]) if place else 0
    return row[upper == place].kthvalue(count - before).values


class _Ends(torch.autograd.Function):
    """A function of its own, so that `vmap` hands over whole batches and rows may be treated with host reads."""

    @staticmethod
    def forward(magnitude: Tensor, bottom: int, top: int) -> Tensor:
        """Choose the faster exact way."""
        fast = magnitude.device.type == "cpu" and magnitude.dtype == torch.float32 and magnitude.shape[-1] >= LARGE
        if not fast or not (bottom or top) or bool(magnitude.isnan().any()):
            return ends_mask_by_order(magnitude, bottom, top)
        rows = magnitude.reshape(-1, magnitude.shape[-1]).unbind(0)
        return torch.stack([_row_by_histogram(row, bottom, top) for row in rows]).reshape(magnitude.shape)

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
