"""How likely a sentence makes a noisy gradient of the first layer, and the search for the likeliest one.

A linear layer's gradient with m rows is D X^T plus noise of variance v an entry, where the rows of D are unknown and
normal. With D's covariance fitted, the log likelihood against noise alone is (tr S - m T - m log det(S / m)) / 2, where
S = Q^T G^T G Q / v for an orthonormal basis Q of the inputs X [d, T] of T tokens. All words are judged together: one
that other words explain counts only by what it adds.
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
        best = self._best_of([self._of_length(length, None) for length in self._lengths()])
        while True:
            # Other lengths, with what is known of the words by now.
            other = self._best_of([self._of_length(length, best) for length in self._lengths() if length != len(best)])
            if self.log_posterior(other) <= self.log_posterior(best):
                return self._words(best)
            best = other

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
                if one == other:
                    continue
                moved = [place for place in orders[0] if place != one]
                moved.insert(other, one)
                orders.append(moved)
                if one < other:
                    swapped = orders[0].copy()
                    swapped[one], swapped[other] = other, one
                    orders.append(swapped)
        order, tokens = torch.tensor(orders), len(words)
        # Every word at every place: the products of a sentence's inputs are among theirs.
        listed = self.candidates.words[:tokens] == words.view(-1, 1, 1)
        listed &= torch.isfinite(self.candidates.residuals[:tokens])
        placed = listed.long().argmax(-1)
        inputs = self.inputs[torch.arange(tokens), placed].flatten(0, 1)
        shown = self._shown[torch.arange(tokens), placed].flatten(0, 1) @ inputs.T
        products = inputs @ inputs.T
        # Only words that are candidates at their new places.
        order = order[listed.any(-1)[order, torch.arange(tokens)].all(-1)]
        items = order * tokens + torch.arange(tokens)
        pairs = items.unsqueeze(-1), items.unsqueeze(-2)
        log_posteriors = self._log_likelihoods(shown[pairs], products[pairs]) + self._log_priors(words[order])
        best = order[int(log_posteriors.argmax())]
        return placed[best, torch.arange(tokens)]

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
        rows = self.span.rows
        evidence = (gains - rows - rows * (besides.clamp_min(torch.finfo(gains.dtype).tiny) / rows).log()) / 2
        words = self._words(columns).repeat(len(gains), 1)
        words[:, place] = self.candidates.words[place]
        usable = torch.isfinite(self.candidates.residuals[place]) & (words[:, place] != self.end)
        return (evidence + self._log_priors(words)).masked_fill(~usable, -torch.inf)

    def _log_likelihoods(self, shown: Tensor, products: Tensor) -> Tensor:
        """Return the log likelihoods [N] of inputs by their products [N, T, T] with the gradient and with each other.

        Each variance and covariance that is fitted costs 1 (Akaike).
        """
        rows, tokens = self.span.rows, shown.shape[-1]
        trace = torch.linalg.solve(products, shown).diagonal(dim1=-2, dim2=-1).sum(-1)
        determinant = torch.logdet(shown) - torch.logdet(products)
        fitted = tokens * (tokens + 1) / 2
        return (trace - rows * (tokens + determinant - tokens * math.log(rows))) / 2 - fitted

    @cached_property
    def _products(self) -> Tensor:
        return self.span.products / self.span.noise

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
