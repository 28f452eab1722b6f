"""Our own tokenizer: lower-cased words, cut into the longest pieces of a vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.spaces.text_space import TextSpace

LENGTH = 32
"""Tokens of a text, with its start and end; longer ones are cut."""
PIECES = 2048
"""Tokens of a vocabulary that is learned from the public texts."""
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
"""Tokens that are no words: padding, start, end, and what the vocabulary lacks."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class WordPieces:
    """A tokenizer: lower-cased words, cut into the longest pieces of a vocabulary.

    Learned vocabularies hold every letter, so that no word is lost, and the most frequent words.

    >>> pieces = WordPieces.learned(["a good film", "a bad film"], 30)
    >>> pieces.cut("A good fad")[:3]
    ['a', 'good', 'f']
    """

    vocabulary: tuple[str, ...]
    length: int = LENGTH

    @classmethod
    def learned(cls, texts: Iterable[str], size: int = PIECES, length: int = LENGTH) -> WordPieces:
        """Take the letters and the most frequent words of texts."""
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        letters = sorted({letter for word in counts for letter in word})
        small = [*letters, *(f"##{letter}" for letter in letters)]
        words = [word for word, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])) if len(word) > 1]
        return cls((*SPECIAL, *small, *words[: max(0, size - len(SPECIAL) - len(small))]), length)

    def cut(self, text: str) -> list[str]:
        """Cut a text into pieces."""
        known, pieces = self._numbers(), list[str]()
        for word in _WORD.findall(text.lower()):
            start = 0
            while start < len(word):
                prefix = "##" if start else ""
                ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in known)
                end = next(ends, None)
                if end is None:
                    pieces.append(SPECIAL[3])
                    break
                pieces.append(prefix + word[start:end])
                start = end
        return pieces

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return token numbers [N, length]: start, pieces, end, padding."""
        known = self._numbers()
        table = torch.zeros(len(texts), self.length, dtype=torch.long)
        for row, text in zip(table, texts, strict=True):
            numbers = [1, *(known[piece] for piece in self.cut(text)[: self.length - 2]), 2]
            row[: len(numbers)] = torch.tensor(numbers)
        return table

    def space(self) -> TextSpace:
        """Return the space of the texts."""
        return TextSpace((self.length,), self.vocabulary, padding=0, start=1, end=2)

    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.vocabulary)}
