"""The linear equations of one layer: what its gradient and output imply for its input."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.nn.layer_chain import Link

_RIDGE = 1e-13
"""A direction that the equations show this much more weakly than the mean one, by squares, is half open."""
_REFINED = 3
_NOTHING = 1e-100
"""Keeps equations that are all zero solvable."""
_LITTLE = 1e-3
"""How much the size of the image counts where it is filled in, relative to its roughness."""


def taken_back(link: Link, weight: Tensor, error: Tensor) -> Tensor:
    """Take the error at a layer's outputs back to its inputs: W^T k."""
    layer = link.layer
    if isinstance(layer, nn.Linear):
        return error @ weight
    blank = torch.zeros(1, *link.taken, dtype=weight.dtype, device=weight.device, requires_grad=True)
    with torch.enable_grad():
        given = F.conv2d(blank, weight, None, layer.stride, layer.padding, layer.dilation)
    return torch.autograd.grad(given, blank, error.view_as(given))[0][0]


def as_matrix(link: Link, weight: Tensor) -> Tensor:
    """Write a convolution as a matrix [outputs, inputs]."""
    layer, count = link.layer, prod(link.taken)
    assert isinstance(layer, nn.Conv2d)
    parts = []
    for some in torch.eye(count, dtype=weight.dtype, device=weight.device).split(256):
        given = F.conv2d(some.view(-1, *link.taken), weight, None, layer.stride, layer.padding, layer.dilation)
        parts.append(given.flatten(1))
    return torch.cat(parts).T.contiguous()


def gradient_rows(link: Link, error: Tensor) -> Tensor:
    """Write what a convolution's gradient sees of one input channel as a matrix [O a b, H W]: the same of each.

    dW[o, c, a, b] = sum_p k[o, p] x[c, pixel under tap (a, b) at p].
    """
    layer, (_, height, width) = link.layer, link.taken
    assert isinstance(layer, nn.Conv2d)
    assert not isinstance(layer.padding, str)
    numbered = 1.0 + torch.arange(height * width, dtype=error.dtype, device=error.device).view(1, 1, height, width)
    pixel = F.unfold(numbered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].long()  # 0: padding
    outputs = error.reshape(link.given[0], -1)
    rows = error.new_zeros(len(outputs), len(pixel), height * width + 1)
    taps = outputs.unsqueeze(1).expand(-1, len(pixel), -1)
    rows.scatter_(2, pixel.expand(len(outputs), -1, -1), taps)
    return rows[:, :, 1:].flatten(0, 1)


def roughness(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the matrix whose quadratic form sums squared steps between neighbouring pixels, and a little of all."""
    channels, height, width = shape
    eye = torch.eye(max(height, width), dtype=like.dtype, device=like.device)

    def along(count: int) -> Tensor:
        steps = torch.diff(eye[:count, :count], dim=0)
        return steps.T @ steps + _LITTLE / 2 * eye[:count, :count]

    plane = torch.kron(along(height), eye[:width, :width]) + torch.kron(eye[:height, :height], along(width))
    return torch.block_diag(*[plane] * channels)


def solved(
    rows: Tensor,
    wanted: Tensor,
    shown: Tensor,
    gradients: Tensor,
    prior: Tensor | None = None,
    square: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve by least squares rows x = wanted, and shown x_c = gradients_c of each input channel c [C, O a b].

    Of many solutions it is the shortest, or the least by a prior's quadratic form. Also returns what share of each
    value the equations leave open: one where they say nothing of it, zero where they settle it. The shares' sum counts
    the open directions. `square` is rows^T rows, where it is known.
    """
    channels = len(gradients)
    square = rows.T @ rows if square is None else square
    normal = square + torch.block_diag(*[shown.T @ shown] * channels)
    if not bool(normal.isfinite().all()):  # numbers beyond all bounds say nothing
        return torch.zeros_like(normal[0]), torch.ones_like(normal[0])
    eye = torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    ridge = _RIDGE * normal.diagonal().mean().clamp_min(_NOTHING) * (eye if prior is None else prior)
    factor, failed = torch.linalg.cholesky_ex(normal + ridge)
    while bool(failed):  # rounding left it without a root
        ridge = 10 * ridge
        factor, failed = torch.linalg.cholesky_ex(normal + ridge)
    found = torch.zeros_like(normal[0])
    for _ in range(_REFINED):  # the normal equations square what rounding does; the residual is computed without them
        missing = rows.T @ (wanted - rows @ found) - ridge @ found
        missing = missing + ((gradients - found.view(channels, -1) @ shown.T) @ shown).flatten()
        found = found + torch.cholesky_solve(missing.unsqueeze(1), factor).squeeze(1)
    # The diagonal of ridge (normal + ridge)^-1, which takes the open directions out of a solution; its sum counts them.
    return found, (ridge * torch.cholesky_inverse(factor)).sum(1)
