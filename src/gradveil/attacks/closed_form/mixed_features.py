"""Unmix the inputs of the last layer: one for each example of a batch, from that layer's gradient and the labels.

With the inputs H [B, F] of the last layer and the errors E [B, K] of its outputs, the layer's gradient is G = E^T H,
and that of its bias the sum of E. The errors follow from the inputs,

    E = s (softmax(H W^T + b) - labels) / B,

with s < 1 behind a clip. H lies in the span of the rows of G, H = A R, so that B^2 numbers are unknown, and s. There
are (K - 1) (B + 1) equations: enough for batches smaller than the classes. They are solved by the damped steps of
Levenberg and Marquardt. Without noise the misfit falls to the rounding of the update, and where it does not, there is
no answer. The errors of an example add up to zero, so a column of G that does not shows noise or pruning before
anything is solved. Examples of one label may change places.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gradveil.core.noise import Key

_STARTS, _STEPS = 4, 150
_JITTER = 0.1
"""Random part of the first guess. Without it, examples of one label would stay equal."""
_MOST = 32
"""Largest batch: the equations take (K - 1) B^3 numbers."""
_ROUNDING = 4.0
"""Misfit and smallest part of a gradient, in units of its precision, up to which rounding explains them."""
_ADDED = 100.0
"""Sum of a column, in these units, from which something was added or cut away."""


def mixed_features(gradient: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor], labels: Tensor, key: Key) -> Tensor:
    """Return the inputs [B, F] of a layer, given its gradient and its parameters, weight and bias each; else NaN.

    >>> generator = Key(0).generator()
    >>> weight, bias, inputs = (torch.randn(shape, generator=generator) for shape in ((5, 8), (5,), (3, 8)))
    >>> labels = torch.tensor([0, 2, 2])
    >>> errors = ((inputs @ weight.T + bias).softmax(1) - one_hot(labels, 5)) / 3
    >>> found = mixed_features((errors.T @ inputs, errors.sum(0)), (weight, bias), labels, Key(0))
    >>> bool((torch.cdist(found, inputs).amin(1) < 1e-3).all())
    True
    """
    precision = torch.finfo(gradient[0].dtype).eps
    (of_weight, of_bias), (weight, bias) = ([value.double() for value in pair] for pair in (gradient, layer))
    equations = _Equations(of_weight, of_bias, weight, bias, labels)
    found = torch.full((len(labels), gradient[0].shape[1]), torch.nan, device=labels.device).to(gradient[0])
    if not equations.exact(precision):
        return found
    draws = key.generator()
    for _ in range(_STARTS):
        inputs, misfit = equations.solved(draws)
        if misfit < _ROUNDING * precision:
            return inputs.to(found)
    return found


class _Equations:
    """The equations of one batch."""

    def __init__(self, of_weight: Tensor, of_bias: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> None:
        self.of_weight, self.of_bias, self.bias = of_weight, of_bias, bias
        self.count = len(labels)
        self.labels = one_hot(labels, len(bias)).double()
        self.finite = bool(of_weight.isfinite().all()) and bool(of_bias.isfinite().all())
        if self.finite and 1 < self.count < min(*of_weight.shape, _MOST + 1):
            _, self.sizes, rows = torch.linalg.svd(of_weight, full_matrices=False)
            self.rows = rows[: self.count]
            self.left, self.outputs = of_weight @ self.rows.mT, weight @ self.rows.mT

    def exact(self, precision: float) -> bool:
        """Whether the gradient is one of this many independent examples, and nothing was added or cut away."""
        if not self.finite or not 1 < self.count < min(*self.of_weight.shape, _MOST + 1):
            return False
        added = self.of_weight.sum(0).norm() / self.of_weight.norm().clamp_min(torch.finfo(torch.double).tiny)
        return bool(added < _ADDED * precision) and bool(
            self.sizes[self.count - 1] > _ROUNDING * precision * self.sizes[0]
        )

    def _errors(self, share: Tensor, log_scale: Tensor) -> Tensor:
        outputs = share @ self.outputs.mT + self.bias
        return log_scale.exp() * (outputs.softmax(1) - self.labels) / self.count

    def _misfit(self, unknown: Tensor) -> Tensor:
        """Return what the equations miss, relative to the gradients' lengths."""
        share = unknown[:-1].view(self.count, self.count)
        errors = self._errors(share, unknown[-1])
        of_weight, of_bias = errors.mT @ share - self.left, errors.sum(0) - self.of_bias
        return torch.cat([of_weight.flatten() / self.left.norm(), of_bias / self.of_bias.norm().clamp_min(1e-12)])

    def _guess(self, draws: torch.Generator) -> Tensor:
        """Guess the inputs by least squares, as if all examples had the mean probabilities."""
        mean = (self.of_bias + self.labels.mean(0)).clamp_min(1e-6)
        errors = (mean / mean.sum() - self.labels) / self.count
        ridge = 1e-4 * torch.linalg.matrix_norm(errors, 2).square() * torch.eye(self.count).to(errors)
        share = torch.linalg.solve(errors @ errors.mT + ridge, errors @ self.left)
        drawn = torch.randn(share.shape, generator=draws, dtype=torch.double).to(share)
        return torch.cat([(share + _JITTER * share.norm() / self.count * drawn).flatten(), share.new_zeros(1)])

    def solved(self, draws: torch.Generator) -> tuple[Tensor, float]:
        """Return inputs [B, F] from one start, and the length of their misfit."""
        unknown, damping = self._guess(draws), 1e-3
        missing = self._misfit(unknown)
        for _ in range(_STEPS):
            slopes = torch.func.jacrev(self._misfit)(unknown)
            squares, slope = slopes.mT @ slopes, slopes.mT @ missing
            while damping < 1e8:
                ridge = (damping * squares.diagonal().clamp_min(1e-12)).diag()
                tried = unknown - torch.linalg.solve(squares + ridge, slope)
                left = self._misfit(tried)
                if left.norm() < missing.norm():
                    break
                damping *= 4
            else:
                break
            gained = float(1 - left.norm() / missing.norm())
            unknown, missing, damping = tried, left, max(damping / 5, 1e-15)
            if gained < 1e-9:
                break
        return unknown[:-1].view(self.count, self.count) @ self.rows, float(missing.norm())
