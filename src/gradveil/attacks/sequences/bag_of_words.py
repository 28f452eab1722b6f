"""Where a search starts if a model's attention is not known: words whose rows changed, in the order of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.sequences.sentence_search import LogPrior, Sentence
from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.attacks.sequences.word_rows import WordRows, word_rows
from gradveil.nn.token_layout import TokenLayout
from gradveil.spaces.text_space import TextSpace

_SURE = 0.02
"""Least residual of a word whose row a position's row holds as a whole."""


@dataclass
class BagOfWords:
    """The words of one update of some examples, listed for each position; frequent public words if no row was sent."""

    update: Mapping[str, Tensor]
    layout: TokenLayout
    space: TextSpace
    examples: int
    count: int
    """Words that are listed where nothing says which the update holds."""
    device: torch.device
    prior: LogPrior | None = None
    public: Tensor | None = None
    """Public texts [N, T]."""
    rows: WordRows | None = field(init=False)
    words: Tensor = field(init=False)
    """The words [n] that are tried."""

    def __post_init__(self) -> None:
        """Read the rows."""
        self.rows = word_rows(self.update, self.layout, self.count)
        if self.rows is not None:
            self.words = self.rows.bag
            return
        used = torch.zeros(len(self.space.vocabulary), device=self.device)
        if self.public is not None:
            used = torch.bincount(self.public.long().flatten(), minlength=len(used)).float()
        used[self.space.padding] = -1
        self.words = used.topk(min(self.count, len(used) - 1)).indices

    def listed(self) -> Candidates:
        """Return the words of each position, those with the largest share of its row first."""
        length = self.space.shape[0]
        residuals = torch.ones(length, len(self.words), device=self.words.device)
        if self.rows is not None and self.rows.shares is not None:
            shares = self.rows.shares
            residuals[: len(shares)] = (1 - shares).clamp(_SURE, 1)
        order = residuals.argsort(dim=1, stable=True)
        return Candidates(self.words[order], residuals.gather(1, order))

    def ranked(self) -> list[Sentence]:
        """Return one text per example: the likeliest words of each position, each of them used about equally often."""
        length = self.space.shape[0]
        if self.rows is None or self.rows.shares is None:
            length = min(length, max(1, -(-len(self.words) // self.examples)))
        return [self._chained(length, place) for place in range(self.examples)]

    def proposed(self) -> list[Sentence]:
        """Return one text of each length."""
        return [self._chained(length, 0) for length in range(1, self.space.shape[0] + 1)]

    def _chained(self, length: int, place: int) -> Sentence:
        """Return a text: of each position the word of a rank, or those words that follow each other in public texts."""
        listed = self.listed().words[:length]
        if self.rows is not None and self.rows.shares is not None:
            return Sentence(listed[:, min(place, listed.shape[1] - 1)], 0.0, proved=False)
        left = self.words[place :: self.examples] if self.rows is not None else self.words
        left = left if len(left) else self.words
        chosen = [left[:1]]
        left = left[1:]
        for _ in range(length - 1):
            if not len(left):
                left = self.words
            best = 0 if self.prior is None else int(self.prior(chosen[-1].expand(len(left)), left).argmax())
            chosen.append(left[best : best + 1])
            left = torch.cat([left[:best], left[best + 1 :]])
        return Sentence(torch.cat(chosen), 0.0, proved=False)
