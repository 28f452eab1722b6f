"""Tokenizers of users: those of transformers and of tokenizers, and our own, as token numbers and a space of texts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import FOREIGN, fail
from gradveil.core.extras import needs
from gradveil.data.word_pieces import WordPieces
from gradveil.nn.models.text_library import local_source
from gradveil.spaces.text_space import TextSpace

CONTINUES = "##"
"""Beginning of pieces that continue a word, as vocabularies are written here."""
_PADDINGS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
"""Usual names of padding, and of the end of a text, which takes its place."""
_STARTS = ("Ġ", "▁")
"""Beginning of pieces that start a word, in vocabularies of bytes (GPT-2) and of SentencePiece (LLaMA)."""


@dataclass(frozen=True, eq=False)
class GivenTokenizer:
    """A tokenizer of transformers (`AutoTokenizer`), or of the package tokenizers."""

    inner: Any

    def numbers(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Return the token numbers of each text, without padding and cut nowhere."""
        if hasattr(self.inner, "encode_batch"):
            made = self.inner.encode_batch(list(texts), add_special_tokens=special)
            rows = [[number for number, kept in zip(one.ids, one.attention_mask, strict=True) if kept] for one in made]
        else:
            rows = self.inner(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
        return [list(map(int, row)) for row in rows]

    @property
    def padding(self) -> int:
        """Number of padding: the tokenizer's own, or the token that ends texts."""
        if hasattr(self.inner, "encode_batch"):
            own = (self.inner.padding or {}).get("pad_id")
            known = map(self.inner.token_to_id, _PADDINGS)
            return own if own is not None else next((number for number in known if number is not None), 0)
        special = (self.inner.pad_token_id, self.inner.eos_token_id)
        named = map(self.inner.get_vocab().get, _PADDINGS)
        return next((number for number in (*special, *named) if number is not None), 0)

    def space(self, length: int, padding: int, words: int | None = None) -> TextSpace:
        """Return the space of texts for a model with so many words (the tokenizer's), which pads with this number."""
        bare, whole = self.numbers(["a"], special=False)[0], self.numbers(["a"])[0]
        start = whole[0] if whole[: len(bare)] != bare else None
        end = whole[-1] if whole[-len(bare) :] != bare else None
        tokens = _written(self._tokens())
        return TextSpace((length,), named(tokens, words or len(tokens)), padding=padding, start=start, end=end)

    def _tokens(self) -> list[str]:
        if hasattr(self.inner, "encode_batch"):
            return [self.inner.id_to_token(number) or "" for number in range(self.inner.get_vocab_size())]
        return [token or "" for token in self.inner.convert_ids_to_tokens(list(range(len(self.inner))))]


def given_tokenizer(tokenizer: Any) -> GivenTokenizer | WordPieces:
    """Adopt a tokenizer; refuse what is none."""
    if isinstance(tokenizer, WordPieces | GivenTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        return read_tokenizer(str(tokenizer), "tokenizer")
    if not (hasattr(tokenizer, "encode_batch") or hasattr(tokenizer, "convert_ids_to_tokens")):
        remedy = "give one of transformers, such as AutoTokenizer.from_pretrained(...), or of the package tokenizers"
        raise fail("tokenizer", f"is {type(tokenizer).__name__}", remedy)
    return GivenTokenizer(tokenizer)


def read_tokenizer(name: str, where: str) -> GivenTokenizer:
    """Read a tokenizer from a folder, a `tokenizer.json`, or the user's cache; nothing is downloaded."""
    source = local_source(name, where)
    with needs("text", where):
        import transformers
    folder = Path(source)
    bare = not (folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file()
    file = folder / "tokenizer.json" if bare else folder
    try:
        if file.is_file():
            return GivenTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_file=str(file)))
        found = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    except FOREIGN as error:
        remedy = f"fetch it once: hf download {source}; or give a folder with tokenizer.json"
        raise fail(where, f"'{source}' is no folder with a tokenizer, and not in your cache", remedy) from error
    return GivenTokenizer(found)


def named(tokens: Sequence[str], words: int) -> tuple[str, ...]:
    """Return a name for each word of a model: a tokenizer's tokens, and numbers for those beyond."""
    return (*tokens[:words], *(f"[{number}]" for number in range(len(tokens), words)))


def padded_rows(
    rows: Sequence[Sequence[int]], length: int, padding: int, end: int | None = None, where: str | None = None
) -> Tensor:
    """Return token numbers [N, length]; longer texts are cut and keep their end token. With `where` a warning says so.

    >>> padded_rows([[1, 7, 8, 2], [1, 2]], 3, padding=0, end=2).tolist()
    [[1, 7, 2], [1, 2, 0]]
    """
    table = torch.full((len(rows), length), padding, dtype=torch.long)
    for kept, row in zip(table, rows, strict=True):
        kept[: len(row)] = torch.tensor(row[:length], dtype=torch.long)
        if len(row) > length and end is not None and row[-1] == end:
            kept[-1] = end
    if where is not None and (count := sum(len(row) > length for row in rows)):
        longest = max(map(len, rows))
        warnings.warn(f"{where}: {count} of {len(rows)} texts are cut: {longest} tokens become {length}", stacklevel=4)
    return table


def own_pieces(pieces: WordPieces, length: int | None, texts: Sequence[str]) -> WordPieces:
    """Return our own tokenizer for texts of a length: that of the longest of these, if none is given."""
    return replace(pieces, length=length or max(len(pieces.cut(text)) + 2 for text in texts))


def _written(tokens: Sequence[str]) -> list[str]:
    """Write a vocabulary as pieces of words: those that continue a word start with ##."""
    mark = next((mark for mark in _STARTS if any(token.startswith(mark) for token in tokens)), None)
    if mark is None:
        return list(tokens)
    letters = _letters() if mark == _STARTS[0] else {}

    def written(token: str) -> str:
        if token.startswith("<") and token.endswith(">"):
            return token
        word = token.removeprefix(mark)
        if letters and all(letter in letters for letter in word):
            word = bytes(letters[letter] for letter in word).decode("utf-8", "replace")
        return word if token.startswith(mark) else CONTINUES + word

    return [written(token) for token in tokens]


def _letters() -> dict[str, int]:
    """Return the byte behind each letter of a byte-level vocabulary: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
