"""Separation of mixed images by independent component analysis of their pixel differences.

Every row of a fully connected layer's gradient is a mixture of the batch's images, dW = D X. The rows span the images.
Inside of this span, images are the directions whose pixel differences are least Gaussian (FastICA, Hyvärinen 1999):
neighbouring pixels differ little, and by much at edges. Pixels themselves separate badly, for images share their large
bright and dark regions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS, _STILL = 400, 1e-5
"""Largest number of fixed-point steps, and the change of direction below which a separation is finished."""
_NUMERICAL = 1e-6
"""Singular values below this share of the largest are rounding errors of float32."""


@dataclass(frozen=True)
class Span:
    """The best approximation of gradients [V, h, n] by products of rank k: `left @ right`."""

    left: Tensor
    """[V, h, k] with orthonormal columns."""
    sizes: Tensor
    """[V, k] singular values, the largest first."""
    right: Tensor
    """[V, k, n] right singular vectors, times their singular values."""
    noise: Tensor
    """[V] root mean square of what is left of an entry, with the degrees of freedom taken off."""


def spanned(gradient: Tensor, rank: int) -> Span:
    """Return the span of gradients [V, h, n], h > rank: in double precision, through the smaller Gram matrix."""
    gradient = gradient.double()
    _, high, wide = gradient.shape
    # Eigenvalues ascend: the last columns are the strongest left singular vectors. The SVD inside of their span is
    # small.
    left = torch.linalg.eigh(gradient @ gradient.mT)[1][..., -rank:]
    turn, sizes, right = torch.linalg.svd(left.mT @ gradient, full_matrices=False)
    rest = (gradient.square().sum((1, 2)) - sizes.square().sum(1)).clamp_min(0)
    # Of h n entries, a fit of rank k takes k (h + n - k) degrees of freedom: (h - k) (n - k) remain.
    noise = (rest / max(1, (high - rank) * (wide - rank))).sqrt()
    return Span(left @ turn, sizes, sizes.unsqueeze(2) * right, noise)


def ranks(gradient: Tensor, most: int) -> Tensor:
    """Count the singular values [V] of gradients [V, h, n] that are no rounding errors, up to `most`."""
    squares = torch.linalg.eigvalsh(gradient.double() @ gradient.double().mT).flip(1)[:, :most].clamp_min(0)
    return (squares.sqrt() > _NUMERICAL * squares[:, :1].sqrt()).sum(1)


def differences(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return differences of images [..., n] of a shape (C, H, W), flat: horizontal, vertical, and the one of the other.

    Each kind has the mean 0. Of rows of a table (one dimension) the numbers themselves stand for differences.
    """
    if len(shape) == 1:
        return rows - rows.mean(-1, keepdim=True)
    images = rows.unflatten(-1, shape)
    kinds = (images.diff(dim=-1), images.diff(dim=-2), images.diff(dim=-1).diff(dim=-2))
    return torch.cat([(kind - kind.mean((-3, -2, -1), keepdim=True)).flatten(-3) for kind in kinds], -1)


def whitening(features: Tensor) -> Tensor:
    """Return matrices K [V, k, k] such that K @ features [V, k, m] have the identity as their second moments."""
    moments = features @ features.mT / features.shape[-1]
    values, vectors = torch.linalg.eigh(moments)
    # Dependent rows have eigenvalues of rounding, or negative ones: the floor keeps their scale finite.
    floor = values[:, -1:].clamp_min(torch.finfo(values.dtype).tiny) * torch.finfo(values.dtype).eps
    return vectors.mT / values.clamp_min(floor).sqrt().unsqueeze(2)


def independent(white: Tensor, starts: Tensor) -> Tensor:
    """Return orthogonal matrices [V, k, k] that separate white features [V, k, m], by symmetric FastICA from `starts`.

    The contrast is -exp(-u^2 / 2), which outliers do not dominate: w <- E[g(w z) z] - E[g'(w z)] w with
    g(u) = u exp(-u^2 / 2), all directions at once, and the matrix made orthogonal again. A finished separation no
    longer changes, so that results do not depend on who else is in the batch.
    """
    # The rounding of float32 is far below _STILL.
    white = white.float()
    turned, live = orthogonal(starts.float()), torch.ones(len(white), dtype=torch.bool, device=white.device)
    for _ in range(_STEPS):
        rows = live.nonzero().squeeze(1)
        part, old = (white, turned) if len(rows) == len(white) else (white[rows], turned[rows])
        u = old @ part
        # In place, as new memory for each of these takes longer than the arithmetic.
        square = u.square()
        bell = (square / -2).exp_()
        slope = square.neg_().add_(1).mul_(bell).mean(-1, keepdim=True)
        new = orthogonal(u.mul_(bell) @ part.mT / part.shape[-1] - slope * old)
        turned = turned.index_copy(0, rows, new)
        # A direction may change its sign from step to step: only the absolute cosine counts.
        moved = 1 - (new * old).sum(-1).abs().amin(-1)
        live = live.index_copy(0, rows, moved > _STILL)
        if not bool(live.any()):
            break
    return turned.double()


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrices nearest to matrices [..., k, k]."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


_FILLS = 25


def completed(gradient: Tensor, known: Tensor, rank: int) -> Tensor:
    """Fill the unknown entries of gradients [V, h, n] in from their best approximations of a rank, again and again."""
    filled = torch.where(known, gradient, 0.0)
    for _ in range(_FILLS):
        left = torch.linalg.eigh(filled @ filled.mT)[1][..., -rank:]
        filled = torch.where(known, gradient, left @ (left.mT @ filled))
    return filled
