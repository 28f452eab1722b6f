"""ROUGE of token sequences, and the names and numbers that a reconstruction discloses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

_Tokens = Sequence[Hashable]
_NUMBER = re.compile(r"^[+(]?\d[\d.,:/()-]*$")
_ADDRESS = re.compile(r"^[^@\s]+@[^@\s]+\.[a-z]+$", re.IGNORECASE)


def rouge_n(one: Sequence[Hashable], truth: Sequence[Hashable], n: int) -> float:
    """Return ROUGE-n F: the harmonic mean of precision and recall of runs of n tokens (Lin 2004).

    >>> rouge_n("a b c".split(), "a b d".split(), 1)
    0.6666666666666666
    """
    return rouge_n_pairs([one], [truth], n)[0][0]


def rouge_n_pairs(texts: Sequence[_Tokens], truths: Sequence[_Tokens], n: int) -> list[list[float]]:
    """Return ROUGE-n F of each text with each truth. A pair takes time only for the runs that both have.

    >>> rouge_n_pairs(["a b c".split(), ["d"]], ["a b d".split(), "b b".split()], 1)
    [[0.6666666666666666, 0.4], [0.5, 0.0]]
    """
    those, these = ([_runs(tokens, n) for tokens in each] for each in (texts, truths))
    truths_with: dict[_Tokens, list[tuple[int, int]]] = {}
    for i, runs in enumerate(these):
        for run, count in runs.items():
            truths_with.setdefault(run, []).append((i, count))
    sizes, table = [runs.total() for runs in these], list[list[float]]()
    for runs in those:
        shared, size = [0] * len(these), runs.total()
        for run, count in runs.items():
            for i, other in truths_with.get(run, ()):
                shared[i] += min(count, other)
        table.append([2 * both / (size + other) if both else 0.0 for both, other in zip(shared, sizes, strict=True)])
    return table


def _runs(tokens: _Tokens, n: int) -> Counter[_Tokens]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


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
