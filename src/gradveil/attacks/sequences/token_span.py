"""The span of a layer's inputs, read off its weight gradient: exact, or weighted by the signal in each direction.

A linear layer's gradient is G = sum_i delta_i x_i^T, so its rows lie in the span of the inputs x_i (Petrov, Dimitrov,
Baader, Müller, Vechev 2024, "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS). Noise fills the rest
of the space. Then a direction counts by how much of it a true one explains. Of a matrix with m rows, d columns and
noise of variance v an entry, a singular value t of the signal is seen as s, s^2 = (t^2 + m v)(t^2 + d v) / t^2, and the
squared cosine between the true and the seen right direction is (t^4 - m d v^2) / (t^2 (t^2 + d v)) (Benaych-Georges and
Nadakuditi 2012, "The singular values and vectors of low rank perturbations of large rectangular random matrices",
Journal of Multivariate Analysis 111). Directions that noise hides have no such t; they count by 1 - f / s^2, where f is
the mean square of the singular values that noise alone explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-6
"""Relative singular value below which a direction of an exact gradient is rounding; 1e-4 would lose half the tokens."""
SPARE = 20
"""Directions that must be free for membership to mean anything."""
_COMPLETIONS, _FEW_COMPLETIONS = 40, 3
"""Fits of both factors of a pruned gradient; where what was sent leaves them open, more fits lead away."""
_RIDGE, _OPEN_RIDGE = 1e-6, 1e-4
"""Ridge of a row's coefficients, relative to its squares: where it has more entries than coefficients, and else."""
_SIGNS = 0.999
"""Least share of the largest magnitude that every entry of signs has."""
_FIT_STEPS, _FIT_STEP = 100, 0.1
_CONFIDENT = 3.0
"""Mean size of the logits at which the fit of signs begins."""
_PRUNED = 0.01
"""Share of zeros above which a gradient counts as pruned."""


