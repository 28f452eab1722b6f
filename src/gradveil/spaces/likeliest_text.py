"""The likeliest texts of some lengths in a model of word pairs: what a guess that knows the language alone says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def likeliest_texts(texts: Tensor, lengths: Sequence[int], padding: int, end: int | None = None) -> list[Tensor]:
    """Return the likeliest token numbers [T] of each length by word pairs that texts [N, T] hold, padded.

    If there is an end, a text ends there where some pairs lead to it.

    >>> texts = torch.tensor([[1, 5, 2, 0], [1, 5, 6, 2], [1, 5, 6, 2]])
    >>> [text.tolist() for text in likeliest_texts(texts, [3, 4], padding=0, end=2)]
    [[1, 5, 2, 0], [1, 5, 6, 2]]
    """
    # Words get numbers 0 to W - 1 in here. A pair is one number, before * W + after, so that `unique` counts pairs.
    words, numbered = texts.unique(return_inverse=True)
    before, after = numbered[:, :-1][texts[:, 1:] != padding], numbered[:, 1:][texts[:, 1:] != padding]
    edges, counts = torch.unique(before * len(words) + after, return_counts=True)
    sources, goals = edges // len(words), edges % len(words)
    totals = torch.zeros(len(words)).double().index_add(0, sources, counts.double())
    # log P(after | before) of each pair that occurs: an edge of the graph below.
    logs = (counts / totals[sources]).log()
    first = torch.bincount(numbered[:, 0], minlength=len(words)).double()
    # best[w]: the log probability of the likeliest path that ends with w (Viterbi); one for each number of words.
    best = (first / first.sum()).log()
    bests, arrived = [best], list[Tensor]()
    for _ in range(min(max(lengths, default=1), texts.shape[1]) - 1):
        scores = best[sources] + logs
        reached = torch.full_like(best, -torch.inf).scatter_reduce(0, goals, scores, "amax")
        usable = (scores == reached[goals]) & torch.isfinite(scores)
        if not bool(usable.any()):
            break
        back = torch.zeros(len(words), dtype=torch.long)
        # The edge by which the best path came; of equal ones the largest source, so that results repeat.
        arrived.append(back.scatter_reduce(0, goals[usable], sources[usable], "amax", include_self=False))
        best = reached
        bests.append(best)
    ends = (words == end).nonzero().flatten() if end is not None else words[:0]
    answers = []
    for length in lengths:
        steps = min(max(length - 1, 0), len(arrived))
        best = bests[steps]
        last = int(ends[0]) if len(ends) and bool(torch.isfinite(best[ends[0]])) else int(best.argmax())
        found = [last]
        for back in reversed(arrived[:steps]):
            found.append(int(back[found[-1]]))
        text = torch.full_like(texts[0], padding)
        text[: len(found)] = words[torch.tensor(found[::-1])]
        answers.append(text)
    return answers
