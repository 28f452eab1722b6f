"""How likely the words of a sentence make the rows of the embeddings' gradients.

The row of a position is the error of its token, and the row of a word the sum of the errors where it stands. What was
sent of a position's row leaves a normal error with a mean and a variance. So each word's row is likely with the right
positions alone: behind noise, where entries were dropped, and where signs were sent, of noisy rows, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradveil.attacks.sequences.token_span import are_signs, is_pruned
from gradveil.nn.token_layout import TokenLayout

_ROUNDING = 1e-4
"""Standard deviation of rounding, relative to the root mean square of what was sent."""
_SURELY = 6.0
"""Standard deviations of rounding below which a number is zero."""
_ODD = 0.01
"""Share of entries that are not as they should be."""
_SIGNALS = tuple(2.0**exponent for exponent in range(-6, 7))
"""Variances of the signal behind signs that are tried, in units of the noise's."""
_FITS = 200
"""Steps between the variances that are tried for entries of which some are missing."""
_FILLED = 0.9
"""Share of rows that are not zero above which rounding at random hides which words were sent."""
_HALF_NORMAL = math.sqrt(2 / math.pi)
"""Mean of the absolute value of a standard normal number; its variance is 1 less the square of this."""


@dataclass(frozen=True)
class RowLikelihood(ABC):
    """The likelihood of the words' rows, given the positions of each word."""

    table: Tensor
    """Rows [W, d] of the word embedding's gradient."""
    errors: Tensor
    """Mean errors [P, d] of the positions, given their rows."""
    variances: Tensor
    """Variances [P, d] of these errors, or [P, 1]."""
    used: Tensor
    """Log likelihood [P] of the positions' rows if a token stands there, less that if none does."""
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @abstractmethod
    def densities(self, rows: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Return the log densities [M, N] of rows [N, d] whose errors have these means and variances [M, d]."""

    @abstractmethod
    def free(self, rows: Tensor) -> Tensor:
        """Return the log densities [N] of rows [N, d] of words that stand nobody knows where."""

    @property
    def complete(self) -> bool:
        """Report whether the row of each word of the sentence was sent, and no other's."""
        return True

    def proposed(self, count: int) -> Tensor:
        """Return the words [P, count] whose rows a single position explains best, the best first."""
        sent = self.table.any(1).nonzero().flatten()
        gains = self.alone(sent.expand(len(self.errors), -1))
        return sent[gains.topk(min(count, len(sent)), dim=1).indices]

    def alone(self, words: Tensor) -> Tensor:
        """Return how much better each word's row [P, K] is explained by its position than by any others."""
        gains = self._densities - self.free(self._distinct[0])
        return gains.gather(1, self._distinct[1][words])

    def log_likelihoods(self, words: Tensor) -> Tensor:
        """Return the log likelihoods [N] of sentences [N, T], up to a constant."""
        used = float(self.used[: words.shape[1]].sum())
        found = []
        for sentence in words.tolist():
            places: dict[int, list[int]] = {}
            for place, word in enumerate(sentence):
                places.setdefault(word, []).append(place)
            found.append(used + sum(self._explained(*one) for one in places.items()))
        return torch.tensor(found, dtype=torch.float64, device=words.device)

    def exchanged(self, words: Tensor, place: int, candidates: Tensor) -> Tensor:
        """Return the log likelihoods [K], up to a constant, of a sentence [T] with each candidate at a place."""
        gains = (self._densities[place] - self._without)[self._distinct[1][candidates]]
        others: dict[int, list[int]] = {}
        for other, word in enumerate(words.tolist()):
            if other != place:
                others.setdefault(word, []).append(other)
        for word, known in others.items():
            again = self._explained(word, sorted([*known, place])) - self._explained(word, known)
            gains = torch.where(candidates == word, again, gains)
        return gains

    @cached_property
    def _distinct(self) -> tuple[Tensor, Tensor]:
        """Return the rows [N, d] that are not zero, behind one that is, and the place [W] of each word's among them."""
        sent = self.table.any(1)
        return torch.cat([torch.zeros_like(self.table[:1]), self.table[sent]]), sent.cumsum(0) * sent

    @cached_property
    def _densities(self) -> Tensor:
        return self.densities(self._distinct[0], self.errors, self.variances)

    @cached_property
    def _without(self) -> Tensor:
        nothing = torch.zeros_like(self.errors[:1]), torch.zeros_like(self.variances[:1])
        return self.densities(self._distinct[0], *nothing).squeeze(0)

    def _explained(self, word: int, places: Sequence[int]) -> float:
        """Return the log likelihood of a word's row with these positions, less that with none."""
        key = word, *places
        if key not in self._known:
            rows, of_words = self._distinct
            row = int(of_words[word])
            means, variances = (value[list(places)].sum(0, keepdim=True) for value in (self.errors, self.variances))
            self._known[key] = float(self.densities(rows[row : row + 1], means, variances) - self._without[row])
        return self._known[key]


@dataclass(frozen=True)
class NoisyRows(RowLikelihood):
    """The likelihood of rows with normal noise."""

    noise: float
    """Variance of the noise of an entry of a word's row."""
    read: Tensor
    """Rows [P, d] of the positions as they were sent."""
    others: float
    """Variance of the noise of an entry of these."""
    present: Tensor
    """Log likelihood [W] that a word brings by standing anywhere: unless noise fills all rows, no other was sent."""
    present_places: Tensor
    """The same of tokens [P] at the positions."""

    @property
    def complete(self) -> bool:
        """Report that noise fills the rows of all words."""
        return False

    def densities(self, rows: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Return the log densities [M, N] of rows whose errors have means [M, d] and variances [M, 1]."""
        spread = variances + self.noise
        return -(torch.cdist(means, rows).square() / spread + rows.shape[1] * spread.log()) / 2

    def free(self, rows: Tensor) -> Tensor:
        """Return the log densities [N] of rows whose errors have the variance that suits them best."""
        squares = rows.square().mean(1)
        spread = squares.clamp_min(self.noise)
        return -rows.shape[1] * (squares / spread + spread.log()) / 2


@dataclass(frozen=True)
class SentRows(RowLikelihood):
    """The likelihood of rows of which some entries were dropped; a share of the entries may have any value."""

    least: float
    """Size below which entries were dropped."""
    size: float
    """Root mean square of the entries that were sent."""
    noise: float
    """Variance of the noise of an entry of a word's row, before entries were dropped."""

    @property
    def complete(self) -> bool:
        """Report whether no entry is missing from the rows of words, so that no row is."""
        return not self.least

    def densities(self, rows: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Return the log densities [M, N] of rows whose errors have these means and variances [M, d]."""
        sent, odd = rows != 0, _normal(rows, self.size)
        found = []
        for mean, variance in zip(means, variances, strict=True):
            spread = (variance + self.noise).sqrt()
            value = _normal(rows - mean, spread)
            mixed = torch.where(sent, (1 - _ODD) * value + _ODD * odd, (1 - _ODD) * self._missing(mean, spread) + _ODD)
            found.append(mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log().sum(1))
        return torch.stack(found)

    def free(self, rows: Tensor) -> Tensor:
        """Return the log densities [N] of rows whose entries may have any value."""
        return torch.where(rows != 0, _normal(rows, self.size).log(), 0.0).sum(1)

    def _missing(self, mean: Tensor, spread: Tensor) -> Tensor:
        """Return the probabilities [d] that entries were dropped."""
        return _within(max(self.least, _SURELY * _ROUNDING * self.size), mean, spread)


@dataclass(frozen=True)
class NoisySentRows(SentRows):
    """The likelihood of rows with normal noise, of which small entries were dropped, and maybe large ones."""

    most: float
    """Size above which entries were dropped, if any were."""

    def free(self, rows: Tensor) -> Tensor:
        """Return the log densities [N] of rows whose entries have the variance that suits them best."""
        bounds = self.least, self.most
        return _sent_density(rows, _variances(rows, *bounds).clamp_min(self.noise), *bounds)

    def _missing(self, mean: Tensor, spread: Tensor) -> Tensor:
        return _within(self.least, mean, spread) + 1 - _within(self.most, mean, spread)


@dataclass(frozen=True)
class SignRows(RowLikelihood):
    """The likelihood of signs of rows; the errors' sizes are half normal."""

    def densities(self, rows: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Return the log densities [M, N] of rows whose errors have these means and variances [M, d]."""
        found = []
        for mean, variance in zip(means, variances, strict=True):
            tokens = variance / (1 - _HALF_NORMAL**2)
            up = torch.special.ndtr(mean / variance.clamp_min(torch.finfo(mean.dtype).tiny).sqrt())
            up = torch.where((mean.abs() / _HALF_NORMAL - tokens).abs() < 0.5, (mean > 0).to(up.dtype), up)
            right = torch.where(rows > 0, up, 1 - up)
            of_token = torch.where(rows == 0, _ODD, (1 - _ODD) * ((1 - _ODD) * right + _ODD / 2))
            without = torch.where(rows == 0, 1 - _ODD, _ODD / 2)
            found.append(torch.where(tokens > 0, of_token, without).log().sum(1))
        return torch.stack(found)

    def free(self, rows: Tensor) -> Tensor:
        """Return the log densities [N] of rows whose signs are as likely as not."""
        return (rows != 0).sum(1) * math.log(0.5)


@dataclass(frozen=True)
class NoisySignRows(SignRows):
    """The likelihood of signs of rows with normal noise; errors are in units of its deviation."""

    @property
    def complete(self) -> bool:
        """Report that noise fills the rows of all words."""
        return False

    def densities(self, rows: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Return the log densities [M, N] of rows whose errors have these means and variances [M, d]."""
        above = means / (variances + 1).sqrt()
        up, down = (torch.special.log_ndtr(side * above) for side in (1, -1))
        sent = rows.sign()
        return (up + down) @ sent.abs().T / 2 + (up - down) @ sent.T / 2


def row_likelihood(update: Mapping[str, Tensor], layout: TokenLayout, length: int) -> RowLikelihood | None:
    """Return the likelihood of one sentence of so many tokens at most; None where its rows do not show its errors."""
    if layout.positions is None or layout.predicts_words or layout.embedded_norm is not None:
        return None
    table, rows = (update.get(f"{path}.weight") for path in (layout.words, layout.positions))
    if table is None or rows is None or not bool(table.any()) or not bool(rows.any()):
        return None
    table, rows = table.double().nan_to_num(0, 0, 0).clone(), rows.double().nan_to_num(0, 0, 0)[layout.offset :]
    table[layout.padding] = 0
    read = rows[:length]
    # A sentence has no more words than positions.
    filled = int(table.any(1).sum()) > len(rows)
    if float(table.any(1).double().mean()) <= _FILLED and all(map(_is_rounded, (table, read))):
        # Rounding at random is noise with a mean of zero.
        noise, others = (float(part[part.any(1)].square().mean()) for part in (table, read))
        found = _noisy(table, read, noise, others)
        there = _sent(read)
        return replace(found, used=found.used + there, present=_sent(table), present_places=there)
    if are_signs(table[table != 0]) and are_signs(rows[rows != 0]):
        spread = (read != 0) * (1 - _HALF_NORMAL**2)
        half = SignRows(table, _HALF_NORMAL * read.sign(), spread, _sent(read))
        return _noisy_signs(half) if filled else half
    if not filled:
        # What was not sent of a position's row lies evenly between the bounds.
        least = _least(rows)
        size = float(table[table != 0].square().mean().sqrt())
        missing = (read == 0) * least**2 / 3
        return SentRows(table, read, missing, _sent(read), _least(table), size, (_ROUNDING * size) ** 2)
    if not bool(read.any()):
        return None
    if is_pruned([table]) or is_pruned([read[read.any(1)]]):
        return _noisy_sent(table, read)
    noise = float(table.square().mean(1).median())
    # Rows behind the longest text hold noise alone. Where there is none, the noise of words is taken for theirs.
    behind = rows[length:].square().mean(1)
    others = float(behind.mean()) if len(behind) else min(noise, float(read.square().mean(1).min()))
    others = max(others, _ROUNDING**2 * float(read.square().mean()))  # positions may have no noise
    return _noisy(table, read, noise, others)


def _noisy(table: Tensor, read: Tensor, noise: float, others: float) -> NoisyRows:
    """Return the likelihood of rows of words and of positions with noise of these variances."""
    signal = (read.square().mean(1, keepdim=True) - others).clamp_min(0)
    kept = signal / (signal + others)
    width = table.shape[1]
    # A variance that is fitted costs 1 (Akaike).
    used = (width * (signal / others - (1 + signal / others).log()) / 2).squeeze(1) - 1
    return NoisyRows(table, kept * read, kept * others, used, noise, read, others, 0 * table[:, 0], 0 * read[:, 0])


def _noisy_sent(table: Tensor, read: Tensor) -> NoisySentRows:
    """Return the likelihood of rows of words and of positions with noise, of which entries were dropped by size."""
    least, most = _bounds(table)
    # Few rows are of words in the sentence: those with the most, unless large entries were dropped.
    alone = table[table.square().sum(1).argsort()[: max(1, len(table) - len(read))]]
    noise = float(_variances(alone.flatten().unsqueeze(0), least, most))
    bounds = _bounds(read)
    whole = _variances(read, *bounds).clamp_min(noise)
    # A variance that is fitted costs 1 (Akaike).
    used = _sent_density(read, whole, *bounds) - _sent_density(read, torch.full_like(whole, noise), *bounds) - 1
    kept = ((whole - noise) / whole).unsqueeze(1)
    missing = (read == 0) * kept.square() * _dropped(whole, *bounds).unsqueeze(1)
    size = float(table[table != 0].square().mean().sqrt())
    return NoisySentRows(table, kept * read, kept * noise + missing, used, least, size, noise, most)


def _noisy_signs(half: SignRows) -> NoisySignRows:
    """Return the likelihood of signs with noise; the signal of a position is the one that explains a word best.

    Signs have no size, so that the signal is in units of the noise, which rows of positions and of words share.
    """
    used = -torch.ones_like(half.used)  # a variance that is fitted costs 1 (Akaike)
    nothing = torch.full_like(used, -torch.inf)
    best, most = NoisySignRows(half.table, half.errors, half.variances, used), nothing
    rows = half.table[half.table.any(1)]
    for signal in _SIGNALS:
        # The mean and the variance of a normal number of this variance, given the sign of it and noise.
        means = half.errors * signal / math.sqrt(signal + 1)
        variances = signal - means.square()
        found = best.densities(rows, means, variances).logsumexp(1)
        better = (found > most).unsqueeze(1)
        most = torch.maximum(most, found)
        best = replace(
            best,
            errors=torch.where(better, means, best.errors),
            variances=torch.where(better, variances, best.variances),
        )
    return best


def _bounds(rows: Tensor) -> tuple[float, float]:
    """Return the sizes of the smallest and the largest entry that was sent."""
    sent = rows[rows != 0].abs()
    return float(sent.min()), float(sent.max())


def _variances(rows: Tensor, least: float, most: float) -> Tensor:
    """Return the likeliest variances [N] of normal entries of rows [N, d], of which those between two sizes were sent.

    Rows of which little was sent may have small entries, or large ones.
    """
    best, most_likely = rows.new_zeros(len(rows)), rows.new_full((len(rows),), -torch.inf)
    for step in range(_FITS + 1):
        # From a sixth of the smallest to the largest size, in equal steps of the logarithm.
        tried = torch.full_like(best, (least / 6 * (6 * most / least) ** (step / _FITS)) ** 2)
        found = _sent_density(rows, tried, least, most)
        best = torch.where(found > most_likely, tried, best)
        most_likely = torch.maximum(most_likely, found)
    return best


def _sent_density(rows: Tensor, variances: Tensor, least: float, most: float) -> Tensor:
    """Return the log densities [N] of normal entries of rows [N, d], of which those between two sizes were sent."""
    sent = (rows != 0).sum(1)
    missing = _within(least, 0.0, variances.sqrt()) + 1 - _within(most, 0.0, variances.sqrt())
    found = -(rows.square().sum(1) / variances + sent * (2 * math.pi * variances).log()) / 2
    return found + (rows.shape[1] - sent) * missing.clamp_min(torch.finfo(rows.dtype).tiny).log()


def _dropped(variances: Tensor, least: float, most: float) -> Tensor:
    """Return the mean squares of normal numbers that are not between two sizes."""
    spread = variances.sqrt()
    small, large = least / spread, most / spread
    within = [_within(size, 0.0, spread) for size in (least, most)]
    tails = [2 * edge * _normal(edge, 1.0) for edge in (small, large)]
    share = (within[0] + 1 - within[1]).clamp_min(torch.finfo(spread.dtype).tiny)
    return variances * (within[0] - tails[0] + 1 - within[1] + tails[1]) / share


def _within(size: float, mean: Tensor | float, spread: Tensor) -> Tensor:
    """Return the probabilities that normal numbers are smaller than that."""
    low, high = (torch.special.ndtr((side * size - mean) / spread) for side in (-1, 1))
    return high - low


def _is_rounded(rows: Tensor) -> bool:
    """Report whether entries are whole multiples of the smallest, many of them none: rounded at random, not pruned."""
    sent = rows[rows.any(1)].abs()
    if not len(sent) or not is_pruned([sent]):
        return False
    levels = sent / sent[sent > 0].min()
    return bool((levels - levels.round()).abs().max() < _ROUNDING * levels.max())


def _normal(values: Tensor, spread: Tensor | float) -> Tensor:
    return (-(values / spread).square() / 2).exp() / (math.sqrt(2 * math.pi) * spread)


def _sent(rows: Tensor) -> Tensor:
    """Return the log likelihood [P] that tokens stand where rows were sent: without one there is nothing to send."""
    return -math.log(_ODD) * (rows != 0).sum(1).double()


def _least(rows: Tensor) -> float:
    """Return the size of the smallest entry that was sent, if entries of rows that were sent are missing; else 0."""
    sent = rows[rows.any(1)]
    return float(sent[sent != 0].abs().min()) if is_pruned([sent]) else 0.0
