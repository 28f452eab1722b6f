"""The search for the likeliest sentence of an update, among candidates for each position.

What makes a sentence likely differs: see `sentence_evidence.py` for noise, `entry_likelihood.py` for entries that
were sent, or their signs, and `row_likelihood.py` for the embeddings' rows. The search exchanges and moves single
words and tries other lengths. All words are judged together: one that other words explain counts only by what it adds.
Public texts say how likely pairs of words are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.row_likelihood import RowLikelihood
from gradveil.attacks.sequences.sentence_search import LogPrior
from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.core.tree import Tensors
from gradveil.nn.token_layout import TokenLayout

_FAR = 48
"""Most places that a word moves."""
_EXCHANGES = 3
"""Words at a place that are judged by all that is known, after a rough comparison."""
_MOVES = 8
"""Moves that are judged by all that is known, after a rough comparison."""
_TOGETHER = 64
"""Sentences that are measured at once."""
_APART = 1e-9
"""Least share of an input's square that the other words must leave."""
_REFUTED = 100.0
"""Log likelihood by which the positions' rows refute a length."""
_RANKED = 10.0
"""Weight of a word's rank in the first layer's span, where that does not say how likely the word is."""
_SWEEPS = 20
"""Most times that all words of a sentence are exchanged in turn."""


