"""How likely a sentence makes a noisy gradient of the first layer.

A linear layer's gradient G [m, d] is D X^T plus noise, where the rows of D are unknown and normal. With D's covariance
and the noise's variance fitted, the log likelihood of the inputs X [d, T] of T tokens is, but for a constant,
-m / 2 (log det S + (d - T) log((tr G^T G - tr S) / (d - T))) with S = Q^T G^T G Q for an orthonormal basis Q of X
(Tipping and Bishop 1999, "Probabilistic Principal Component Analysis", JRSS B 61, has it for a free basis).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.sequences.sentence_likelihood import SentenceLikelihood
from gradveil.attacks.sequences.token_span import NoisySpan

_CLEAR = 200.0
"""Log posterior by which the words of a sentence exceed all others where no other sentence needs to be tried."""


@dataclass(frozen=True)
class SentenceEvidence(SentenceLikelihood):
    """The likelihood of sentences by the inner products of a noisy gradient's columns."""

    span: NoisySpan
    starts: ClassVar[int] = 6

    def settled(self, columns: Tensor) -> bool:
        """Report whether each word is far likelier than any other at its place, as behind weak noise."""
        posteriors = [self.log_posteriors(columns, place) for place in self.changeable(columns)]
        return all(bool(one.topk(2).values.diff().abs() > _CLEAR) for one in posteriors)

    def log_likelihoods(self, columns: Tensor) -> Tensor:
        """Return the log likelihoods [N] of sentences, given as columns [N, T] of the candidates.

        Each variance and covariance that is fitted costs 1 (Akaike); inputs that depend on each other have none.
        """
        rows = torch.arange(columns.shape[1]), columns
        inputs = self.inputs[rows]
        shown, tokens = self._shown[rows] @ inputs.mT, columns.shape[1]
        factors, failed = torch.linalg.cholesky_ex(inputs @ inputs.mT)
        trace = torch.cholesky_solve(shown, factors).diagonal(dim1=-2, dim2=-1).sum(-1)
        determinant = torch.logdet(shown) - 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        free, fitted = self._free(tokens), tokens * (tokens + 1) / 2
        likelihoods = (
            -self.span.rows / 2 * (determinant + free * ((self._products.trace() - trace) / free).log()) - fitted
        )
        return torch.where(failed == 0, likelihoods, -torch.inf).nan_to_num(-torch.inf)

    def exchanged(self, columns: Tensor, place: int) -> Tensor:
        """Return the log likelihood [K], up to a constant, of a sentence with each candidate at a place."""
        others = torch.arange(len(columns)) != place
        basis = torch.linalg.qr(self.inputs[torch.arange(len(columns))[others], columns[others]].T)[0]
        shown = self._products @ basis
        inside = self.inputs[place] @ basis
        own = self.inputs[place] - inside @ basis.T
        products = self._shown[place] - inside @ shown.T
        tiny, free = torch.finfo(own.dtype).tiny, self._free(len(columns))
        lengths = own.square().sum(1).clamp_min(tiny)
        gains, crossed = (products * own).sum(1) / lengths, products @ basis / lengths.sqrt().unsqueeze(1)
        # The determinant of S grows by what the new direction has besides its products with the others.
        besides = gains - (crossed * torch.linalg.solve(basis.T @ shown, crossed.T).T).sum(1)
        left = self._products.trace() - (basis.T @ shown).trace() - gains
        return -self.span.rows / 2 * (besides.clamp_min(tiny).log() + free * left.clamp_min(tiny).log())

    def _free(self, tokens: int) -> int:
        """Return the number of directions that noise alone fills."""
        return self.inputs.shape[-1] - tokens

    @cached_property
    def _products(self) -> Tensor:
        return self.span.products / self.span.products.trace()

    @cached_property
    def _shown(self) -> Tensor:
        return self.inputs @ self._products
