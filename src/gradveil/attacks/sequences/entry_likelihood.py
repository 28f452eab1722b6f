"""How likely a sentence makes the entries of a pruned gradient of the first layer, or the signs of all entries.

A linear layer's gradient is D X^T for the inputs X of the tokens. Each row of D has as many unknowns as there are
tokens, and is seen by all entries of its row that were sent: with the right words these hold exactly, and with wrong
ones they don't. Signs say on which side of zero each entry lies: with the right words one row of D parts all signs of
its row. Rows are fitted one by one, by least squares over what was sent, or by logistic regression on the signs
(Laplace's method gives the evidence: MacKay 1992, "Bayesian interpolation", Neural Computation 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.sequences.sentence_likelihood import SentenceLikelihood

_ROWS, _ROUGH_ROWS = 600, 128
"""Rows that are fitted: for single sentences, and where many are compared."""
_COMPARED = 3000
"""Most rows that are compared with each other."""
_ALIKE = 0.7
"""Share of signs that agree, less those that differ, above which two rows count as one."""
_SPARE = 4
"""Entries that a row must have besides one for each token of the longest sentence."""
_LEAST_ROWS = 64
"""Rows below which a search takes long and seldom ends at the true sentence."""
_RIDGE = 1e-5
_EXACT = 1e-9
"""Share of the squares of what was sent that rounding leaves."""
_FITS = 1e-4
"""Share of the squares of what was sent that is left, or of signs that are wrong, where a sentence holds."""
_LOGIT = 10.0
"""Standard deviation of the logits before signs are seen."""
_WIDE_LOGIT = 300.0
"""The same where it is asked whether rows part all signs: the smaller one leaves the nearest on the wrong side."""
_PARTED = 8
"""Signs of a row per token below which wrong words may part them as well: any 2 signs per token often come apart."""
_STEPS, _STOP = 30, 1e-4
"""Newton steps of a logistic regression, which ends where the objective falls by a smaller share."""
_LEFT = 1e-4
"""Least share of a candidate's squares that the other words are taken to leave."""
_SHORTLIST = 24
"""Candidates of a place whose products with the other words are computed row by row."""


@dataclass(frozen=True)
class _Fit:
    """The rows' coefficients [m, T], with the gradient [m, d] and curvature [m, d] of the log likelihood by entry."""

    coefficients: Tensor
    slopes: Tensor
    curvatures: Tensor
    factors: Tensor
    """Cholesky factors [m, T, T] of the coefficients' precisions."""
    log_likelihood: float


