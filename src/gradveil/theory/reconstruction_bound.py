"""The Bayesian Cramér-Rao bound of a reconstruction's error, and a prior of images for it.

The prior: the coefficients of an image's discrete cosine transform are independent and normal, with the variances of
public images (a few low frequencies hold nearly all of it). Of all laws with these variances it has the least
information. Bounds from it hold for attackers who know only these variances; others may do better.

Of inputs x with a prior, an attacker sees g(x) + N(0, diag(s_i^2)). For every estimate x' of the d entries of x

    E ||x' - x||^2 >= tr((F + P)^-1) >= d^2 / (tr F + tr P),    F = E[J^T diag(1 / s_i^2) J],    J = dg/dx,

with P the prior's information E[grad log p (grad log p)^T] (van Trees 1968; Theorem 1 of Chen, Gürsoy and Lei 2024,
"Optimal Defenses Against Gradient Reconstruction Attacks"). Expectations are over the prior and the noise. All bounds
here are divided by d: they are mean squared errors of an entry, in the units of the model's inputs.

What to keep in mind:

- It holds if g is absolutely continuous in x. The gradient of a network with ReLU or max-pooling is not: it jumps when
  a unit switches, and J does not contain the jumps. Use `rate_bound` for such models.
- It holds for noise whose variances do not depend on x. Variances that do (`optimal-noise` is fitted to the batch)
  reveal x themselves: F lacks a term, and the result is not a bound.
- It holds for a prior whose density vanishes at its borders. P of images is unknown; both estimates below are models.
- The paper's Eq. 1 is d^2 / (tr F + d lambda) with lambda the largest eigenvalue of P. Since tr P <= d lambda, the one
  here is at least as sharp; pass `prior_trace = d * lambda` for theirs. For a defence that draws a variant z, Eq. 2
  takes E_z tr F_z.
- It assumes known labels and a single update: n independent updates of the same x have n times the F.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import fail

ROUNDING = 1 / 12 / 255**2
"""Least variance of a coefficient, in pixels of [0, 1]: that of rounding to eight bits."""


@dataclass(frozen=True)
class Spectrum:
    """Variances [C, H, W] of the orthonormal cosine coefficients of images."""

    variances: Tensor

    @property
    def variance(self) -> float:
        """The mean squared error of the mean image, a baseline without the update."""
        return float(self.variances.mean())

    def groups(self) -> Tensor:
        """Group the coefficients by falling variance, in groups of 1, 1, 2, 4, 8, ...: masks [G, C, H, W]."""
        order = self.variances.flatten().argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        # Rank 0 is alone, ranks 1; 2 and 3; 4 to 7; ... follow: frexp counts the bits of a number.
        group = torch.frexp(rank.double())[1].reshape(self.variances.shape)
        return torch.stack([group == number for number in range(int(group.max()) + 1)])

    def information(self) -> Tensor:
        """Return the trace [G] of the prior's information over each group: the sum of 1 / variance."""
        return (self.groups() / self.variances).flatten(1).sum(1)


def spectrum(images: Tensor) -> Spectrum:
    """Estimate the variances from public images [N, C, H, W] in pixels of [0, 1].

    >>> flat = torch.tensor([0.25, 0.75]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    >>> [round(v, 3) for v in spectrum(flat).variances.flatten().tolist()]
    [0.5, 0.0, 0.0, 0.0]
    """
    if len(images) < 2:
        raise fail("spectrum.images", f"are {len(images)}, which have no variance", "give at least two public images")
    coefficients = cosine(images.double())
    return Spectrum(coefficients.var(0).clamp(min=ROUNDING))


def cosine(images: Tensor) -> Tensor:
    """Transform images [..., H, W] to their orthonormal cosine coefficients (DCT-II)."""
    rows, columns = (_basis(side, images) for side in images.shape[-2:])
    return rows @ images @ columns.mT


def from_cosine(coefficients: Tensor) -> Tensor:
    """Transform coefficients [..., H, W] back to images: the inverse, and the transpose, of `cosine`."""
    rows, columns = (_basis(side, coefficients) for side in coefficients.shape[-2:])
    return rows.mT @ coefficients @ columns


def _basis(side: int, like: Tensor) -> Tensor:
    """Return C[k, n] = sqrt((1 if k == 0 else 2) / N) cos(pi (n + 1/2) k / N)."""
    places = torch.arange(side, dtype=torch.float64)
    basis = math.sqrt(2 / side) * torch.cos(math.pi * (places + 0.5) * places[:, None] / side)
    basis[0] /= math.sqrt(2)
    return basis.to(like)


def information(jacobian: Tensor, variances: Tensor) -> Tensor:
    """Compute J^T diag(1 / s_i^2) J [d, d] of a Jacobian [..., coordinates, d], averaged over the leading dimensions.

    A coordinate with infinite variance (pruned) contributes nothing; one with variance 0 infinity, if it depends on x.
    """
    weights = _weights(jacobian.square().sum(-1), variances)
    weighted = torch.where(jacobian == 0, 0.0, weights.unsqueeze(-1) * jacobian)
    fisher = jacobian.mT @ weighted
    return fisher.flatten(0, -3).mean(0) if fisher.dim() > 2 else fisher