@dataclass(frozen=True)
class TokenSpan:
    """Directions [K, d] of the inputs and their weights [K] between 0 and 1."""

    basis: Tensor
    weights: Tensor
    exact: bool
    """The gradient has fewer directions than the layer has inputs, so that membership can be tested."""

    @property
    def rank(self) -> int:
        """Number of directions."""
        return len(self.basis)

    def factors(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return matrices P and Q [d, k]: the squared residual of x is the mean of |x P|^2 / |x Q|^2, Q None for 1."""
        # Such that |x P|^2 = |outside part|^2 + sum_k (1 - w_k) (x b_k)^2, as in `residuals`.
        inside = 1 - (1 - self.weights).clamp(0, 1).sqrt()
        everything = torch.eye(self.basis.shape[1], device=self.basis.device)
        return [(everything - self.basis.T @ (inside.unsqueeze(1) * self.basis), None)]

    def residuals(self, vectors: Tensor) -> Tensor:
        """Return the length [...] of the part of each unit vector [..., d] that the span does not explain.

        The part itself is computed: the difference of the squared lengths would end at 1e-3 in single precision.
        """
        unit = torch.nn.functional.normalize(vectors, dim=-1)
        shares = unit @ self.basis.T
        outside = (unit - shares @ self.basis).square().sum(-1)
        return (outside + (shares.square() * (1 - self.weights)).sum(-1)).sqrt()


@dataclass(frozen=True)
class NoisySpan(TokenSpan):
    """The leading directions of a noisy gradient, from which inputs that are known can be taken out."""

    products: Tensor
    """Inner products [d, d] of the gradient's columns."""
    rows: int
    inputs: int
    """Number of inputs that are assumed."""
    noisy: bool
    """The rest of the gradient is noise, as it is not where entries were completed or fitted."""
    known: Tensor
    """Orthonormal directions [k, d] of the inputs that were taken out."""

    def residuals(self, vectors: Tensor) -> Tensor:
        """Return the residuals [...] of the parts of vectors [..., d] that are not known."""
        return super().residuals(vectors - (vectors @ self.known.T) @ self.known)

    def without(self, known: Tensor) -> NoisySpan:
        """Return the span of the others when inputs [k, d] are known: noise hides fewer directions."""
        return noisy_span(self.products, self.rows, self.inputs, self.basis.dtype, known.double())


def noisy_span(
    products: Tensor, rows: int, inputs: int, dtype: torch.dtype, known: Tensor | None = None, noisy: bool = False
) -> NoisySpan:
    """Return the span of inputs behind a gradient [rows, d] with these products, some of which may be known."""
    width = len(products)
    known = products.new_zeros(0, width) if known is None else torch.linalg.qr(known.T)[0].T
    rest = torch.eye(width, dtype=products.dtype, device=products.device) - known.T @ known
    squares, directions = torch.linalg.eigh(rest @ products @ rest)
    free = width - len(known)
    left = max(1, min(inputs - len(known), rows, free))
    sizes = squares.flip(0)[: min(rows, free)].clamp_min(0).sqrt()
    weights = _explained(sizes, (rows, free), left)
    basis = directions.T.flip(0)[:left]
    return NoisySpan(
        basis.to(dtype), weights.to(dtype), exact=False,
        products=products, rows=rows, inputs=inputs, noisy=noisy, known=known.to(dtype),
    )  # fmt: skip


def token_span(
    gradients: Sequence[Tensor], tokens: int, dtype: torch.dtype = torch.float32, tolerance: float = TOLERANCE
) -> TokenSpan:
    """Return the span of the inputs behind gradients [outputs, d] of one layer, each brought to norm 1.

    `tokens` bounds the number of inputs; it is the rank that noisy gradients are assumed to have.
    """
    width = gradients[0].shape[1]
    scaled = [g.double() / g.double().norm().clamp_min(1e-300) for g in gradients]
    stacked = torch.cat(scaled).nan_to_num(0, 0, 0)
    assumed = max(1, min(tokens, width - SPARE))
    if all(map(are_signs, gradients)):
        fitted = _fitted(stacked.sign(), assumed)
        return noisy_span(fitted.T @ fitted, len(fitted), assumed, dtype)
    pruned = is_pruned(gradients)
    if pruned:
        stacked = _completed(stacked, assumed)
    _, sizes, directions = torch.linalg.svd(stacked, full_matrices=False)
    rank = int((sizes > tolerance * sizes[0].clamp_min(1e-300)).sum())
    # What is missing was fitted with a rank: only then the rest has no other.
    if rank <= (assumed if pruned else width - SPARE) and rank < len(stacked):
        return TokenSpan(directions[:rank].to(dtype), directions.new_ones(rank, dtype=dtype), exact=True)
    noises = [_noise(torch.linalg.svdvals(one), one.shape, assumed) for one in scaled]
    if not pruned and min(noises) > 0:
        # The same noise in all of them: a gradient that is lost in noise must not count as much as a clear one.
        stacked = torch.cat([one / noise**0.5 for one, noise in zip(scaled, noises, strict=True)])
    span = noisy_span(stacked.T @ stacked, len(stacked), assumed, dtype, noisy=not pruned)
    # With more inputs than directions, the rest is no noise, and no input stands out.
    return span if tokens <= assumed else TokenSpan(span.basis, span.weights, exact=False)


def _noise(sizes: Tensor, shape: Sequence[int], rank: int) -> float:
    """Return the variance of an entry that singular values after the first `rank` show; 0 where there are none."""
    free = (shape[0] - rank) * (shape[1] - rank)
    return float(sizes[rank:].square().sum()) / free if free > 0 else 0.0


def _explained(sizes: Tensor, shape: Sequence[int], rank: int) -> Tensor:
    """Return for each of the first directions, between 0 and 1, which share of it the signal's explains."""
    rows, width = shape
    noise, kept, rest = _noise(sizes, shape, rank), sizes[:rank].square(), sizes[rank:].square()
    # Fewer rows than tokens leave no direction that shows the noise.
    floor = rest.mean() if len(rest) else sizes.new_zeros(())
    weights = (1 - floor / kept).clamp(0, 1)
    if not noise:
        return weights
    # What noise alone adds to s^2 / v, taken off; `signal` is t^2 / v.
    excess = kept / noise - rows - width
    signal = (excess + (excess.square() - 4 * rows * width).clamp_min(0).sqrt()) / 2
    cosines = (signal.square() - rows * width) / (signal * (signal + width))
    seen = excess.square() > 4 * rows * width
    return torch.where(seen & (excess > 0), torch.maximum(weights, cosines), weights)


def is_pruned(gradients: Sequence[Tensor]) -> bool:
    """Report whether so many entries are zero that they were removed."""
    zeros = sum(int((one == 0).sum()) for one in gradients)
    return zeros > _PRUNED * sum(one.numel() for one in gradients)


def _completed(pruned: Tensor, rank: int) -> Tensor:
    """Fill the zeros of a gradient with the entries of the matrix of a rank that fits what was sent.

    The two factors are fitted in turn, by least squares over what was sent.
    """
    filled = pruned.any(dim=1)
    if not filled.any():
        return pruned
    values = pruned[filled].float()
    sent = (values != 0).float()
    products = (values.T @ values).double()
    right = torch.linalg.eigh(products)[1][:, -rank:].float()
    equations = float((sent.sum(1) - rank).clamp_min(0).sum())
    for _ in range(_COMPLETIONS if equations > rank * (len(right) - rank) else _FEW_COMPLETIONS):
        right = torch.linalg.qr(right)[0]
        left = _regressed(values, sent, right)
        right = _regressed(values.T, sent.T, left)
    completed = torch.where(sent > 0, pruned[filled], (left @ right.T).to(pruned.dtype))
    return torch.zeros_like(pruned).index_copy(0, filled.nonzero()[:, 0], completed)


def _regressed(values: Tensor, sent: Tensor, factor: Tensor) -> Tensor:
    """Return the coefficients [m, r] of each row [m, d] on a factor [d, r], by least squares over what was sent."""
    rank = factor.shape[1]
    products = (sent @ (factor.unsqueeze(2) * factor.unsqueeze(1)).flatten(1)).view(-1, rank, rank)
    # Rows of which little was sent leave coefficients open: single precision needs more to solve for these.
    sizes = products.diagonal(dim1=1, dim2=2).sum(1)
    ridges = torch.where(sent.sum(1) > rank, _RIDGE, _OPEN_RIDGE) * sizes.clamp_min(_RIDGE * float(sizes.max()))
    products = products + ridges.view(-1, 1, 1) * torch.eye(rank, dtype=factor.dtype, device=factor.device)
    solved, _ = torch.linalg.solve_ex(products, (values @ factor).unsqueeze(2))
    return solved.squeeze(2).nan_to_num(0, 0, 0)


def are_signs(gradient: Tensor) -> bool:
    """Report whether all entries have one magnitude."""
    sizes = gradient.abs()
    return bool(sizes.numel() and (sizes >= _SIGNS * sizes.max()).double().mean() > 1 - _PRUNED and sizes.max() > 0)


@torch.enable_grad()
def _fitted(signs: Tensor, rank: int) -> Tensor:
    """Return a matrix of a rank with these signs, by logistic regression."""
    left, sizes, right = torch.linalg.svd(signs.float(), full_matrices=False)
    scale = sizes[:rank].sqrt()
    sides = [left[:, :rank] * scale, right[:rank].T * scale]
    # Logits start at the leading factors of the signs, scaled to a size at which the loss is neither flat nor certain.
    size = (sides[0] @ sides[1].T).abs().mean()
    sides = [(side * (_CONFIDENT / size).sqrt()).requires_grad_() for side in sides]
    optimiser = torch.optim.Adam(sides, lr=_FIT_STEP)
    for _ in range(_FIT_STEPS):
        optimiser.zero_grad()
        torch.nn.functional.softplus(-signs.float() * (sides[0] @ sides[1].T)).mean().backward()
        optimiser.step()
    return (sides[0] @ sides[1].T).detach().double()