@dataclass(frozen=True)
class SentenceLikelihood:
    """The log posterior of single sentences whose words are among the candidates of their positions.

    By itself it knows the words' ranks, the embeddings' rows and the prior.
    """

    model: nn.Module
    layout: TokenLayout
    params: Tensors
    candidates: Candidates
    start: int | None
    end: int | None
    prior: LogPrior | None

    rows: RowLikelihood | None = field(default=None, kw_only=True)

    starts: ClassVar[int] = 1
    """Sentences that are improved of those of all lengths."""

    def log_likelihoods(self, columns: Tensor) -> Tensor:
        """Return the log likelihoods [N] by the first layer of sentences, given as columns [N, T] of the candidates."""
        return self._ranks[torch.arange(columns.shape[1]), columns].sum(1)

    def exchanged(self, columns: Tensor, place: int) -> Tensor:
        """Return the log likelihood [K] by the first layer of a sentence with each candidate at a place.

        It is right up to a constant.
        """
        return self._ranks[place]

    def settled(self, columns: Tensor) -> bool:
        """Report whether an improved sentence leaves so little open that no other needs to be tried."""
        return False

    @cached_property
    def _ranks(self) -> Tensor:
        return -_RANKED * self.candidates.residuals.double().clamp_min(torch.finfo(torch.float64).tiny).log()

    @property
    def rough(self) -> SentenceLikelihood:
        """The likelihood by which many sentences are compared."""
        return self

    @property
    def by_rows(self) -> SentenceLikelihood:
        """The likelihood without the first layer's, by the words' ranks alone: it proposes a sentence."""
        known = self.model, self.layout, self.params, self.candidates, self.start, self.end, self.prior
        return SentenceLikelihood(*known, rows=self.rows)

    @cached_property
    def inputs(self) -> Tensor:
        """Return the first layer's inputs [P, K, d] of all candidates."""
        rows = [self.layout.first_inputs(self.model, self.params, *one) for one in enumerate(self.candidates.words)]
        return torch.stack(rows).double()

    @torch.no_grad()
    def likeliest(self, start: Tensor | None = None) -> Tensor:
        """Return the columns [T] of the likeliest sentence that is found, of any length, from one that is proposed."""
        if start is not None and self.settled(start):
            return start
        starts = [self._of_length(length, None) for length in self._lengths()]
        best = self.improved(max(starts, key=self.log_posterior) if start is None else start)
        if self.settled(best):
            return best
        if self.starts > 1:
            best = max(best, self._best_of(starts), key=self.log_posterior)
        while True:
            # Other lengths, with what is known of the words by now.
            others = [self._of_length(length, best) for length in self._lengths() if length != len(best)]
            other = self._best_of(others) if others else best
            if not self.log_posterior(other) > self.log_posterior(best):
                return best
            best = other
            if self.starts == 1 and self.settled(best):
                return best

    def _best_of(self, sentences: list[Tensor]) -> Tensor:
        """Return the likeliest of the most likely sentences when they are improved."""
        likely = sorted(sentences, key=self.log_posterior)[-self.starts :]
        return max(map(self.improved, likely), key=self.log_posterior)

    def log_posterior(self, columns: Tensor) -> float:
        """Return the log of likelihood and prior of a sentence, given as columns [T] of the candidates."""
        columns = columns.unsqueeze(0)
        words = self.words(columns)
        return float(self.log_likelihoods(columns) + self.log_priors(words) + self._of_rows(words))

    @torch.no_grad()
    def improved(self, columns: Tensor) -> Tensor:
        """Exchange and move single words of a sentence, as long as that makes it likelier."""
        for _ in range(_SWEEPS):
            before, columns = columns, columns.clone()
            for place in self.changeable(columns):
                posteriors = self.log_posteriors(columns, place)
                for column in posteriors.topk(min(_EXCHANGES, len(posteriors))).indices.tolist():
                    changed = columns.clone()
                    changed[place] = column
                    if column != columns[place] and self._likelier(changed, columns):
                        columns = changed
                        break
            if torch.equal(before, columns):
                moved = next((one for one in self._moved(columns) if self._likelier(one, columns)), None)
                if moved is None:
                    break
                columns = moved
        return columns

    def _likelier(self, changed: Tensor, columns: Tensor) -> bool:
        return self.log_posterior(changed) > self.log_posterior(columns)

    def changeable(self, columns: Tensor) -> range:
        """Return the places between the start and the end."""
        return range(self.start is not None, len(columns) - (self.end is not None))

    def _moved(self, columns: Tensor) -> Tensor:
        """Return the likeliest sentences [N, T] in which two words change places, or one goes elsewhere, best first."""
        words, places = self.words(columns), self.changeable(columns)
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
        order, tokens = torch.tensor(orders, device=words.device), len(words)
        places = torch.arange(tokens)
        listed = self.candidates.words[:tokens] == words.view(-1, 1, 1)
        listed &= torch.isfinite(self.candidates.residuals[:tokens])
        listed[places, places, columns] = True
        # The column of every word at every place. Only words that are candidates at their new places move there.
        placed = listed.long().argmax(-1)
        order = order[listed.any(-1)[order, places].all(-1)]
        log_posteriors = [
            self.rough.log_likelihoods(placed[part, places]) + self.log_priors(words[part]) + self._of_rows(words[part])
            for part in order.split(_TOGETHER)
        ]
        best = torch.cat(log_posteriors).topk(min(_MOVES, len(order))).indices
        return placed[order[best], places]

    def log_posteriors(self, columns: Tensor, place: int) -> Tensor:
        """Return the log posterior [K], up to a constant, of a sentence with each candidate at a place."""
        candidates, inputs = self.candidates.words[place], self.inputs[place]
        others = torch.arange(len(columns)) != place
        basis = torch.linalg.qr(self.inputs[torch.arange(len(columns))[others], columns[others]].T)[0]
        lengths = (inputs - (inputs @ basis) @ basis.T).square().sum(1)
        usable = torch.isfinite(self.candidates.residuals[place]) & (candidates != self.end)
        usable &= lengths > _APART * inputs.square().sum(1)
        # Only the pairs with the words before and after change.
        words = self.words(columns)
        near = words[max(place - 1, 0) : place + 2].repeat(len(candidates), 1)
        near[:, min(place, 1)] = candidates
        found = self.exchanged(columns, place) + self.log_priors(near)
        if self.rows is not None:
            found = found + self.rows.exchanged(words, place, candidates)
        return found.masked_fill(~usable, -torch.inf)

    def _of_rows(self, words: Tensor) -> Tensor:
        return torch.zeros_like(words[:, 0]) if self.rows is None else self.rows.log_likelihoods(words)

    def log_priors(self, words: Tensor) -> Tensor:
        """Return the log prior [N] of sentences [N, T]; without public texts all words are as likely."""
        if self.prior is None:
            logs = -words.shape[1] * math.log(len(self.layout.word_table(self.params)))
            return torch.full((len(words),), logs, device=words.device)
        return self.prior(words[:, :-1].flatten(), words[:, 1:].flatten()).view(len(words), -1).sum(1)

    def words(self, columns: Tensor) -> Tensor:
        """Return the words [..., T] of sentences, given as columns of the candidates."""
        return self.candidates.words[torch.arange(columns.shape[-1]), columns]

    def _lengths(self) -> list[int]:
        """Return the lengths that the positions' rows leave open."""
        lengths = list(range(2, len(self.candidates.words) + 1))
        if self.rows is None:
            return lengths
        used = self.rows.used.cumsum(0)[1 : lengths[-1]]
        return [one for one, value in zip(lengths, used, strict=True) if float(used.max() - value) < _REFUTED]

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
        """Return the column [P] of the best word of each position by itself; the start at the first."""
        usable = torch.isfinite(self.candidates.residuals) & (self.candidates.words != self.end)
        ranks = self._ranks
        if self.rows is not None:
            ranks = ranks + self.rows.alone(self.candidates.words)
        best = ranks.masked_fill(~usable, -torch.inf).argmax(1)
        if self.start is not None:
            best[0] = int((self.candidates.words[0] == self.start).nonzero()[0])
        return best
