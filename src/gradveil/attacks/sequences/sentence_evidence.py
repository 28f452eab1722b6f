"""How likely a sentence makes a noisy gradient of the first layer, and the search for the likeliest one.

A linear layer's gradient G [m, d] is D X^T plus noise, where the rows of D are unknown and normal. With D's covariance
and the noise's variance fitted, the log likelihood of the inputs X [d, T] of T tokens is, but for a constant,
-m / 2 (log det S + (d - T) log((tr G^T G - tr S) / (d - T))) with S = Q^T G^T G Q for an orthonormal basis Q of X
(Tipping and Bishop 1999, "Probabilistic Principal Component Analysis", JRSS B 61, has it for a free basis). All words
are judged together: one that other words explain counts only by what it adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.sentence_search import LogPrior
from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.attacks.sequences.token_span import NoisySpan
from gradveil.core.tree import Tensors
from gradveil.nn.token_layout import TokenLayout

_STARTS = 6
"""Sentences that are improved of those of all lengths."""
_CLEAR = 200.0
"""Log posterior by which the words of a sentence exceed all others where no other sentence needs to be tried."""
_FAR = 16
"""Most places that a word moves."""
_TOGETHER = 64
"""Sentences that are measured at once."""
_APART = 1e-9
"""Least share of an input's square that the other words must leave."""
_SWEEPS = 20
"""Most times that all words of a sentence are exchanged in turn."""


