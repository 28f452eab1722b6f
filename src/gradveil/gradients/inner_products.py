"""The angle between a gradient and a target from the factors of the gradient alone, without forming it.

A layer's gradient is a sum of outer products, G = sum_m l_m r_m^T. Then <G, T> = sum_m <l_m, T r_m>, and
|G|^2 = sum_mn <l_m, l_n> <r_m, r_n> (the "ghost norm": Goodfellow 2015, Bu et al. 2022). Where a layer is large and
has few positions m, that passes over the target twice and over nothing else of its size. With a mask M,
|G o M|^2 = sum_mn <l_m o l_n, (M o M) (r_m o r_n)>: two passes over the mask beside those over the target.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

import weakref
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from gradveil.gradients.convolution import Geometry, fold, one_by_one, side_by_side, unfold

LARGE = 1 << 16
"""Fewer entries stay in the cache, and are sooner computed than gone around."""
_PAIRED = 6
"""So many positions have 21 pairs: with more it is shorter to make the gradient, and mask it."""
_PASSES = 16
"""What the passes over a gradient of one entry cost that are saved, in products of the Gram matrices."""


class Inner(Protocol):
    """A short way to the products of one parameter's gradients [V, *shape]."""

    def __call__(self, delta: Tensor, target: Tensor, mask: Tensor | None = None, /) -> Tensor | None:
        """Return <G, T> and |G|^2 of each target's G, masked if there is a mask: [V, 2]; None if that is no shorter."""
        ...


def shorter(outputs: int, inputs: int, positions: int) -> bool:
    """Say whether the factors of an O x K gradient, M of each, are the shorter way.

    >>> shorter(512, 4608, 1), shorter(512, 4608, 64), shorter(64, 576, 64), shorter(10, 64, 1)
    (True, True, False, False)
    """
    # The Gram matrices of M columns cost M^2 (O + K) products.
    entries = outputs * inputs
    return entries >= LARGE and positions**2 * (outputs + inputs) <= _PASSES * entries


def products(left: Tensor, right: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """Return <G, T> and |G|^2 of G = sum_m l_m r_m^T: [V, 2], from [V, O, M], [V, K, M] and T [V, O, K].

    With a mask [V, O, K] G o M takes the place of G; None where that has too many positions.
    Differentiable once with respect to the factors.
    """
    if mask is None:
        return cast(Tensor, _InnerProducts.apply(left, right, target))
    if left.shape[-1] > _PAIRED:
        return None
    # The sum over (m, n) is symmetric: each pair m < n once, twice as heavy.
    first, second = torch.triu_indices(left.shape[-1], left.shape[-1], device=left.device)
    twice = left[..., first] * left[..., second] * torch.where(first == second, 1, 2).to(left.dtype)
    squared = _bilinear(twice, right[..., first] * right[..., second], _masked(mask, mask))
    # <G o M, T> = <G, T o M>.
    return torch.stack([_bilinear(left, right, _masked(target, mask)), squared.clamp(min=0)], 1)


def convolution_products(
    delta: Tensor, x: Tensor, target_clients: int, geometry: Geometry, target: Tensor, mask: Tensor | None = None
) -> Tensor | None:
    """Return `products` of the weight gradients of a convolution, from delta [N, O, H', W'] and x [N, C, H, W]."""
    left = side_by_side(delta.flatten(2), target_clients)
    if mask is not None and left.shape[-1] > _PAIRED:
        return None
    right = cast(Tensor, _Unfolded.apply(x, target_clients, geometry))
    return products(left, right, flat(target), None if mask is None else flat(mask))


def flat(target: Tensor) -> Tensor:
    """Lay [V, O, C, kh, kw] flat as [V, O, K]; what is known of the target is found again by what is returned."""
    whole = slice(0, target.shape[-2]), slice(0, target.shape[-1])
    return cut(target, *whole)


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


def _masked(target: Tensor, mask: Tensor) -> Tensor:
    """Multiply a target that stays the same by its mask, once."""
    versions = target._version, mask._version
    known = _MASKED.get(target)
    if known is None or known[0]() is not mask or known[1] != versions:
        # A weak reference: of a mask and its own square the value would keep its key alive.
        known = _MASKED[target] = weakref.ref(mask), versions, target.detach() * mask
    return known[2]


_MASKED = WeakTensorKeyDictionary()


def _bilinear(left: Tensor, right: Tensor, matrix: Tensor) -> Tensor:
    """Return sum_m <l_m, T r_m>: [V]. Differentiable once with respect to the factors."""
    return cast(Tensor, _Bilinear.apply(left, right, matrix))


class _Bilinear(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, matrix: Tensor) -> Tensor:
        moved = torch.bmm(matrix, right)
        ctx.save_for_backward(left, matrix, moved)
        return (moved * left).sum((1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        left, matrix, moved = ctx.saved_tensors
        upper = uppers[0].view(-1, 1, 1)
        # Rows stand left, as in `outer`: columns on the right are many times slower on a CPU.
        return moved * upper, torch.bmm(left.mT, matrix).mT * upper, None


class _InnerProducts(Function):
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
            # d<G, T>/dl = T r, d|G|^2/dl = 2 l (r^T r); for r the same with the sides exchanged.
            moved * dot + torch.bmm(left, of_right) * (2 * square),
            (back * dot + torch.bmm(right, of_left) * (2 * square)),
            None,
        )


class _Unfolded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target_clients: int, geometry: Geometry) -> Tensor:
        ctx.shape, ctx.geometry, ctx.examples = tuple(x.shape), geometry, x.shape[0] // target_clients
        return unfold(x, target_clients, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        columns = one_by_one(uppers[0].contiguous(), ctx.examples)
        return fold(columns, ctx.shape, ctx.geometry), None, None
