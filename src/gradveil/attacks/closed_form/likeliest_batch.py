"""The likeliest images of a batch behind noise, given separated ones: their errors by the model, then their pixels.

Separated images X predict the errors D of the first layer by a run of the model, without noise. Given D, the gradient
G = a D X + noise is linear in the images, whose likeliest values under the law of natural images follow in closed form,
one cosine coefficient at a time: with the variance v of the coefficient,

    x = (a^2 D^T D / sigma^2 + 1 / v)^-1 a D^T G / sigma^2

The two steps alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.undo_batch_defence import Prior
from gradveil.theory.reconstruction_bound import cosine, from_cosine

_ROUNDS, _IDLE = 12, 3
"""Largest number of rounds, and of rounds in a row that explain the gradient no better."""
_STEP = 0.5
"""Share of the way to the likeliest images."""
_BETTER = 0.999
"""Factor by which the misfit has to fall."""


@dataclass(frozen=True)
class NoisyBatch:
    """One update's gradient [h, n] of the first layer, and what predicts it."""

    gradient: Tensor
    noise: float
    errors: Callable[[Tensor], Tensor]
    """Images [B, n] -> the errors of the layer's outputs [h, B], up to a common scale."""
    prior: Prior
    lower: Tensor
    upper: Tensor
    shape: tuple[int, ...]

    def predicted(self, images: Tensor) -> tuple[Tensor, float]:
        """Return the errors [h, B] to scale, and the misfit of the gradient of images [B, n]."""
        errors = self.errors(images)
        made = errors @ images
        scale = (made * self.gradient).sum() / made.square().sum().clamp_min(1e-300)
        misfit = (scale * made - self.gradient).norm() / self.gradient.norm().clamp_min(1e-300)
        return scale * errors, float(misfit)

    def likeliest(self, images: Tensor) -> Tensor:
        """Alternate from images [B, n]; return those that explain the gradient best."""
        best, state, least, idle = images, self.clamp(images), torch.inf, 0
        for _ in range(_ROUNDS):
            errors, misfit = self.predicted(state)
            idle = 0 if misfit < _BETTER * least else idle + 1
            if misfit < least:
                best, least = state, misfit
            if idle == _IDLE:
                break
            state = self.clamp(torch.lerp(state, self._given(errors), _STEP))
        return best

    def clamp(self, images: Tensor) -> Tensor:
        """Cut images to valid values."""
        return torch.clamp(images.nan_to_num(0.0), self.lower, self.upper)

    def _given(self, errors: Tensor) -> Tensor:
        """Return the likeliest images for these errors."""
        width = self.upper - self.lower
        usual = self.lower + width * self.prior.mean.flatten().to(width)
        # In units of the range of values, and relative to the mean image: D^T (G - D 1 mean^T) / width. The errors hold
        # the scale a.
        rest = errors.mT @ (self.gradient - errors.sum(1, keepdim=True) * usual) / width
        squares, turn = torch.linalg.eigh(errors.mT @ errors)
        noise = (self.noise / width.mean()).square()
        ridge = noise / self.prior.spread.flatten().to(width).square().clamp_min(1e-12)
        pictured = len(self.shape) == 3
        # The eigenvectors of D^T D solve the equations of all coefficients: only the ridge sigma^2 / v differs among
        # them.
        mixed = turn.mT @ (cosine(rest.unflatten(1, self.shape)).flatten(1) if pictured else rest)
        coefficients = turn @ (mixed / (squares.clamp_min(0).unsqueeze(1) + ridge).clamp_min(1e-300))
        back = from_cosine(coefficients.unflatten(1, self.shape)).flatten(1) if pictured else coefficients
        return usual + width * back
