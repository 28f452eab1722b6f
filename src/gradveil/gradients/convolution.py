"""Convolutions for per-client gradients: shared weights are constants, gradients are one per client.

What plain double backward wastes (a weight gradient nobody asked for) and repeats (unfolding the same input) is left
out. Shapes: N = V x B examples, O and C channels out and in, M positions of one target client, K = C x kernel entries.
The thresholds below were measured on two EPYC cores, one thread; they choose between equal results.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Above this much arithmetic a target client, torch's convolution of one target client after the other beats a batched
# product over unfolded inputs (1.7 against 3.5 ms for 4 target clients, 64 -> 64 channels at 32x32; equal at 8x8).
_OWN_FLOP = 2e7
_OWN_POSITIONS = 128
# An input gradient by product and fold beats torch's where the image has few channels (301 against 488 us for 16
# images, 12 -> 3 channels at stride 2) or is so small that the call costs most (27 against 59 us).
_FEW_CHANNELS = 4
_FEW_COLUMN_ENTRIES = 40_000
_AT_ONCE = 1 << 20
"""Entries of unfolded inputs or of examples' gradients that are held at once to find their norms."""


class Geometry(NamedTuple):
    """How a kernel is laid over an image; (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class Window(NamedTuple):
    """Rows and columns of a kernel, and those of the image that they meet."""

    kernel_rows: slice
    kernel_columns: slice
    rows: slice
    columns: slice


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Convolve with constant weights; its derivatives with respect to x are convolutions and nothing else."""
    return _apply(_Convolution, x, weight, bias, geometry)


def weight_gradient(delta: Tensor, x: Tensor, target_clients: int, geometry: Geometry) -> Tensor:
    """Return sum_b delta_vb x unfold(x_vb) for every target client v: [V, O, C, kh, kw], from delta [N, O, H', W'].

    Differentiable once with respect to `delta` and `x`.
    """
    examples, outputs, positions = delta.shape[0] // target_clients, delta.shape[1], delta[0, 0].numel()
    shape = (target_clients, outputs, x.shape[1], *geometry.kernel)
    # 2 M O K of one target client.
    flop = 2 * examples * positions * prod(shape[1:])
    if delta.device.type == "cpu" and flop >= _OWN_FLOP and examples * positions >= _OWN_POSITIONS:
        return _apply(_OwnWeightGradients, delta, x, target_clients, geometry)
    return _apply(_WeightGradients, delta, x, target_clients, geometry).view(shape)


