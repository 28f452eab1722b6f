"""The likeliest sentence by the errors that the model gives its tokens.

The errors of a sentence's tokens follow from the model. With the right sentence they make the rows of positions and
words but for noise, and for one factor, which clipping and averages set. So the errors tell words apart that have the
same sum, they place words that occur several times, and they show how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.sequences.row_likelihood import NoisyRows
from gradveil.client import Client
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.stochastic import switched_off
from gradveil.nn.token_layout import EmbeddingPerturbation, TokenModel

_TOGETHER = 128
"""Sentences that are simulated at once."""
_COMPARED = 256
"""Sentences that are compared at once."""
_LIKELY = 16
"""Words besides those of the sentence that are tried at each place."""
_CHECKED = 128
"""Changes whose errors are simulated after a comparison by the errors of single words."""
_FITS = 2.0
"""Most that is left of the positions' rows, relative to the variance of their noise."""
_ROUNDS = 60
"""Most times that the errors of single words are simulated."""
_CHANGES = 100
"""Most changes between two simulations."""


@dataclass(frozen=True)
class _WordErrors:
    """How well each of some words [U] explains the rows at each place between the ends."""

    words: Tensor
    own: Tensor
    """Log likelihood [T, U] that a word brings at a place if it stands nowhere else."""
    shared: Tensor
    """What a word that stands at two places [T, T, U] takes from that."""
    present: Tensor
    """Log likelihood [U] that a word brings by standing anywhere."""

    def log_likelihoods(self, columns: Tensor) -> Tensor:
        """Return the log likelihoods [N], up to a constant, of sentences given as columns [N, T] of the words."""
        place = torch.arange(columns.shape[1], device=columns.device)
        same = torch.triu(columns.unsqueeze(2) == columns.unsqueeze(1), diagonal=1)
        shared = self.shared[place.unsqueeze(1), place, columns.unsqueeze(2)]
        present = torch.zeros(len(columns), len(self.words), device=columns.device).scatter(1, columns, 1)
        there = present.to(self.present.dtype) @ self.present
        return self.own[place, columns].sum(1) - torch.where(same, shared, 0.0).sum((1, 2)) + there

    def assigned(self, columns: Tensor) -> Tensor:
        """Return the words of a sentence [T] at the places where they are likeliest together."""
        counts = torch.bincount(columns, minlength=len(self.words)).clamp_min(1)
        # Of a word that occurs several times, the others are taken to stand where they do, less a mean one.
        others = self.shared[:, torch.arange(len(columns), device=columns.device), columns]
        taken = torch.zeros_like(self.own).index_add(1, columns, others) * (1 - 1 / counts)
        best = linear_sum_assignment(-(self.own - taken)[:, columns].nan_to_num().cpu().numpy())[1]
        return columns[torch.from_numpy(best).to(columns.device)]


