"""The factors of a gradient that is an outer product, from some of its entries or from noisy ones.

For one image, the gradient of a layer whose inputs all take part in one output position is dW = k x^T, and its bias's
is k. Hence [dW | db] = k [x; 1]^T has rank one: its largest singular pair averages noise over rows and columns. If
entries are missing, log |dW_ij| = log |k_i| + log |x_j| is a linear system with an equation for each entry sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDED = 1e-4
"""Relative error of a factor of exact entries."""
_RESIDUAL = 1e-3
"""Largest misfit of exact entries to an outer product."""
_SWEEPS = 8


@dataclass(frozen=True)
class Factors:
    """The factors of one gradient [R, C]: errors k [R] and inputs x [C], each with standard deviations.

    A factor that the entries do not determine is zero, and its deviation infinite.
    """

    errors: Tensor
    of_errors: Tensor
    inputs: Tensor
    of_inputs: Tensor
    scale: float
    """Standard deviation of the inputs' common factor; infinite without a bias that was sent."""

    @property
    def rows(self) -> Tensor:
        """Mark the errors that are determined."""
        return self.of_errors.isfinite()

    @property
    def known(self) -> Tensor:
        """Mark the inputs that are determined."""
        return self.of_inputs.isfinite()


def nothing(rows: Tensor, columns: int) -> Factors:
    """Return factors of which nothing is determined."""
    errors, inputs = rows.new_zeros(len(rows)), rows.new_zeros(columns)
    return Factors(errors, errors + torch.inf, inputs, inputs + torch.inf, torch.inf)


def factored(weight: Tensor, bias: Tensor | None, noise: float, *, masked: bool, positive: bool) -> Factors:
    """Factor the sent gradient of a weight [R, C] and a bias [R]; `positive` if no input is negative.

    `masked` says that zeros are entries which were not sent.
    """
    rows = weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)
    if not bool(rows.any()) or not bool(rows.isfinite().all()):
        return nothing(rows, weight.shape[1])
    known = (rows != 0) if masked else torch.ones_like(rows, dtype=torch.bool)
    errors, columns = _completed(rows, positive, bias is not None) if masked else _leading(rows)
    if masked and noise:
        errors, columns = _refined(rows, known, errors, columns, positive)
    if masked and not noise:
        rest = torch.where(known & (errors != 0).unsqueeze(1) & (columns != 0), torch.outer(errors, columns) - rows, 0)
        if rest.norm() > _RESIDUAL * rows.norm():  # several images, or a defence that does more than leave out
            return nothing(rows, weight.shape[1])
    # Of the columns (inputs and bias), then of the rows (errors).
    deviations = [
        _deviation(noise, known, errors.unsqueeze(1), 0, columns),
        _deviation(noise, known, columns, 1, errors),
    ]
    anchor, scale = columns[-1] if bias is not None else columns[0] * 0, torch.inf
    # The bias's column stands for an input of 1: dividing by it gives inputs and errors their scale and sign.
    if bias is not None and anchor.abs() > 2 * deviations[0][-1]:
        scale = float(deviations[0][-1] / anchor.abs())
        errors, columns = errors * anchor, columns / anchor
        deviations = [deviations[0] / anchor.abs(), deviations[1] * anchor.abs()]
    else:  # a common factor is open, of either sign
        size = columns.norm().clamp_min(torch.finfo(columns.dtype).tiny)
        sign = torch.where(columns.sum() < 0, -1.0, 1.0)
        errors, columns = errors * size * sign, columns / size * sign
        deviations = [deviations[0] / size, deviations[1] * size]
    width = weight.shape[1]
    return Factors(errors, deviations[1], columns[:width], deviations[0][:width], scale)


def _leading(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest singular pair."""
    left, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    return left[:, 0] * sizes[0], right[0]


def _completed(rows: Tensor, positive: bool, biased: bool) -> tuple[Tensor, Tensor]:
    """Solve the logarithms of the entries sent, in the part of them that hangs together with the bias.

    Entries hang together that share a row or a column. Without a bias, or if none of it was sent, it is the largest
    part. What no entry determines stays zero.
    """
    count, width = rows.shape
    at, of = rows.nonzero(as_tuple=True)
    places = torch.cat([at, of + count]), torch.cat([of + count, at])
    # A graph of rows and columns, with an edge for each entry sent; `part` grows along the edges.
    links = rows.new_zeros(count + width, count + width)
    links[places] = 1.0
    start = count + width - 1 if biased and bool(rows[:, -1].any()) else int(links.sum(1).argmax())
    part = torch.zeros(count + width, dtype=torch.bool, device=rows.device)
    part[start] = True
    while True:
        more = part | (links @ part.to(rows) > 0)
        if bool((more == part).all()):
            break
        part = more
    # Normal equations of log |k_i| + log |x_j| = log |dW_ij| over the entries sent: degrees on the diagonal, and the
    # edges. Factors k c and x / c fit equally well: the logarithm of `start` is set to 0.
    sizes = torch.where(rows != 0, rows.abs(), 1.0).log()
    wanted = torch.cat([sizes.sum(1), sizes.sum(0)])
    equations = torch.diag(links.sum(1)) + links
    equations[start] = 0.0
    equations[start, start], wanted[start] = 1.0, 0.0
    inside = part.nonzero().squeeze(1)
    logs = torch.linalg.solve(equations[inside][:, inside], wanted[inside])
    solution = torch.zeros_like(wanted).index_copy_(0, inside, logs.exp())
    errors, columns = solution[:count], solution[count:]
    signs = rows.sign()
    if positive:
        return errors * signs.sum(1).sign(), columns
    # Signs alternate from the leading pair: each takes the majority of its row or column.
    left, right = _leading(signs)
    for _ in range(_SWEEPS):
        left = (signs @ right.sign()).sign()
        right = (left @ signs).sign()
    flip = torch.where(right[-1] < 0, -1.0, 1.0) if biased else 1.0
    return errors * left * flip, columns * right * flip


def _refined(rows: Tensor, known: Tensor, errors: Tensor, columns: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """Fit noisy entries by alternating least squares."""
    sent = known.to(rows)
    for _ in range(_SWEEPS):
        columns = (errors @ (rows * sent)) / (errors.square() @ sent).clamp_min(1e-300)
        columns = columns.clamp_min(0) if positive else columns
        errors = ((rows * sent) @ columns) / (sent @ columns.square()).clamp_min(1e-300)
    return errors, columns


def _deviation(noise: float, known: Tensor, other: Tensor, dim: int, factor: Tensor) -> Tensor:
    """Return the standard deviation of a factor, given the other one."""
    evidence = torch.where(known, other.square().expand_as(known), 0.0).sum(dim)
    spread = noise / evidence.clamp_min(torch.finfo(evidence.dtype).tiny).sqrt()
    # An exact factor of zero among masked entries may also be one of which nothing was sent.
    determined = (evidence > 0) & ((factor != 0) | (noise > 0) | bool(known.all()))
    return torch.where(determined, spread + _ROUNDED * factor.abs(), torch.inf)
