"""A public model of a language: word pairs counted in auxiliary texts."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.sequences.sentence_search import LogPrior

_PAIRS = 0.7
"""Weight of the pairs against single words."""


def word_pairs(texts: Tensor, vocabulary: int, padding: int) -> LogPrior:
    """Return log(0.7 p(word | previous) + 0.3 p(word)), counted in token numbers [M, T].

    >>> prior = word_pairs(torch.tensor([[1, 2, 0], [1, 2, 3]]), vocabulary=4, padding=0)
    >>> bool(prior(torch.tensor([1]), torch.tensor([2])) > prior(torch.tensor([1]), torch.tensor([3])))
    True
    """
    kept = texts[texts != padding]
    # One more of each word, so that unseen ones have a probability.
    single = torch.bincount(kept, minlength=vocabulary).double() + 1
    single /= single.sum()
    before, after = texts[:, :-1], texts[:, 1:]
    used = after != padding
    # A pair is one number, and unique() sorts: pairs can be found by bisection.
    pairs, counts = torch.unique(before[used] * vocabulary + after[used], return_counts=True)
    firsts = torch.bincount(before[used], minlength=vocabulary).double().clamp_min(1)

    def log_prior(previous: Tensor, words: Tensor) -> Tensor:
        keys = previous * vocabulary + words
        places = torch.searchsorted(pairs, keys).clamp_max(len(pairs) - 1)
        hits = torch.where(pairs[places] == keys, counts[places], 0).double()
        return (_PAIRS * hits / firsts[previous] + (1 - _PAIRS) * single[words]).log().float()

    return log_prior