def information_trace(squares: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
    """Compute tr(J^T diag(1 / s_i^2) J) = sum_i ||dg_i/dx||^2 / s_i^2 from squared row norms.

    With the estimates of `squared_row_norms` it is unbiased. Infinite where a coordinate depends on x and has no noise.
    """
    terms = [_weighted(value, variances[name]).sum() for name, value in squares.items()]
    return torch.stack(terms).sum()


def gaussian_information(examples: Tensor, ridge: float = 0.0) -> Tensor:
    """Estimate P by the inverse covariance [d, d] of public examples [N, d], plus `ridge` on the diagonal.

    This is the information of the *normal* law, the least of all laws with this covariance. For other data the bound is
    too high: it holds for attackers who know only mean and covariance. A ridge widens the law and raises the bound.
    """
    count, entries = examples.shape
    centred = examples - examples.mean(0)
    covariance = centred.mT @ centred / max(1, count - 1)
    covariance = covariance + ridge * torch.eye(entries).to(covariance)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if (count <= entries and not ridge) or bool(failed):
        what = f"{count} examples do not determine the covariance of {entries} entries"
        raise fail("gaussian_information.examples", what, "give more examples than entries, or a ridge above 0")
    return torch.cholesky_inverse(factor)


def smoothed_information(examples: Tensor, width: float, generator: torch.Generator, draws: int = 4096) -> Tensor:
    """Estimate P [d, d] of public examples [N, d] that are smoothed by N(0, width^2): a mixture of normal laws.

    The score at x is sum_j w_j (x_j - x) / width^2, with w_j the share of the mixture's density at x that comes from
    example j; its second moment is averaged over draws from the mixture. A small width gives much information, and so a
    low bound.
    """
    count, entries = examples.shape
    chosen = torch.randint(count, (draws,), generator=generator)
    noise = torch.randn((draws, entries), generator=generator, dtype=examples.dtype)
    points = examples[chosen] + width * noise.to(examples.device)
    # Densities in proportion to exp(-|x - x_j|^2 / (2 width^2)): the softmax divides them by their sum.
    weights = (-(torch.cdist(points, examples) / width).square() / 2).softmax(-1)
    score = (weights @ examples - points) / width**2
    return score.mT @ score / draws


def error_bound(fisher: Tensor, prior: Tensor) -> Tensor:
    """Return tr((F + P)^-1) / d, the sharper bound, from the two matrices."""
    factor, failed = torch.linalg.cholesky_ex(fisher + prior)
    if bool(failed):
        what = "F + P is singular or not finite, and says of some direction nothing or everything"
        raise fail("error_bound", what, "use trace_bound, or a prior with information in every direction")
    return torch.cholesky_inverse(factor).diagonal().mean()


def trace_bound(fisher_trace: Tensor, prior_trace: Tensor, entries: int) -> Tensor:
    """Return d / (tr F + tr P): never above `error_bound`, equal where F + P is a multiple of the identity.

    It is 0 where a coordinate that depends on the inputs is sent without noise.

    >>> trace_bound(torch.tensor(6.0), torch.tensor(2.0), entries=4)
    tensor(0.5000)
    """
    return entries / (fisher_trace + prior_trace)


def block_bound(fisher: Tensor, prior: Tensor, sizes: Tensor) -> Tensor:
    """Return sum_g n_g^2 / (tr F_g + tr P_g) / d for traces over groups of n_g directions of any orthonormal basis.

    It lies between `trace_bound` (one group) and `error_bound`: a diagonal entry of an inverse is at least the inverse
    of the entry, and the mean of inverses in a group at least the inverse of the mean. It needs only traces, which
    random directions of each group can estimate.

    >>> block_bound(torch.tensor([6.0, 0.0]), torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0]))
    tensor(0.6250)
    """
    return (sizes.square() / (fisher + prior)).sum() / sizes.sum()


def rate_bound(variances: Tensor, nats: Tensor) -> Tensor:
    """Return the smallest mean squared error for normal x if the update contains at most `nats` of information.

    That is sum_k min(t, v_k) / d with the water level t at which sum_k max(0, log(v_k / t)) / 2 is the number of nats:
    the distortion-rate function (Cover and Thomas 2006, sec. 10.3.3). It needs no derivative of g. g + N(0, s^2)
    contains at most E ||g - c||^2 / (2 s^2) nats, for any c that does not depend on x.

    >>> rate_bound(torch.ones(4), torch.tensor(2.0))
    tensor(0.3679)
    """
    top = variances.log().max()
    # At the level top - 2 nats the largest variance alone takes all nats: t lies above it.
    low, high = top - 2 * nats - 1, top
    for _ in range(60):
        level = (low + high) / 2
        enough = (variances.log() - level).clamp(min=0).sum() / 2 > nats
        low, high = torch.where(enough, level, low), torch.where(enough, high, level)
    return torch.minimum(variances, high.exp()).mean()


def _weights(squares: Tensor, variances: Tensor) -> Tensor:
    return torch.where(squares > 0, 1 / variances, 0.0)


def _weighted(squares: Tensor, variances: Tensor) -> Tensor:
    return torch.where(squares > 0, squares / variances, 0.0)
