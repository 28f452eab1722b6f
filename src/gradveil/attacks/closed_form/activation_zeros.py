"""Exact separation of a batch behind a ReLU layer, by the zeros of its error matrix.

dW = D X with D [h, B]: column j is example j's error at the layer's outputs, and it is zero in every row that the
example leaves inactive. With dW = L R of rank k, D = L Q, so that column q of Q is a null vector of those rows of L
(Dimitrov et al. 2024, SPEAR). SPEAR searches for them among all subsets of rows. Here approximate images say which rows
are inactive: those in which W x + c is most negative. Iteratively re-weighted least squares on these rows,

    q <- argmin sum_i (L_i q)^2 / (r_i^2 + e^2),   r_i = L_i q of the last step, e shrinking to the noise,

ignore the rows about which they are wrong. A direction proves itself: k - 1 zeros can be had for any, a true one has
far more, and its image is inactive in the very rows that are zero.

A direction that is proven confines all other images exactly to the combinations of R with B q = 0: they are separated
again there, fewer of them each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.closed_form.independent_images import Span, independent, whitening

_ZERO = 1e-4
"""Size below which a value of a normalised row is zero in float32."""
_NOISES = 4.0
"""The same in units of the noise on it."""
_SHARES = (0.5, 0.7, 0.85, 0.6, 0.4, 0.95)
"""Shares of the inactive rows that are trusted, one round after the other."""
_ROUNDS, _IDLE = 12, 3
"""Largest number of rounds, and of rounds in a row without a new direction."""
_STEPS, _SHRINK = 25, 0.6
_SPARE = 1.25
"""At least so many rows per unknown are trusted."""
_EXCESS, _SHARE = 8, 0.03
"""Zeros beyond those that every direction can have: a number, and a share of the rows."""
_ALIKE = 0.95
"""Cosine above which two directions are the same."""
_APART = 1e-3
"""Distance from a combination of other directions below which a direction is one."""
_AGREES, _COVERED = 0.97, 0.5
"""Share of a direction's zeros that its image leaves inactive, and of its inactive rows that are zeros: local steps
activate some of them later."""
_ALONE = 0.99
"""Both shares for an image that depends on directions which are not proven."""
_TRUSTED = 0.8
"""Share of the inactive rows that are trusted where noise hides the zeros."""
_ALLOWED = 1.1
"""Factor by which the share outside of the valid values may grow."""
_BLUNT = 0.1
"""Noise on a value, relative to its typical size, above which zeros prove nothing."""


@dataclass(frozen=True)
class Separated:
    """Images of one update, their errors, and which of them are certified."""

    images: Tensor
    """[B, n]"""
    errors: Tensor
    """[h, B] the columns of D."""
    certified: Tensor
    """[B] whether an image's zeros prove it."""
    leak: float
    """Share of the errors' energy in rows that the images leave inactive: 0 at the true ones."""
    outside: float
    """Share of the images' energy outside of the valid values."""

    def better(self, other: Separated) -> bool:
        """Return whether less leaks, and no more is outside, than of another separation."""
        return self.leak <= other.leak and self.outside <= _ALLOWED * other.outside + 1e-9


@dataclass(frozen=True)
class ReluLayer:
    """A fully connected layer before a ReLU, in the order of an image's pixels, and its bias's gradient."""

    weight: Tensor
    """[h, n]"""
    bias: Tensor
    """[h]"""
    sent: Tensor
    """[h] gradient of the bias; NaN where it was not sent."""
    clamp: Callable[[Tensor], Tensor]
    """Cuts images [B, n] to valid values."""
    features: Callable[[Tensor], Tensor]
    """Pixel differences of rows [k, n]."""

    def outputs(self, images: Tensor) -> Tensor:
        """Return W x + c of images cut to valid values: [B, h]."""
        return self.clamp(images) @ self.weight.mT + self.bias

    def separated(self, span: Span, unmixing: Tensor) -> Separated:
        """Return the images `unmixing @ R`, scaled and signed by the bias's gradient; nothing is certified."""
        # dW = L R = (L B^-1) (B R): the errors are L B^-1 and the images B R, each pair up to a scale.
        errors = span.left @ torch.linalg.pinv(unmixing)
        scales = scaled(errors, self.sent)
        errors, images = errors * scales, unmixing @ span.right / scales.unsqueeze(1)
        energy, inactive = errors.mT.square(), self.outputs(images) < 0
        leak = float((energy * inactive).sum() / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny))
        outside = float((images - self.clamp(images)).square().sum() / images.square().sum())
        return Separated(images, errors, torch.zeros_like(scales, dtype=torch.bool), leak, outside)


