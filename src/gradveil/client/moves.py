"""How much examples' own gradients move: sums of squared derivatives, of which none is made where that can be helped.

Shapes: N examples, O and C channels out and in, M positions of one example, K = C x kernel entries.
"""

# pyright: basic
# torch gives autograd functions no types.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from gradveil.client.convolution import Geometry, unfold

_AT_ONCE = 1 << 20
"""Entries of examples' derivatives that are held at once."""
_FEW_CHANNELS = 4
"""Of fewer, windows are copied in longer runs with the channels first (0.14 against 0.4 ms for one channel)."""


def squared_weight_moves(
    delta: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], factor: Tensor, geometry: Geometry
) -> Tensor:
    """Return sum_n f_n (dg_n)^2, entry by entry, of the derivatives dg_n of each example's weight gradient [O, C, ...].

    Pairs are a value and its derivative. Channels stand last while windows are copied, which are longer runs then.
    """
    columns = delta[0].flatten(2), delta[1].flatten(2)
    shape = (-1, x[0].shape[1], *geometry.kernel)
    if x[0].shape[1] < _FEW_CHANNELS:
        first, second = (unfold(value, len(value), geometry).mT for value in x)
        return squared_moves(columns, (first, second), factor).view(shape)
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    both = torch.stack(x, 1)
    both = (F.pad(both, (pw, pw, ph, ph)) if ph or pw else both).permute(0, 1, 3, 4, 2).contiguous()
    n, _, high, wide, channels = both.shape
    line = wide * channels
    windows = both.as_strided(
        (n, 2, *delta[0].shape[2:], kh, kw, channels),
        (2 * high * line, high * line, sh * line, sw * channels, dh * line, dw * channels, 1),
    )
    right = windows.reshape(n, 2, columns[0].shape[2], -1)
    found = squared_moves(columns, (right[:, 0], right[:, 1]), factor)
    return found.view(-1, kh, kw, channels).permute(0, 3, 1, 2)


def squared_moves(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], factor: Tensor) -> Tensor:
    """Return sum_n f_n (l'_n r_n + l_n r'_n)^2, entry by entry: [O, K], from pairs [N, O, M] and [N, M, K].

    With one position m the square comes apart, and no product of one example is made.
    """
    scale = factor.sqrt().view(-1, 1, 1)
    (a, moved_a), (b, moved_b) = left, right
    outputs, inputs, positions = a.shape[1], b.shape[2], a.shape[2]
    if positions == 1:
        a, moved_a, b, moved_b = (a * scale)[..., 0].t(), (moved_a * scale)[..., 0].t(), b[:, 0], moved_b[:, 0]
        found = (2 * a * moved_a) @ (b * moved_b)
        return found.addmm_(moved_a.square(), b.square()).addmm_(a.square(), moved_b.square()).clamp_(min=0)
    wide, tall = torch.cat((moved_a, a), 2) * scale, torch.cat((b, moved_b), 1)
    some = max(1, _AT_ONCE // (outputs * inputs))
    found = a.new_zeros(outputs, inputs)
    for wide_n, tall_n in zip(wide.split(some), tall.split(some), strict=True):
        found += torch.bmm(wide_n, tall_n).square_().sum(0)
    return found


def connect(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by constant weights: `F.linear` for forward mode, in which torch spends most of it on zero tangents."""
    return cast(Tensor, _Linear.apply(x, weight, bias))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        return F.linear(moved[0], ctx.saved_tensors[0])

    @staticmethod
    def backward(ctx: Any, *uppers: Tensor) -> tuple[Tensor | None, ...]:
        return connect(uppers[0], ctx.saved_tensors[0].t(), None), None, None
