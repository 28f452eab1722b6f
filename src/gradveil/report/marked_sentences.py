"""Private sentences next to their reconstructions, with what differs marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

SHOWN = 8
"""Sentences of a trial on the page."""


class MarkedText(NamedTuple):
    """Words, and whether the other text lacks them."""

    words: str
    differs: bool


class SentencePair(NamedTuple):
    """A private sentence and its reconstruction."""

    truth: tuple[MarkedText, ...]
    reconstruction: tuple[MarkedText, ...]


def marked_sentences(info: Mapping[str, Any]) -> list[SentencePair]:
    """Return the first sentences of a trial's record; none for other examples.

    >>> marked_sentences({"sentences": [{"truth": "a good film", "reconstruction": "a bad film"}]})[0].truth[1]
    MarkedText(words='good', differs=True)
    """
    pairs = [(one["truth"].split(), one["reconstruction"].split()) for one in info.get("sentences", ())[:SHOWN]]
    found: list[SentencePair] = []
    for truth, reconstruction in pairs:
        blocks = SequenceMatcher(None, truth, reconstruction, autojunk=False).get_opcodes()
        found.append(
            SentencePair(
                _marked(truth, [(kind != "equal", start, end) for kind, start, end, _, _ in blocks]),
                _marked(reconstruction, [(kind != "equal", start, end) for kind, _, _, start, end in blocks]),
            )
        )
    return found


def _marked(words: Sequence[str], blocks: Sequence[tuple[bool, int, int]]) -> tuple[MarkedText, ...]:
    return tuple(MarkedText(" ".join(words[start:end]), differs) for differs, start, end in blocks if end > start)