def scaled(errors: Tensor, sent: Tensor) -> Tensor:
    """Return the scales s [..., k] with errors @ s = sent, by least squares over the rows that are not NaN.

    Where nothing was sent, they are 1.
    """
    heard = ~sent.isnan()
    rows = errors * heard.unsqueeze(-1)
    scales = (torch.linalg.pinv(rows) @ sent.nan_to_num(0.0).unsqueeze(-1)).squeeze(-1)
    scales = torch.where(heard.any(-1, keepdim=True), scales, 1.0)
    # An image is divided by its scale: one of zero becomes small, and keeps its sign.
    least = 1e-9 * scales.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(scales.dtype).tiny)
    return torch.where(scales.abs() < least, torch.copysign(least, scales), scales)


class ZeroSearch:
    """The search for the directions of one update, from an approximate separation."""

    def __init__(self, layer: ReluLayer, span: Span, start: Tensor) -> None:
        """Take the span of one update (without V), and B [k, k] with images B R up to scale."""
        self.layer, self.span, self.start = layer, span, start
        self.rank = len(span.sizes)
        size = span.left.norm(dim=1)
        self.live = size > 1e-6 * size.max()
        # Rows of length one, so that one threshold says in every row what is zero.
        self.rows = torch.where(self.live.unsqueeze(1), span.left / size.clamp_min(1e-300).unsqueeze(1), 0.0)
        # The noise on row i of L q is sigma |q / sizes|.
        self.row_noise = torch.where(self.live, span.noise / size.clamp_min(1e-300), torch.inf)
        self.moments = _moments(layer.features(span.right))

    def noise(self, q: Tensor) -> Tensor:
        """Return the noise [c, h] on the normalised rows times unit directions q [c, k]."""
        return (q / self.span.sizes).norm(dim=1, keepdim=True) * self.row_noise

    def run(self, generator: torch.Generator) -> Separated:
        """Search round by round. Returns the images with the smallest leak."""
        best = state = self.layer.separated(self.span, self.start)
        unmixing, pool, most, idle = self.start, self.rows.new_zeros((0, self.rank)), 0, 0
        for number in range(_ROUNDS):
            # D = L B^-1: the columns of B^-1 are the directions.
            directions = torch.linalg.inv(unmixing).mT
            found = self.fitted(directions / directions.norm(dim=1, keepdim=True), state.images, _SHARES[number % 6])
            zeros, sharp = self.zeros(found)
            if not bool(sharp.any()):
                return self._blunt(best)
            pool = torch.cat([pool, found[self.proves(zeros) & sharp]])
            proven = self._chosen(pool)
            if len(proven):
                unmixing = self.completed(proven, generator)
                state = self.certified(self.layer.separated(self.span, unmixing), len(proven))
                best = state if state.better(best) else best
            certified = int(state.certified.sum())
            most, idle = max(most, certified), 0 if certified > most else idle + 1
            if certified == self.rank or idle == _IDLE:
                break
        return best

    def fitted(self, q: Tensor, images: Tensor, share: float) -> Tensor:
        """Fit a direction [c, k] to the rows that each image leaves inactive, the most certain share of them."""
        outputs = torch.where(self.live, self.layer.outputs(images), torch.inf)
        inactive = (outputs < 0).sum(1)
        wanted = (share * inactive).clamp_min(_SPARE * self.rank).clamp_max(self.live.sum()).long()
        # The most negative outputs come first: these rows are the most certain to be inactive.
        order = outputs.argsort(1)[:, : int(wanted.max())]
        trusted = torch.arange(order.shape[1], device=order.device) < wanted.unsqueeze(1)
        # [c, rows, k]: where a direction trusts fewer rows than another, the rest are zeros.
        rows = self.rows[order] * trusted.unsqueeze(2)
        r = (rows @ q.unsqueeze(2)).squeeze(2)
        # Start at the median residual: half of the rows are outliers at first.
        e = torch.where(trusted, r.abs(), torch.nan).nanmedian(1).values.unsqueeze(1)
        for _ in range(_STEPS):
            floor = self.noise(q).gather(1, order).clamp_min(1e-7)
            weighted = rows / (r.square() + torch.maximum(e, floor).square()).sqrt().unsqueeze(2)
            q = _smallest(weighted.mT @ weighted, q)
            r = (rows @ q.unsqueeze(2)).squeeze(2)
            e = e * _SHRINK
        return q

    def zeros(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the zeros [c, h] of directions, and for which of them [c] zeros stand out from the noise."""
        noise = self.noise(q)
        # Root mean square of the product of two random unit vectors of k entries.
        typical = self.rank**-0.5
        sharp = ((_NOISES * noise)[:, self.live] < _BLUNT * typical).double().mean(1) > 0.5
        least = (_NOISES * noise).clamp_min(_ZERO)
        return ((self.rows @ q.mT).mT.abs() < least) & (least < _BLUNT * typical) & self.live, sharp

    def proves(self, zeros: Tensor) -> Tensor:
        """Return which directions [c] have more zeros than k - 1 rows and chance give."""
        return zeros.sum(1) >= self.rank - 1 + _EXCESS + _SHARE * float(self.live.sum())

    def _chosen(self, pool: Tensor) -> Tensor:
        """Choose independent directions, those with the most zeros first.

        A combination of two true directions has zeros too, but only where both have them: it comes after them, and
        depends on them.
        """
        counts = self.zeros(pool)[0].sum(1)
        chosen, basis = pool[:0], pool[:0]
        for place in counts.argsort(descending=True, stable=True).tolist():
            q = pool[place]
            rest = q - basis.mT @ (basis @ q)
            # A second time: one projection leaves rounding errors where q nearly depends on the others.
            rest = rest - basis.mT @ (basis @ rest)
            if rest.norm() > _APART and not bool(((chosen @ q).abs() > _ALIKE).any()):
                chosen = torch.cat([chosen, q.unsqueeze(0)])
                basis = torch.cat([basis, (rest / rest.norm()).unsqueeze(0)])
        return chosen

    def completed(self, proven: Tensor, generator: torch.Generator) -> Tensor:
        """Return B [k, k] with B q = 1 for its own proven direction and 0 for the others.

        The remaining rows are separated again in what is left. The proven rows are uncorrelated with them.
        """
        count = len(proven)
        if count == self.rank:
            return torch.linalg.inv(proven.mT)
        # The columns of the complete Q beyond the first `count` are orthogonal to all proven q: rows of B made of them
        # have B q = 0.
        left = torch.linalg.qr(proven.mT, mode="complete")[0][:, count:].mT
        features = left @ self.layer.features(self.span.right)
        white = whitening(features.unsqueeze(0))
        starts = torch.randn(white.shape, generator=generator, dtype=white.dtype).to(white)
        turned = independent(white @ features, starts)
        others = (turned @ white)[0] @ left
        # A proven row b has b q_j = 1 or 0 and b M b_l^T = 0 for every other row b_l: k equations for k unknowns. M
        # holds the second moments of the features.
        conditions = torch.cat([proven.mT, self.moments @ others.mT], 1)
        wanted = torch.eye(self.rank, dtype=conditions.dtype, device=conditions.device)[:count]
        return torch.cat([torch.linalg.solve(conditions.mT, wanted.mT).mT, others])

    def certified(self, state: Separated, proven: int) -> Separated:
        """Certify images of proven directions whose activations agree with the zeros of their errors."""
        # L has orthonormal columns: L^T (L q) = q.
        directions = self.span.left.mT @ state.errors[:, :proven]
        zeros, sharp = self.zeros((directions / directions.norm(dim=0)).mT)
        inactive = (self.layer.outputs(state.images[:proven]) < 0) & self.live
        both, counts = (zeros & inactive).sum(1).double(), (zeros.sum(1), inactive.sum(1))
        whole = proven == self.rank
        shares = (_AGREES, _COVERED) if whole else (_ALONE, _ALONE)
        agree = (both >= shares[0] * counts[0]) & (both >= shares[1] * counts[1])
        good = torch.zeros_like(state.certified)
        good[:proven] = agree & sharp & self.proves(zeros)
        return replace(state, certified=good)

    def _blunt(self, best: Separated) -> Separated:
        """Fit all directions at once, by plain least squares, where noise hides the zeros.

        The noise on every row of L is the same, and so is their weight. Two images that become one end the search.
        """
        state = best
        for _ in range(_ROUNDS):
            outputs = torch.where(self.live, self.layer.outputs(state.images), torch.inf)
            wanted = (_TRUSTED * (outputs < 0).sum(1)).clamp_min(_SPARE * self.rank)
            # The second argsort turns the order of the rows into the place of each row in it.
            trusted = (outputs.argsort(1).argsort(1) < wanted.unsqueeze(1)).to(self.rows)
            squares = torch.einsum("ch,hk,hl->ckl", trusted, self.span.left, self.span.left)
            # Eigenvalues ascend: the first eigenvector has the smallest |L q| over the trusted rows.
            q = torch.linalg.eigh(squares)[1][..., 0]
            if float(torch.linalg.svdvals(q)[-1]) < _APART:
                break
            state = self.layer.separated(self.span, torch.linalg.inv(q.mT))
            best = state if state.better(best) else best
        return best


def _moments(features: Tensor) -> Tensor:
    return features @ features.mT / features.shape[-1]


def _smallest(matrix: Tensor, q: Tensor) -> Tensor:
    """Return the eigenvectors [c, k] of the smallest eigenvalues of matrices [c, k, k], by inverse iteration from q."""
    trace = matrix.diagonal(dim1=1, dim2=2).mean(1)
    # A true direction makes the matrix singular; the ridge, at the size of rounding, keeps it positive definite.
    ridge = (1e-13 * trace).view(-1, 1, 1) * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky_ex(matrix + ridge)[0]
    for _ in range(3):
        q = torch.cholesky_solve(q.unsqueeze(2), factor).squeeze(2)
        q = q / q.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return q