@dataclass(frozen=True)
class EntryLikelihood(SentenceLikelihood):
    """The likelihood of sentences by entries that were sent, or by signs."""

    values: Tensor
    """Rows [m, d]: entries that were sent and zeros, or signs."""
    signs: bool
    starts: ClassVar[int] = 1
    _last: dict[tuple[int, ...], _Fit] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The fit of the sentence that was fitted last."""

    @property
    def rough(self) -> EntryLikelihood:
        """The likelihood by fewer rows."""
        return self._rough

    @cached_property
    def _rough(self) -> EntryLikelihood:
        few = _every(self.values, _ROUGH_ROWS) if self.signs else self.values[:_ROUGH_ROWS]
        return replace(self, values=few)

    @cached_property
    def inputs(self) -> Tensor:
        """Return the first layer's inputs [P, K, d] of all candidates."""
        return super().inputs.float()

    @cached_property
    def _sent(self) -> Tensor:
        return (self.values != 0).to(self.values.dtype)

    def settled(self, columns: Tensor) -> bool:
        """Report whether all that was sent holds."""
        fit, inputs = self._fit(columns), self._inputs(columns)
        if self.signs:
            if inputs.shape[1] < _PARTED * len(inputs):
                return False
            fit = self._of_signs(inputs, fit.coefficients, _WIDE_LOGIT)
            margins = self.values * (fit.coefficients @ inputs)
            return int(torch.le(margins, 0).sum()) < _FITS * margins.numel()
        return float(fit.slopes.square().sum()) < _FITS * float(self.values.square().sum())

    def log_likelihoods(self, columns: Tensor) -> Tensor:
        """Return the log likelihoods [N] of sentences, given as columns [N, T] of the candidates."""
        found = [self._fit(one).log_likelihood for one in columns]
        return torch.tensor(found, dtype=torch.float64, device=columns.device)

    def exchanged(self, columns: Tensor, place: int) -> Tensor:
        """Return the log likelihood [K], up to a constant, of a sentence with each candidate at a place.

        The other words are fitted without it; a candidate's coefficients are those of one Newton step.
        """
        others = torch.arange(len(columns)) != place
        inputs, candidates = self._inputs(columns)[others], self.inputs[place]
        fit = self._regressed(inputs, self._fit(columns).coefficients[:, others])
        basis = torch.linalg.qr(inputs.T)[0]
        slopes = fit.slopes @ candidates.T
        tiny = torch.finfo(slopes.dtype).tiny
        own = candidates - (candidates @ basis) @ basis.T
        gains = self._gains(fit, slopes, fit.curvatures @ own.square().T + tiny)
        best = gains.topk(min(_SHORTLIST, len(gains))).indices
        # What the other words explain of a candidate differs by row: computed for the best.
        crossed = (fit.curvatures.unsqueeze(1) * inputs) @ candidates[best].T
        squares = fit.curvatures @ candidates[best].square().T
        explained = torch.linalg.solve_triangular(fit.factors, crossed, upper=False).square().sum(1)
        exact = self._gains(fit, slopes[:, best], (squares - explained).clamp_min(_LEFT * squares) + tiny)
        return torch.full_like(gains, -torch.inf).index_copy(0, best, exact)

    def _gains(self, fit: _Fit, slopes: Tensor, curvatures: Tensor) -> Tensor:
        """Return the log likelihood [K] that one more word brings, with its slope and curvature in each row [m, K]."""
        if self.signs:
            precision = (fit.coefficients.shape[1] + 1) / _LOGIT**2
            steps = slopes.square() / (curvatures + precision) - torch.log1p(curvatures / precision)
            return steps.sum(0) / 2
        left = fit.slopes.square().sum() - (slopes.square() / curvatures).sum(0)
        return -self._sent.sum() / 2 * left.clamp_min(_EXACT * float(self.values.square().sum())).log()

    def _inputs(self, columns: Tensor) -> Tensor:
        return self.inputs[torch.arange(len(columns)), columns]

    def _fit(self, columns: Tensor) -> _Fit:
        key = tuple(columns.tolist())
        if key not in self._last:
            fit = self._regressed(self._inputs(columns), None)
            self._last.clear()
            self._last[key] = fit
        return self._last[key]

    def _regressed(self, inputs: Tensor, start: Tensor | None) -> _Fit:
        return self._of_signs(inputs, start) if self.signs else self._of_entries(inputs)

    def _of_entries(self, inputs: Tensor) -> _Fit:
        """Fit rows by least squares; each coefficient costs half the log of the row's entries (Schwarz)."""
        tokens, entries = len(inputs), self._sent.sum(1)
        products = self._products(self._sent, inputs)
        sizes = products.diagonal(dim1=1, dim2=2).mean()
        factors = torch.linalg.cholesky_ex(products + _RIDGE * sizes * torch.eye(tokens, device=inputs.device))[0]
        coefficients = torch.cholesky_solve((self.values @ inputs.T).unsqueeze(2), factors).squeeze(2)
        rest = self._sent * (self.values - coefficients @ inputs)
        left, whole = float(rest.square().sum()), float(self.values.square().sum())
        log_likelihood = -float(entries.sum()) / 2 * math.log(max(left / whole, _EXACT))
        log_likelihood -= tokens / 2 * float(entries.log().sum())
        return _Fit(coefficients, rest, self._sent, factors, log_likelihood)

    def _of_signs(self, inputs: Tensor, start: Tensor | None, logit: float = _LOGIT) -> _Fit:
        """Fit rows by logistic regression with normal coefficients, from where the sentence was fitted if it was."""
        tokens, rows = len(inputs), len(self.values)
        precision = tokens / logit**2
        coefficients = inputs.new_zeros(rows, tokens) if start is None else start
        loss = math.inf
        for _ in range(_STEPS):
            margins = self.values * (coefficients @ inputs)
            wrong = torch.sigmoid(-margins)
            slopes, curvatures = self.values * wrong, wrong * (1 - wrong)
            products = self._products(curvatures, inputs) + precision * torch.eye(tokens, device=inputs.device)
            factors = torch.linalg.cholesky_ex(products)[0]
            penalty = precision / 2 * coefficients.square().sum()
            last, loss = loss, float(torch.nn.functional.softplus(-margins).sum() + penalty)
            if abs(last - loss) < _STOP * loss:
                break
            steps = (slopes @ inputs.T - precision * coefficients).unsqueeze(2)
            coefficients = coefficients + torch.cholesky_solve(steps, factors).squeeze(2)
        volume = 2 * float(factors.diagonal(dim1=1, dim2=2).log().sum()) - rows * tokens * math.log(precision)
        return _Fit(coefficients, slopes, curvatures, factors, -loss - volume / 2)

    def _products(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the products [m, T, T] of inputs [T, d] under each row's weights."""
        tokens = len(inputs)
        pairs = (inputs.unsqueeze(1) * inputs).flatten(0, 1)
        return (weights @ pairs.T).view(-1, tokens, tokens)


def entry_rows(gradients: Sequence[Tensor], longest: int, signs: bool) -> Tensor | None:
    """Return the rows of gradients that can tell sentences up to a length apart; None where too few can.

    Of pruned rows, those with the most entries come first.
    """
    rows = torch.cat([one.float() / one.norm().clamp_min(torch.finfo(one.dtype).tiny) for one in gradients])
    if signs:
        return _every(_distinct(_every(rows.sign(), _COMPARED)), _ROWS)
    rows = rows[(rows != 0).sum(1) > longest + _SPARE]
    if len(rows) < _LEAST_ROWS:
        return None
    rows = rows[(rows != 0).sum(1).argsort(descending=True)[:_ROWS]]
    return rows / rows.norm(dim=1, keepdim=True)


def _distinct(rows: Tensor) -> Tensor:
    """Leave out rows whose signs are nearly those of another, or the opposite.

    Errors that have few directions make rows that follow from each other. Counted apart they would outweigh all else
    that is known of the words.
    """
    alike = (rows @ rows.T).abs() > _ALIKE * rows.shape[1]
    kept = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for row in range(len(rows)):
        if kept[row]:
            kept[row + 1 :] &= ~alike[row, row + 1 :]
    return rows[kept]


def _every(rows: Tensor, most: int) -> Tensor:
    """Return every n-th row, at most so many."""
    return rows[:: math.ceil(len(rows) / most)]
