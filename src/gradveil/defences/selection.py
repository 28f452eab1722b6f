"""Exact selection of the smallest and largest entries: the costly part of pruning, kept small and fast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.tree import plain
from gradveil.defences.thresholds import above, borders, tied

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

    Equal to `value` times the mask of what `ends_mask` does not mark, and computed like that where somebody
    differentiates or batches. A plain tensor on the CPU needs no mask: its thresholds say it all.

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
    out[order[len(order) - top :]] = 0.0
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
