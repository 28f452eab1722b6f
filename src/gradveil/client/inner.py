"""The angle between a gradient and a target, without the gradient: only its factors are at hand, and they are enough.

A layer's gradient is a sum of outer products, G = sum_m l_m r_m^T. Then <G, T> = sum_m <l_m, T r_m>, and
|G|^2 = sum_mn <l_m, l_n> <r_m, r_n> (the "ghost norm": Goodfellow 2015, Bu et al. 2022). Where a layer is large and
has few positions m, that passes over the target twice and over nothing else of its size.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from gradveil.client.convolution import Geometry, fold, one_by_one, side_by_side, unfold

LARGE = 1 << 16
"""Fewer entries stay in the cache, and are sooner computed than gone around."""
_PASSES = 16
"""What the passes over a gradient of one entry cost that are saved, in products of the Gram matrices."""


def shorter(outputs: int, inputs: int, positions: int) -> bool:
    """Say whether the factors of an O x K gradient, M of each, are the shorter way.

    >>> shorter(512, 4608, 1), shorter(512, 4608, 64), shorter(64, 576, 64), shorter(10, 64, 1)
    (True, True, False, False)
    """
    entries = outputs * inputs
    return entries >= LARGE and positions**2 * (outputs + inputs) <= _PASSES * entries


def products(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    """Return <G, T> and |G|^2 of G = sum_m l_m r_m^T: [V, 2], from [V, O, M], [V, K, M] and T [V, O, K].

    Differentiable once with respect to the factors.
    """
    return cast(Tensor, _Products.apply(left, right, target))


def convolution_products(delta: Tensor, x: Tensor, victims: int, geometry: Geometry, target: Tensor) -> Tensor:
    """Return `products` of the weight gradients of a convolution, from delta [N, O, H', W'] and x [N, C, H, W]."""
    left = side_by_side(delta.flatten(2), victims)
    return products(left, cast(Tensor, _Unfolded.apply(x, victims, geometry)), target.flatten(2))


def cut(target: Tensor, rows: slice, columns: slice) -> Tensor:
    """Cut a window out of the last two dimensions, and lay it flat behind the rest: [V, O, K].

    A target stays the same over thousands of iterations: it is cut once. Do not write to what is returned.
    """
    window = rows.start, rows.stop, columns.start, columns.stop, target._version
    known = _CUT.get(target)
    if known is None or known[0] != window:
        known = _CUT[target] = window, target.detach()[..., rows, columns].flatten(-3).contiguous()
    return known[1]


_CUT = WeakTensorKeyDictionary()


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, target: Tensor) -> Tensor:
        moved = torch.bmm(target, right)
        grams = torch.bmm(left.mT, left), torch.bmm(right.mT, right)
        ctx.save_for_backward(left, right, target, moved, *grams)
        return torch.stack([(moved * left).sum((1, 2)), (grams[0] * grams[1]).sum((1, 2)).clamp(min=0)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        left, right, target, moved, of_left, of_right = ctx.saved_tensors
        dot, square = (upper.view(-1, 1, 1) for upper in uppers[0].unbind(1))
        # Rows stand left, as in `outer`: columns on the right are many times slower on a CPU.
        back = torch.bmm(left.mT, target).mT
        return (
            moved * dot + torch.bmm(left, of_right) * (2 * square),
            (back * dot + torch.bmm(right, of_left) * (2 * square)),
            None,
        )


class _Unfolded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, victims: int, geometry: Geometry) -> Tensor:
        ctx.shape, ctx.geometry, ctx.examples = tuple(x.shape), geometry, x.shape[0] // victims
        return unfold(x, victims, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        columns = one_by_one(uppers[0].contiguous(), ctx.examples)
        return fold(columns, ctx.shape, ctx.geometry), None, None
