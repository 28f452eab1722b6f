"""Search for the order of words: sentences whose inputs of the second layer lie in its span, too.

The first layer gives words for each position, of all sentences of a batch together. The second layer's input of a
position depends on the words around it. In causal models these are the earlier ones, so that prefixes are extended
exactly. In encoders they are the whole sentence: prefixes are ranked as if they were all of it, which orders the next
words almost as well. A finished sentence is then tested, or improved word by word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.attacks.sequences.token_span import TokenSpan
from gradveil.core.tree import Tensors
from gradveil.nn.token_layout import TokenLayout

LogPrior = Callable[[Tensor, Tensor], Tensor]
"""(previous words [N], words [N]) -> log probabilities [N] in a public model of the language."""
MEMBER = 1e-3
"""Largest residual of a member of the second layer's span."""
_LEAST = 1e-4
"""Residuals below this are equally good."""
_USUAL = 0.8
"""Quantile of the second layer's residuals among proposed sentences that stands for a wrong word."""
_AT_ONCE = 1024
"""Sequences in one forward pass."""
_DIFFERENT = 0.3
"""Share of tokens in which two ranked sentences of a batch must differ."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """Token numbers [T], their mean cost, and whether both layers explain every token."""

    words: Tensor
    cost: float
    proved: bool


@dataclass(frozen=True)
class _Beam:
    """Prefixes [N, p], the sum [N] of their first layer's costs, and their second layer's residuals [N, p]."""

    ids: Tensor
    first: Tensor
    second: Tensor

    def __getitem__(self, rows: Tensor) -> _Beam:
        return _Beam(self.ids[rows], self.first[rows], self.second[rows])

    @property
    def costs(self) -> Tensor:
        """Return the mean cost [N] of a token."""
        return (self.second.clamp_min(_LEAST).log().sum(1) + self.first) / self.ids.shape[1]


@dataclass(frozen=True)
class SentenceSearch:
    """A beam search over the candidates of each position, then a coordinate descent."""

    model: nn.Module
    layout: TokenLayout
    params: Tensors
    candidates: Candidates
    second: TokenSpan | None
    """The second layer's span; None if the model has one layer or did not send it."""
    start: int | None = None
    end: int | None = None
    """The tokens that begin and end each text; None if there are none."""
    beam: int = 16
    prior: LogPrior | None = None
    prior_weight: float = 0.1
    """Weight of the log prior against the log residual."""

    @torch.no_grad()
    def run(self, found: int, avoid: Collection[tuple[int, ...]] = ()) -> list[Sentence]:
        """Return up to `found` distinct sentences that are not in `avoid`: proved ones first, then by cost."""
        beam = self._first()
        done: list[Sentence] = []
        for position in range(1, len(self.candidates.words)):
            words, costs = self._words(position)
            if not len(words) or not len(beam.ids):
                break
            longer = self._extended(beam, words, costs)
            if self.layout.causal and self._tests:
                good = longer.second[:, -1] < MEMBER
                # A prefix that no word continues within the span is a whole text.
                done += self._finished(beam[~good.view(len(beam.ids), -1).any(1)])
                longer = longer[good]
            elif self.end is not None:
                ended = longer.ids[:, -1] == self.end
                done += self._finished(longer[ended])
                longer = longer[~ended]
            beam = longer[longer.costs.argsort()[: self.beam]]
        if self.layout.causal or self.end is None or not done:
            done += self._finished(beam)
        # Of equal sentences the last one stays in the dict, which costs least.
        distinct = {tuple(one.words.tolist()): one for one in sorted(done, key=lambda one: -one.cost)}
        others = [one for words, one in distinct.items() if words not in avoid]
        return sorted(others, key=lambda one: (not one.proved, one.cost))[:found]

    @torch.no_grad()
    def improved(self, sentence: Sentence, sweeps: int = 3) -> Sentence:
        """Exchange single words of a sentence as long as that lowers its cost."""
        ids, cost = sentence.words, sentence.cost
        for _ in range(sweeps):
            before = cost
            for position in range(1 if self.start is not None else 0, len(ids) - (self.end is not None)):
                words, _ = self._words(position)
                words = words[words != self.end] if self.end is not None else words
                if not len(words):
                    continue
                others = ids.repeat(len(words), 1)
                others[:, position] = words
                tried = self._measured(others)
                best = int(tried.costs.argmin())
                if float(tried.costs[best]) < cost:
                    ids, cost = others[best], float(tried.costs[best])
            if cost >= before:
                break
        return self.measured(ids)

    @torch.no_grad()
    def measured(self, words: Tensor) -> Sentence:
        """Return token numbers [T] with their cost, and whether both layers explain them."""
        return self._finished(self._measured(words.unsqueeze(0)))[0]

    @torch.no_grad()
    def usual_cost(self, sentences: Sequence[Sentence]) -> float:
        """Return the cost of a wrong word: that of the last candidates, and of most tokens of wrong sentences."""
        listed = self.candidates.residuals
        last = torch.where(torch.isfinite(listed), listed, 0).amax(1).clamp_min(_LEAST).log().mean()
        second = torch.cat([self._second(one.words.unsqueeze(0)).flatten() for one in sentences])
        return float(last + second.clamp_min(_LEAST).log().quantile(_USUAL))

    def first_residuals(self, ids: Tensor) -> Tensor:
        """Return the first layer's residuals [..., T] of sentences [..., T]; infinity for words that are not listed."""
        rows = torch.arange(ids.shape[-1])
        same = self.candidates.words[rows] == ids.unsqueeze(-1)
        return torch.where(same, self.candidates.residuals[rows], torch.inf).amin(-1)

    @property
    def _tests(self) -> bool:
        return self.second is not None and self.second.exact

    def _words(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the words of a position and their first-layer costs."""
        residuals = self.candidates.residuals[position]
        usable = torch.isfinite(residuals)
        return self.candidates.words[position][usable], residuals[usable].clamp_min(_LEAST).log()

    def _first(self) -> _Beam:
        words, costs = self._words(0)
        if self.start is not None and bool((words == self.start).any()):
            words, costs = words[words == self.start], costs[words == self.start]
        beam = _Beam(words.unsqueeze(1), costs, self._second(words.unsqueeze(1)))
        if self.layout.causal and self._tests:
            beam = beam[beam.second[:, 0] < MEMBER]
        return beam[beam.costs.argsort()[: self.beam]]

    def _second(self, ids: Tensor) -> Tensor:
        """Return the residuals [N, T] of the second layer; ones without it, or without sentences."""
        if self.second is None or not len(ids):
            return self.candidates.residuals.new_ones(ids.shape)
        parts = ids.split(_AT_ONCE)
        return torch.cat([self.second.residuals(self.layout.inputs(self.model, self.params, p, 1)) for p in parts])

    def _extended(self, beam: _Beam, words: Tensor, costs: Tensor) -> _Beam:
        """Return every prefix with every word."""
        rows, columns = len(beam.ids), len(words)
        ids = torch.cat([beam.ids.repeat_interleave(columns, 0), words.repeat(rows).unsqueeze(1)], 1)
        first = beam.first.repeat_interleave(columns) + costs.repeat(rows)
        if self.prior is not None:
            first = first - self.prior_weight * self.prior(ids[:, -2], ids[:, -1])
        return _Beam(ids, first, self._second(ids))

    def _measured(self, ids: Tensor) -> _Beam:
        """Measure whole sentences [N, T] of candidates."""
        residuals = self.first_residuals(ids)
        # A word that is not listed counts as wholly outside of the span, in which unit vectors leave 1.
        first = residuals.nan_to_num(posinf=1.0).clamp_min(_LEAST).log().sum(1)
        if self.prior is not None:
            first = first - self.prior_weight * self.prior(ids[:, :-1].flatten(), ids[:, 1:].flatten()).view(
                len(ids), -1
            ).sum(1)
        return _Beam(ids, first, self._second(ids))

    def _finished(self, beam: _Beam) -> list[Sentence]:
        proved = (beam.second.amax(1) < MEMBER) & self._tests
        return [Sentence(*one) for one in zip(beam.ids.unbind(), beam.costs.tolist(), proved.tolist(), strict=True)]


def distinct(sentences: Sequence[Sentence], count: int) -> list[Sentence]:
    """Return the best sentences that differ from each other in at least 30% of the tokens; fill up with others."""
    kept: list[Sentence] = []
    for one in sentences:
        if len(kept) < count and all(_difference(one.words, other.words) >= _DIFFERENT for other in kept):
            kept.append(one)
    return [*kept, *(one for one in sentences if all(one is not other for other in kept))][:count]


def _difference(one: Tensor, other: Tensor) -> float:
    shorter = min(len(one), len(other))
    same = int((one[:shorter] == other[:shorter]).sum())
    return 1 - same / max(len(one), len(other))