@dataclass(frozen=True)
class SentenceEvidence:
    """The log posterior of single sentences whose words are among the candidates of their positions."""

    model: nn.Module
    layout: TokenLayout
    params: Tensors
    span: NoisySpan
    candidates: Candidates
    start: int | None
    end: int | None
    prior: LogPrior | None

    @cached_property
    def inputs(self) -> Tensor:
        """Return the first layer's inputs [P, K, d] of all candidates."""
        rows = [self.layout.first_inputs(self.model, self.params, *one) for one in enumerate(self.candidates.words)]
        return torch.stack(rows).double()

    def likeliest(self) -> Tensor:
        """Return the words [T] of the likeliest sentence that is found, of any length."""
        starts = [self._of_length(length, None) for length in self._lengths()]
        best = self.improved(max(starts, key=self.log_posterior))
        if self._clear(best):
            return self._words(best)
        best = self._best_of(starts)
        while True:
            # Other lengths, with what is known of the words by now.
            other = self._best_of([self._of_length(length, best) for length in self._lengths() if length != len(best)])
            if not self.log_posterior(other) > self.log_posterior(best):
                return self._words(best)
            best = other

    @torch.no_grad()
    def _clear(self, columns: Tensor) -> bool:
        """Report whether each word is far likelier than any other at its place, as behind weak noise."""
        posteriors = [self._log_posteriors(columns, place) for place in self._changeable(columns)]
        return all(bool(one.topk(2).values.diff().abs() > _CLEAR) for one in posteriors)

    def _best_of(self, sentences: list[Tensor]) -> Tensor:
        """Return the likeliest of the most likely sentences when they are improved."""
        likely = sorted(sentences, key=self.log_posterior)[-_STARTS:]
        return max(map(self.improved, likely), key=self.log_posterior)

    @torch.no_grad()
    def log_posterior(self, columns: Tensor) -> float:
        """Return the log of likelihood and prior of a sentence, given as columns [T] of the candidates."""
        inputs = self.inputs[torch.arange(len(columns)), columns]
        likelihoods = self._log_likelihoods(
            self._shown[torch.arange(len(columns)), columns] @ inputs.T, inputs @ inputs.T
        )
        return float(likelihoods + self._log_priors(self._words(columns).unsqueeze(0)))

    @torch.no_grad()
    def improved(self, columns: Tensor) -> Tensor:
        """Exchange and move single words of a sentence, as long as that makes it likelier."""
        for _ in range(_SWEEPS):
            before, columns = columns, columns.clone()
            for place in self._changeable(columns):
                columns[place] = int(self._log_posteriors(columns, place).argmax())
            if torch.equal(before, columns):
                columns = self._moved(columns)
                if torch.equal(before, columns):
                    break
        return columns

    def _changeable(self, columns: Tensor) -> range:
        """Return the places between the start and the end."""
        return range(self.start is not None, len(columns) - (self.end is not None))

    def _moved(self, columns: Tensor) -> Tensor:
        """Return the likeliest sentence that differs by two words that change places, or by one that goes elsewhere."""
        words, places = self._words(columns), self._changeable(columns)
        orders = [list(range(len(words)))]
        for one in places:
            for other in places:
                if one == other or abs(one - other) > _FAR:
                    continue
                moved = [place for place in orders[0] if place != one]
                moved.insert(other, one)
                orders.append(moved)
                if one < other:
                    swapped = orders[0].copy()
                    swapped[one], swapped[other] = other, one
                    orders.append(swapped)
        order, tokens = torch.tensor(orders), len(words)
        places = torch.arange(tokens)
        listed = self.candidates.words[:tokens] == words.view(-1, 1, 1)
        listed &= torch.isfinite(self.candidates.residuals[:tokens])
        listed[places, places, columns] = True
        # The column of every word at every place. Only words that are candidates at their new places move there.
        placed = listed.long().argmax(-1)
        order = order[listed.any(-1)[order, places].all(-1)]
        log_posteriors = []
        for part in order.split(_TOGETHER):
            rows = places, placed[part, places]
            likelihoods = self._log_likelihoods(self._shown[rows] @ self.inputs[rows].mT, self._squares(rows))
            log_posteriors.append(likelihoods + self._log_priors(words[part]))
        return placed[order[int(torch.cat(log_posteriors).argmax())], places]

    def _squares(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return the products [..., T, T] of the inputs of sentences with each other."""
        return self.inputs[rows] @ self.inputs[rows].mT

    def _log_posteriors(self, columns: Tensor, place: int) -> Tensor:
        """Return the log posterior [K], up to a constant, of a sentence with each candidate at a place."""
        others = torch.arange(len(columns)) != place
        basis = torch.linalg.qr(self.inputs[torch.arange(len(columns))[others], columns[others]].T)[0]
        shown = self._products @ basis
        inside = self.inputs[place] @ basis
        own = self.inputs[place] - inside @ basis.T
        products = self._shown[place] - inside @ shown.T
        lengths = own.square().sum(1)
        gains, crossed = (products * own).sum(1) / lengths, products @ basis / lengths.sqrt().unsqueeze(1)
        # The determinant of S grows by what the new direction has besides its products with the others.
        besides = gains - (crossed * torch.linalg.solve(basis.T @ shown, crossed.T).T).sum(1)
        left = self._products.trace() - (basis.T @ shown).trace() - gains
        tiny, free = torch.finfo(gains.dtype).tiny, self._free(len(columns))
        evidence = -self.span.rows / 2 * (besides.clamp_min(tiny).log() + free * left.clamp_min(tiny).log())
        candidates = self.candidates.words[place]
        usable = torch.isfinite(self.candidates.residuals[place]) & (candidates != self.end)
        usable &= lengths > _APART * self.inputs[place].square().sum(1)
        # Only the pairs with the words before and after change.
        words = self._words(columns)
        near = words[max(place - 1, 0) : place + 2].repeat(len(candidates), 1)
        near[:, min(place, 1)] = candidates
        return (evidence + self._log_priors(near)).masked_fill(~usable, -torch.inf)

    def _log_likelihoods(self, shown: Tensor, products: Tensor) -> Tensor:
        """Return the log likelihoods [N] of inputs by their products [N, T, T] in the gradient and with each other.

        Each variance and covariance that is fitted costs 1 (Akaike); inputs that depend on each other have none.
        """
        tokens = shown.shape[-1]
        factors, failed = torch.linalg.cholesky_ex(products)
        trace = torch.cholesky_solve(shown, factors).diagonal(dim1=-2, dim2=-1).sum(-1)
        determinant = torch.logdet(shown) - 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        free, fitted = self._free(tokens), tokens * (tokens + 1) / 2
        likelihoods = (
            -self.span.rows / 2 * (determinant + free * ((self._products.trace() - trace) / free).log()) - fitted
        )
        return torch.where(failed == 0, likelihoods, -torch.inf).nan_to_num(-torch.inf)

    def _free(self, tokens: int) -> int:
        """Return the number of directions that noise alone fills."""
        return self.inputs.shape[-1] - tokens

    @cached_property
    def _products(self) -> Tensor:
        return self.span.products / self.span.products.trace()

    @cached_property
    def _shown(self) -> Tensor:
        return self.inputs @ self._products

    def _log_priors(self, words: Tensor) -> Tensor:
        """Return the log prior [N] of sentences [N, T]; without public texts all words are as likely."""
        if self.prior is None:
            return torch.full((len(words),), -words.shape[1] * math.log(len(self.layout.word_table(self.params))))
        return self.prior(words[:, :-1].flatten(), words[:, 1:].flatten()).view(len(words), -1).sum(1)

    def _words(self, columns: Tensor) -> Tensor:
        return self.candidates.words[torch.arange(len(columns)), columns]

    def _lengths(self) -> range:
        return range(2, len(self.candidates.words) + 1)

    def _of_length(self, length: int, known: Tensor | None) -> Tensor:
        """Return the columns of known words, then of the best ranked ones, between the start and the end."""
        columns = self._best[:length].clone()
        if known is not None:
            kept = min(length, len(known)) - (self.end is not None)
            columns[:kept] = known[:kept]
        if self.end is not None:
            columns[-1] = int((self.candidates.words[length - 1] == self.end).nonzero()[0])
        return columns

    @cached_property
    def _best(self) -> Tensor:
        """Return the column [P] of the best ranked word of each position; the start at the first."""
        usable = torch.isfinite(self.candidates.residuals) & (self.candidates.words != self.end)
        best = self.candidates.residuals.masked_fill(~usable, torch.inf).argmin(1)
        if self.start is not None:
            best[0] = int((self.candidates.words[0] == self.start).nonzero()[0])
        return best
