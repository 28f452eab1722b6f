"""ROUGE of token sequences, and the names and numbers that a reconstruction discloses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

_NUMBER = re.compile(r"^[+(]?\d[\d.,:/()-]*$")
_ADDRESS = re.compile(r"^[^@\s]+@[^@\s]+\.[a-z]+$", re.IGNORECASE)


def rouge_n(one: Sequence[Hashable], truth: Sequence[Hashable], n: int) -> float:
    """Return ROUGE-n F: the harmonic mean of precision and recall of runs of n tokens (Lin 2004).

    >>> rouge_n("a b c".split(), "a b d".split(), 1)
    0.6666666666666666
    """
    those, these = (Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (one, truth))
    shared = (those & these).total()
    return 0.0 if not shared else 2 * shared / (those.total() + these.total())


def rouge_pairs(those: Sequence[Sequence[Hashable]], these: Sequence[Sequence[Hashable]], n: int) -> Tensor:
    """Compute ROUGE-n F of every pair of texts [A, B], in float64.

    >>> rouge_pairs(["abc", "aab"], ["abd", "aa"], 1).tolist()
    [[0.6666666666666666, 0.4], [0.6666666666666666, 0.8]]
    """
    sides = [[_numbered_runs(text, n) for text in texts] for texts in (those, these)]
    # A run counts in both texts as often as in the one that has fewer of it: so many of its numbered copies are shared.
    known = dict.fromkeys(run for runs in min(sides, key=len) for run in runs)
    columns = {run: column for column, run in enumerate(known)}
    held = [torch.zeros(len(side), len(columns)) for side in sides]
    for side, table in zip(sides, held, strict=True):
        places = [(row, columns[run]) for row, runs in enumerate(side) for run in runs if run in columns]
        table[tuple(torch.tensor(places, dtype=torch.long).reshape(-1, 2).T)] = 1
    one, other = (torch.tensor([len(runs) for runs in side], dtype=torch.float64) for side in sides)
    return 2 * (held[0] @ held[1].T).double() / (one[:, None] + other).clamp(min=1)


def _numbered_runs(text: Sequence[Hashable], n: int) -> list[tuple[Hashable, int]]:
    """Return the runs of n tokens, the copies of a run numbered."""
    seen: Counter[Hashable] = Counter()
    found: list[tuple[Hashable, int]] = []
    for start in range(len(text) - n + 1):
        run = tuple(text[start : start + n])
        seen[run] += 1
        found.append((run, seen[run]))
    return found


def rouge_l(one: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return ROUGE-L F: that of the longest common subsequence.

    >>> rouge_l("a x b c".split(), "a b c".split())
    0.8571428571428571
    """
    # above[i] is the length that the tokens so far have in common with the first i of the truth.
    above = [0] * (len(truth) + 1)
    for token in one:
        row = [0]
        for place, other in enumerate(truth):
            row.append(above[place] + 1 if token == other else max(row[-1], above[place + 1]))
        above = row
    return 0.0 if not above[-1] else 2 * above[-1] / (len(one) + len(truth))


def identifiers(tokens: Sequence[str], continuation: str = "##") -> list[tuple[str, ...]]:
    """Return the numbers, addresses and capitalised runs inside of a text, as runs of tokens.

    Detected by pattern: words of digits (dates, telephone and account numbers), e-mail addresses, and runs of
    capitalised words that do not start the text. Lower-cased vocabularies hold no capitals, so that only numbers and
    addresses are found there.

    >>> identifiers("on 12 May Ada Byron paid 300".split())
    [('12',), ('May', 'Ada', 'Byron'), ('300',)]
    """
    runs: list[tuple[str, ...]] = []
    named: list[str] = []
    for place, pieces in enumerate(_words(tokens, continuation)):
        word = "".join(piece.removeprefix(continuation) for piece in pieces)
        if place and word[:1].isupper() and word[1:].islower():
            named += pieces
            continue
        if named:
            runs.append(tuple(named))
            named = []
        if _NUMBER.match(word) or _ADDRESS.match(word):
            runs.append(tuple(pieces))
    return [*runs, tuple(named)] if named else runs


def disclosed(one: Sequence[str], truth: Sequence[str], continuation: str = "##") -> float:
    """Return the share of the truth's identifiers whose tokens the other text holds in order; NaN if it has none."""
    wanted = identifiers(truth, continuation)
    if not wanted:
        return float("nan")
    runs = {tuple(one[i : i + n]) for n in {len(run) for run in wanted} for i in range(len(one) - n + 1)}
    return sum(run in runs for run in wanted) / len(wanted)


def _words(tokens: Sequence[str], continuation: str) -> Iterator[list[str]]:
    """Yield the pieces of each word."""
    word: list[str] = []
    for token in tokens:
        if word and not token.startswith(continuation):
            yield word
            word = []
        word.append(token)
    if word:
        yield word