def squared_weight_gradients(delta: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """Return ||delta_n x unfold(x_n)||^2 for every example n: [N], from delta [N, O, H', W']."""
    entries = delta[0, 0].numel() * x.shape[1] * prod(geometry.kernel)
    some = max(1, _AT_ONCE // entries)
    pairs = zip(delta.flatten(2).split(some), x.split(some), strict=True)
    return torch.cat([squared_outer_sums(d, unfold(x_n, len(x_n), geometry)) for d, x_n in pairs])


def squared_outer_sums(left: Tensor, right: Tensor) -> Tensor:
    """Return ||sum_m l_m r_m^T||^2 = sum_mm' <l_m, l_m'> <r_m, r_m'>: [N], from [N, O, M] and [N, K, M].

    The right-hand side is taken where its arithmetic is less: M (O + K) < O K.
    """
    outputs, inputs, positions = left.shape[1], right.shape[1], left.shape[2]
    if positions * (outputs + inputs) < outputs * inputs:
        products = torch.bmm(left.transpose(1, 2), left), torch.bmm(right.transpose(1, 2), right)
        return (products[0] * products[1]).sum((1, 2)).clamp(min=0)
    some = max(1, _AT_ONCE // (outputs * inputs))
    pairs = zip(left.split(some), right.split(some), strict=True)
    return torch.cat([torch.bmm(a, b.transpose(1, 2)).square().sum((1, 2)) for a, b in pairs])


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """Sum of outer products over the last dimension: [V, O, M], [V, K, M] -> [V, O, K]. Differentiable once."""
    return outer(left[..., 0], right[..., 0]) if left.shape[-1] == 1 else _apply(_OuterSum, left, right)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """Outer products: [V, O], [V, K] -> [V, O, K]. Differentiable once."""
    return _apply(_Outer, left, right)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


def only_position(high: int, wide: int, geometry: Geometry) -> tuple[Geometry, Window] | None:
    """If a convolution of such images has one position: the part of its kernel that meets the image, and where.

    The rest of the kernel meets the padding only: it has no part in the result, and its gradient is zero.
    """
    # `zip(*geometry)` turns (kernel, stride, padding, dilation) of (height, width) into one such tuple a side.
    sides = [_only(size, *side) for size, side in zip((high, wide), zip(*geometry, strict=True), strict=True)]
    if sides[0] is None or sides[1] is None:
        return None
    (rows, image_rows), (columns, image_columns) = sides[0], sides[1]
    kernel = (rows.stop - rows.start, columns.stop - columns.start)
    return Geometry(kernel, (1, 1), (0, 0), geometry.dilation), Window(rows, columns, image_rows, image_columns)


def _only(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    # The number of positions less one.
    if (size + 2 * padding - dilation * (kernel - 1) - 1) // stride:
        return None
    # Kernel entry j lies on pixel j * dilation - padding. `first` and `last` bound the j whose pixel is in [0, size),
    # and `at` is the pixel of `first`.
    first = -(-padding // dilation)
    last = min(kernel, -(-(size + padding) // dilation))
    if last < first:  # it ends before the image
        return None
    at = first * dilation - padding
    # Entries on both sides of the image leave an empty window: its end must not turn negative.
    return slice(first, last), slice(at, max(at, at + (last - first - 1) * dilation + 1), dilation)


def unfold(x: Tensor, target_clients: int, geometry: Geometry) -> Tensor:
    """[N, C, H, W] -> [V, K, M] by one strided copy, on a CPU two to ten times as fast as `F.unfold`."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    padded = (F.pad(x, (pw, pw, ph, ph)) if ph or pw else x).contiguous()
    n, channels, high, wide = padded.shape
    rows, columns = (high - dh * (kh - 1) - 1) // sh + 1, (wide - dw * (kw - 1) - 1) // sw + 1
    plane = high * wide
    # Axes: (v; c, kh, kw; b, row, column), which are V, K and M.
    windows = padded.as_strided(
        (target_clients, channels, kh, kw, n // target_clients, rows, columns),
        (n // target_clients * channels * plane, plane, dh * wide, dw, channels * plane, sh * wide, sw),
    )
    return windows.reshape(target_clients, channels * kh * kw, -1)


def fold(columns: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """Sum [N, K, positions] back to images of this shape: the adjoint of unfolding."""
    kernel, stride, padding, dilation = geometry
    return F.fold(columns, (shape[2], shape[3]), kernel, dilation, padding, stride)


def _backward(
    delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation = geometry[1:]
    function: Any = torch.ops.aten.convolution_backward
    # After the dilation: transposed, output padding, groups, which of (input, weight, bias) to compute.
    return function(delta, x, weight, None, stride, padding, dilation, False, (0, 0), 1, wanted)


def _input_gradient(shape: tuple[int, ...], weight: Tensor, delta: Tensor, geometry: Geometry) -> Tensor:
    positions = delta[0, 0].numel()
    entries = shape[0] * positions * weight[0].numel()
    if delta.device.type == "cpu" and positions > 1 and (shape[1] <= _FEW_CHANNELS or entries <= _FEW_COLUMN_ENTRIES):
        return fold(torch.matmul(weight.flatten(1).t(), delta.flatten(2)), shape, geometry)
    # Of the image only the shape is read: one expanded entry stands in for it, without memory.
    return _backward(delta, delta.new_empty(1).expand(shape), weight, geometry, (True, False, False))[0]


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        ctx.shape, ctx.geometry = x.shape, geometry
        return torch.conv2d(x, weight, bias, *geometry[1:])

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        return torch.conv2d(moved[0], ctx.saved_tensors[0], None, *ctx.geometry[1:])

    @staticmethod
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        # A graph is wanted (the attack's second derivative), or a tangent goes through the backward pass.
        if torch.is_grad_enabled() or forward_ad.unpack_dual(uppers[0]).tangent is not None:
            return _apply(_InputGradient, *uppers, weight, ctx.shape, ctx.geometry), None, None, None
        return _input_gradient(ctx.shape, weight, uppers[0], ctx.geometry), None, None, None


class _InputGradient(Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, weight: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        ctx.shape, ctx.geometry = shape, geometry
        return _input_gradient(shape, weight, delta, geometry)

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        return _input_gradient(ctx.shape, ctx.saved_tensors[0], moved[0], ctx.geometry)

    @staticmethod
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # delta -> dx is linear, and its adjoint is the convolution itself.
            return _apply(_Convolution, *uppers, weight, None, ctx.geometry), None, None, None
        return torch.conv2d(uppers[0], weight, None, *ctx.geometry[1:]), None, None, None


class _WeightGradients(Function):
    """Products of output gradients [V, O, M] with unfolded inputs [V, K, M]; the backward uses them again."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, target_clients: int, geometry: Geometry) -> Tensor:
        left, patches = side_by_side(delta.flatten(2), target_clients), unfold(x, target_clients, geometry)
        ctx.save_for_backward(left, patches)
        ctx.shapes, ctx.geometry, ctx.examples = (delta.shape, x.shape), geometry, x.shape[0] // target_clients
        return torch.bmm(left, patches.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        left, patches = ctx.saved_tensors
        upper = uppers[0]
        # Of G = L P^T: dL = U P, dP = U^T L, with U the gradient at G.
        of_delta = one_by_one(torch.bmm(upper, patches), ctx.examples)
        of_columns = one_by_one(torch.bmm(upper.transpose(1, 2), left), ctx.examples)
        return of_delta.view(ctx.shapes[0]), fold(of_columns, ctx.shapes[1], ctx.geometry), None, None


def side_by_side(values: Tensor, target_clients: int) -> Tensor:
    """[N, R, positions] -> [V, R, M]: one target client's examples stand side by side."""
    examples = values.shape[0] // target_clients
    if examples == 1:
        return values
    return values.view(target_clients, examples, *values.shape[1:]).transpose(1, 2).flatten(2)


def one_by_one(values: Tensor, examples: int) -> Tensor:
    """[V, R, M] -> [N, R, positions]."""
    if examples == 1:
        return values
    return values.view(*values.shape[:2], examples, -1).transpose(1, 2).flatten(0, 1)


class _OuterSum(Function):
    """Unlike that of `bmm`, the backward leaves no transposed result for the next step to copy."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return torch.bmm(left, right.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        return torch.bmm(uppers[0], right), torch.bmm(uppers[0].transpose(1, 2), left)


class _Outer(Function):
    """[V, O], [V, K] -> [V, O, K]. The backward's row vectors stand left: 14 times as fast as columns on a CPU."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left.unsqueeze(2) * right.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left = torch.bmm(right.unsqueeze(1), uppers[0].transpose(1, 2)).squeeze(1)
        return of_left, torch.bmm(left.unsqueeze(1), uppers[0]).squeeze(1)


class _OwnWeightGradients(Function):
    """The weight gradients of few large layers: torch's own convolutions, one target client after the other."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, target_clients: int, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(delta, x)
        ctx.geometry = geometry
        # Of the weight only the shape is read.
        like = delta.new_empty(1).expand(delta.shape[1], x.shape[1], *geometry.kernel)
        pairs = zip(delta.chunk(target_clients), x.chunk(target_clients), strict=True)
        return torch.stack([_backward(d, x_v, like, geometry, (False, True, False))[1] for d, x_v in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        (delta, x), geometry = ctx.saved_tensors, ctx.geometry
        weights = uppers[0].unbind()
        parts = list(zip(weights, delta.chunk(len(weights)), x.chunk(len(weights)), strict=True))
        # <U, G(delta, x)> = <delta, conv(x, U)>: U takes the place of the kernel in both derivatives.
        of_delta = [torch.conv2d(x_v, weight, None, *geometry[1:]) for weight, _, x_v in parts]
        of_x = [_input_gradient(tuple(x_v.shape), weight, d, geometry) for weight, d, x_v in parts]
        return torch.cat(of_delta), torch.cat(of_x), None, None
