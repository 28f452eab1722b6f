"""The linear equations of one layer for its input, given its gradient and output."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.nn.layer_chain import Link

_RIDGE = 1e-13
"""A direction with this share of the mean squared weight in the equations is half open."""
_REFINED = 3
_NOTHING = 1e-100
"""Keeps equations that are all zero solvable."""
_LITTLE = 1e-3
"""Weight of the size of a filled-in image relative to its roughness."""


def taken_back(link: Link, weight: Tensor, error: Tensor) -> Tensor:
    """Propagate the error at a layer's outputs back to its inputs: W^T k."""
    layer = link.layer
    if isinstance(layer, nn.Linear):
        return error @ weight
    # A convolution is linear: its transpose is the gradient at any input, such as zeros.
    blank = torch.zeros(1, *link.taken, dtype=weight.dtype, device=weight.device, requires_grad=True)
    with torch.enable_grad():
        given = F.conv2d(blank, weight, None, layer.stride, layer.padding, layer.dilation)
    return torch.autograd.grad(given, blank, error.view_as(given))[0][0]


def as_matrix(link: Link, weight: Tensor) -> Tensor:
    """Return the matrix [outputs, inputs] of a convolution."""
    layer, count = link.layer, prod(link.taken)
    assert isinstance(layer, nn.Conv2d)
    parts = []
    for units in torch.eye(count, dtype=weight.dtype, device=weight.device).split(256):
        given = F.conv2d(units.view(-1, *link.taken), weight, None, layer.stride, layer.padding, layer.dilation)
        parts.append(given.flatten(1))
    return torch.cat(parts).T.contiguous()


def gradient_rows(link: Link, error: Tensor) -> Tensor:
    """Return the matrix [O a b, H W] from one input channel to a convolution's gradient, the same for each channel.

    dW[o, c, a, b] = sum_p k[o, p] x[c, pixel under tap (a, b) at p].
    """
    layer, (_, height, width) = link.layer, link.taken
    assert isinstance(layer, nn.Conv2d)
    assert not isinstance(layer.padding, str)
    numbered = 1.0 + torch.arange(height * width, dtype=error.dtype, device=error.device).view(1, 1, height, width)
    pixel = F.unfold(numbered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].long()  # 0: padding
    outputs = error.reshape(link.given[0], -1)
    # Column 0 takes what falls on padding. Under one tap, positions see different pixels, so that scatter_ overwrites
    # only there.
    rows = error.new_zeros(len(outputs), len(pixel), height * width + 1)
    taps = outputs.unsqueeze(1).expand(-1, len(pixel), -1)
    rows.scatter_(2, pixel.expand(len(outputs), -1, -1), taps)
    return rows[:, :, 1:].flatten(0, 1)


def roughness(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the matrix of the sum of squared differences of neighbouring pixels, plus a small multiple of the size.

    Rows of a table have no neighbours, and only the size.
    """
    if len(shape) == 1:
        return _LITTLE * torch.eye(shape[0], dtype=like.dtype, device=like.device)
    channels, height, width = shape
    eye = torch.eye(max(height, width), dtype=like.dtype, device=like.device)

    def along(count: int) -> Tensor:
        steps = torch.diff(eye[:count, :count], dim=0)
        # Half of the size in each of the two directions, which add up.
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

    Of many solutions it returns the shortest, or the smallest in a prior's quadratic form. It also returns the open
    share of each value: one if the equations do not contain it, zero if they determine it. The sum of the shares is the
    number of open directions. `square` is rows^T rows, if it is known.
    """
    channels = len(gradients)
    square = rows.T @ rows if square is None else square
    normal = square + torch.block_diag(*[shown.T @ shown] * channels)
    if not bool(normal.isfinite().all()):  # an overflow leaves everything open
        return torch.zeros_like(normal[0]), torch.ones_like(normal[0])
    eye = torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    ridge = _RIDGE * normal.diagonal().mean().clamp_min(_NOTHING) * (eye if prior is None else prior)
    factor, failed = torch.linalg.cholesky_ex(normal + ridge)
    while bool(failed):  # rounding made it indefinite
        ridge = 10 * ridge
        factor, failed = torch.linalg.cholesky_ex(normal + ridge)
    x = torch.zeros_like(normal[0])
    for _ in range(_REFINED):  # normal equations square the error of rounding, so the residual avoids them
        residual = rows.T @ (wanted - rows @ x) - ridge @ x
        residual = residual + ((gradients - x.view(channels, -1) @ shown.T) @ shown).flatten()
        x = x + torch.cholesky_solve(residual.unsqueeze(1), factor).squeeze(1)
    # ridge (normal + ridge)^-1 projects onto the open directions, so that its diagonal sums to their number.
    # For symmetric matrices, row sums of the elementwise product are the diagonal of the matrix product.
    return x, (ridge * torch.cholesky_inverse(factor)).sum(1)