@dataclass(frozen=True)
class SimulatedErrors:
    """The log posterior of single sentences of one label, by the errors of their tokens."""

    client: Client
    params: Tensors
    rows: NoisyRows
    log_priors: Callable[[Tensor], Tensor]
    """Sentences [N, T] -> log priors [N]."""
    start: int | None
    end: int | None
    padding: int
    label: int = field(default=0, kw_only=True)

    def likeliest(self, words: Tensor, labels: Iterable[int]) -> Tensor:
        """Return the likeliest sentence that is found from one, of that of some labels which explains that one best."""
        labelled = [replace(self, label=label) for label in labels]
        best = max(labelled, key=lambda one: float(one.log_posteriors(words.unsqueeze(0))))
        found = best._improved(words)
        return found if best._fits(found) else words

    def log_posteriors(self, words: Tensor) -> Tensor:
        """Return the log posteriors [N] of sentences [N, T], up to a constant."""
        found = [self._explained(part, self._errors(part))[0] for part in words.split(_TOGETHER)]
        return torch.cat(found) + self._present(words) + self.log_priors(words)

    def _present(self, words: Tensor) -> Tensor:
        """Return the log likelihoods [N] that so many tokens, and these words, stand anywhere."""
        copies = (words.unsqueeze(2) == words.unsqueeze(1)).sum(2)
        return (self.rows.present[words] / copies).sum(1) + self.rows.present_places[: words.shape[1]].sum()

    def _improved(self, words: Tensor) -> Tensor:
        best = float(self.log_posteriors(words.unsqueeze(0)))
        for _ in range(_ROUNDS):
            before = best
            words, best = self._resized(words, best)
            words, best = self._rearranged(words, best)
            if not best > before:
                break
        return words

    def _fits(self, words: Tensor) -> bool:
        """Report whether the errors leave hardly more than noise of the positions' rows: else the model had others."""
        errors = self._errors(words.unsqueeze(0))
        left = self.rows.read[: len(words)] - self._explained(words.unsqueeze(0), errors)[1] * errors[0]
        return float(left.square().mean()) < _FITS * self.rows.others

    def _resized(self, words: Tensor, best: float) -> tuple[Tensor, float]:
        """Add words before the end, or leave words out, as long as that makes the sentence likelier."""
        while True:
            places, last = self._changeable(words), len(words) - (self.end is not None)
            tried: list[Tensor] = []
            if len(words) < len(self.rows.read):
                more = self._tried_words(words)
                before, behind = (part.expand(len(more), -1) for part in (words[:last], words[last:]))
                tried.append(torch.cat([before, more.unsqueeze(1), behind], 1))
            if len(places) > 1:
                tried.append(torch.stack([torch.cat([words[:one], words[one + 1 :]]) for one in places]))
            found = [_likeliest(part, self.log_posteriors(part)) for part in tried]
            changed, value = max(found, key=lambda one: one[1], default=(words, best))
            if not value > best:
                return words, best
            words, best = changed, value

    def _rearranged(self, words: Tensor, best: float) -> tuple[Tensor, float]:
        """Exchange and move words by the errors of single words; what they find is kept if its own errors fit."""
        places = self._changeable(words)
        if not places:
            return words, best
        single = self._word_errors(words)
        columns = torch.searchsorted(single.words, words[places.start : places.stop])
        assigned = single.assigned(columns)
        found, value = self._likeliest_of(words, single, assigned.unsqueeze(0))
        if value > best:
            return found, value
        path = [*self._path(columns, words, single), *self._path(assigned, words, single)]
        # The errors of single words hold near the sentence: how far along the path is asked of its own errors.
        found, value = self._likeliest_of(words, single, torch.cat(path))
        return (found, value) if value > best else (words, best)

    def _likeliest_of(self, words: Tensor, single: _WordErrors, columns: Tensor) -> tuple[Tensor, float]:
        sentences = self._with(words, single.words[columns])
        return _likeliest(sentences, self.log_posteriors(sentences))

    def _path(self, columns: Tensor, words: Tensor, single: _WordErrors) -> list[Tensor]:
        """Return columns [N, T] of single words, each sentence by one change likelier than the last.

        Of the first change many are returned, likelier or not.
        """
        path = [columns.unsqueeze(0)]
        for step in range(_CHANGES):
            tried = torch.stack(list(_changes(path[-1][0], len(single.words))))
            values = torch.cat([self._compared(part, words, single) for part in tried.split(_COMPARED)])
            if step and not float(values.max()) > float(values[0]):
                break
            path.append(tried[values.topk(min(1 if step else _CHECKED, len(values))).indices])
        return path

    def _compared(self, columns: Tensor, words: Tensor, single: _WordErrors) -> Tensor:
        return single.log_likelihoods(columns) + self.log_priors(self._with(words, single.words[columns]))

    def _word_errors(self, words: Tensor) -> _WordErrors:
        """Simulate each word at each place of a sentence."""
        places, tried = self._changeable(words), self._tried_words(words)
        found: list[Tensor] = []
        for place in places:
            changed = words.repeat(len(tried), 1)
            changed[:, place] = tried
            found.append(torch.cat([self._errors(part)[:, place] for part in changed.split(_TOGETHER)]))
        factor = self._explained(words.unsqueeze(0), self._errors(words.unsqueeze(0)))[1]
        errors = factor * torch.stack(found)
        read, of_words = self.rows.read[places.start : places.stop].unsqueeze(1), self.rows.table[tried]
        along = (errors * (read / self.rows.others + of_words / self.rows.noise)).sum(2)
        own = along - errors.square().sum(2) * (1 / self.rows.others + 1 / self.rows.noise) / 2
        shared = torch.einsum("pud,qud->pqu", errors, errors) / self.rows.noise
        return _WordErrors(tried, own, shared, self.rows.present[tried])

    def _tried_words(self, words: Tensor) -> Tensor:
        """Return the words of a sentence, and those whose rows have the most of its mean error besides, in order."""
        errors = self._errors(words.unsqueeze(0))
        errors = self._explained(words.unsqueeze(0), errors)[1] * errors[0]
        mean = errors.mean(0)
        left = (self.rows.table @ mean).index_add(0, words, -errors @ mean)
        left = left + self.rows.present.index_fill(0, words, 0.0)
        marks = [mark for mark in (self.start, self.end, self.padding) if mark is not None]
        left[marks] = -torch.inf
        found = left.topk(min(_LIKELY, len(left))).indices
        places = self._changeable(words)
        return torch.cat([words[places.start : places.stop], found]).unique()

    def _explained(self, words: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihoods [N] of the rows with the errors [N, T, d] of sentences, and their factors [N].

        They are less those without errors; the factor is the likeliest.
        """
        read, noise = self.rows.read[: words.shape[1]], self.rows.noise
        along = (errors * (read / self.rows.others + self.rows.table[words] / noise)).sum((1, 2))
        same = words.unsqueeze(2) == words.unsqueeze(1)
        of_words = torch.where(same, errors @ errors.mT, 0.0).sum((1, 2))
        squares = errors.square().sum((1, 2)) / self.rows.others + of_words / noise
        factors = along.clamp_min(0) / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        return factors * along / 2, factors

    def _errors(self, words: Tensor) -> Tensor:
        """Return the errors [N, T, d] of the tokens of sentences."""
        model = self.client.model
        assert isinstance(model, TokenModel)
        batch = Batch(words, torch.full(words.shape[:1], self.label, device=words.device))
        perturbation = EmbeddingPerturbation(model)
        zeros = perturbation.zeros(words).requires_grad_()
        with torch.enable_grad(), perturbation.added(batch, zeros) as moved:
            loss = self.client.objective.value(self.params, moved, switched_off(model, words))
        return len(words) * torch.autograd.grad(loss, zeros)[0].double()

    def _with(self, words: Tensor, between: Tensor) -> Tensor:
        """Return sentences [N, T] with other words between the start and the end."""
        changed = words.repeat(len(between), 1)
        places = self._changeable(words)
        changed[:, places.start : places.stop] = between
        return changed

    def _changeable(self, words: Tensor) -> range:
        return range(self.start is not None, len(words) - (self.end is not None))


def _changes(columns: Tensor, count: int) -> Iterator[Tensor]:
    """Yield columns [T] as they are, with each of a number at a place, and with two exchanged or one moved."""
    yield columns
    for place in range(len(columns)):
        others = columns.repeat(count, 1)
        others[:, place] = torch.arange(count, device=columns.device)
        yield from others
    for one in range(len(columns)):
        for other in range(len(columns)):
            if one < other:
                swapped = columns.clone()
                swapped[[one, other]] = columns[[other, one]]
                yield swapped
            if abs(one - other) > 1:
                rest = torch.cat([columns[:one], columns[one + 1 :]])
                yield torch.cat([rest[:other], columns[one : one + 1], rest[other:]])


def _likeliest(sentences: Tensor, values: Tensor) -> tuple[Tensor, float]:
    best = int(values.argmax())
    return sentences[best], float(values[best])
