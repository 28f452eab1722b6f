"""Texts that users pass: strings with a tokenizer, or token numbers, as tensors, arrays, lists, dictionaries, rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.data.given_tokenizer import CONTINUES, given_tokenizer, named, own_pieces, padded_rows
from gradveil.data.word_pieces import WordPieces
from gradveil.spaces.text_space import TextSpace

IDS, MASK = "input_ids", "attention_mask"
"""Names of token numbers and of their mask in a dictionary."""
_TEXTS = ("text", "texts", "sentence", "sentences", "review", "content")
_LABELS = ("labels", "label", "targets", "target", "y")


class GivenTexts(NamedTuple):
    """Texts as strings or as rows of token numbers, with labels if there are any."""

    rows: Sequence[str] | Sequence[Sequence[int]]
    labels: Tensor | None

    @property
    def strings(self) -> bool:
        """Whether the texts are strings."""
        return isinstance(self.rows[0], str)


@dataclass(frozen=True)
class Words:
    """Facts of a model that reads texts: the number of its words, its padding, and the most tokens of a text."""

    count: int
    padding: int
    positions: int | None = None


def read_texts(given: Any, where: str, limit: int | None = None) -> GivenTexts | None:
    """Read at most `limit` texts; None if the examples are of another kind.

    >>> read_texts((["a good film", "a bad one"], [1, 0]), "batch").rows
    ['a good film', 'a bad one']
    >>> read_texts({"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]}, "batch").rows
    [[5, 6]]
    """
    labels: Any = None
    pair = isinstance(given, list | tuple) and len(given) == 2 and not isinstance(given[1], Mapping | str)
    if pair and _rows(given[0], where) is not None:
        given, labels = given
    elif isinstance(given, Mapping):
        labels = next((given[name] for name in _LABELS if name in given), None)
    elif _rows(given, where) is None:
        given = _columns(given, limit, where)
        labels = None if given is None else given.get(_LABELS[0])
    rows = None if given is None else _rows(given, where)
    if not rows:
        return None
    known = None if labels is None or not len(labels) else _numbers(labels, where)
    if known is not None and len(known) != len(rows):
        raise fail(where, f"holds {len(known)} labels for {len(rows)} texts", "give one label for each text")
    return GivenTexts(rows[:limit], None if known is None else known[:limit])


def _numbers(labels: Any, where: str) -> Tensor | None:
    """Return one class number per text; None for rows of token numbers, which language models are trained with."""
    if np.ndim(labels[0]) > 0:
        return None
    if isinstance(labels[0], str):
        raise fail(where, "holds labels that are strings", "number the classes from 0")
    return torch.as_tensor(np.asarray(labels))


def encode_texts(
    given: GivenTexts, where: str, words: Words, tokenizer: Any = None, length: int | None = None
) -> tuple[Tensor, Tensor, TextSpace]:
    """Return token numbers [N, T], labels [N] and the space of texts for a model; labels are 0 if there are none."""
    own = None if tokenizer is None else given_tokenizer(tokenizer)
    if given.strings and own is None:
        remedy = "give tokenizer=AutoTokenizer.from_pretrained(...), that of the model, or token numbers"
        raise fail("tokenizer", "is missing: the texts are strings", remedy)
    if isinstance(own, WordPieces):
        own = own_pieces(own, length, list(map(str, given.rows)) if given.strings else [""])
        rows = own.encode(list(map(str, given.rows))).tolist() if given.strings else given.rows
        tokens, start, end = own.vocabulary, 1, 2
        rows = [[number for number in row if number != 0] for row in rows]
        space = TextSpace((1,), named(tokens, words.count), padding=words.padding, start=start, end=end)
    else:
        rows = own.numbers(list(map(str, given.rows))) if given.strings and own is not None else given.rows
        space = TextSpace((1,), named((), words.count), padding=words.padding)
        space = space if own is None else own.space(1, words.padding, words.count)
    table = [list(map(int, row)) for row in rows]
    _refuse_strange(table, words, where)
    longest = max(map(len, table))
    most = min(one for one in (length or longest, words.positions) if one is not None)
    shaped = TextSpace((most,), space.vocabulary, space.padding, space.start, space.end, CONTINUES)
    ids = padded_rows(table, most, words.padding, space.end, where)
    labels = torch.zeros(len(table), dtype=torch.long) if given.labels is None else given.labels
    return ids, labels.long(), shaped


def _refuse_strange(rows: Sequence[Sequence[int]], words: Words, where: str) -> None:
    """Refuse empty texts, and numbers that are no word of the model."""
    problems: list[Problem] = []
    if (empty := next((place for place, row in enumerate(rows) if not row), None)) is not None:
        problems.append(Problem(where, f"text {empty} holds no token", "remove it"))
    numbers = [number for row in rows for number in row]
    if numbers and not 0 <= min(numbers) <= max(numbers) < words.count:
        what = f"holds token numbers {min(numbers)} to {max(numbers)}, and the model has {words.count} words"
        problems.append(Problem(where, what, "give the tokenizer that belongs to the model"))
    refuse(problems)


def _rows(given: Any, where: str) -> list[Any] | None:
    """Return strings or lists of token numbers; None if these are no texts."""
    if isinstance(given, Mapping):
        if IDS in given:
            return _unpadded(given[IDS], given.get(MASK))
        name = next((name for name in _TEXTS if name in given), None)
        return None if name is None else _rows(given[name], where)
    if isinstance(given, str):
        return [given]
    if isinstance(given, Tensor):
        whole = not given.is_floating_point() and given.dtype not in (torch.uint8, torch.bool)
        return given.tolist() if given.ndim == 2 and whole else None
    if isinstance(given, np.ndarray):
        strings, whole = given.dtype.kind in ("O", "U"), given.dtype.kind in ("i", "u") and given.dtype != np.uint8
        return given.tolist() if (given.ndim == 1 and strings) or (given.ndim == 2 and whole) else None
    if hasattr(given, "tolist") and not isinstance(given, list | tuple):  # a column of a data frame
        return _rows(given.tolist(), where)
    if not isinstance(given, list | tuple) or not len(given):
        return None
    if all(isinstance(text, str) for text in given):
        return list(given)
    if isinstance(given[0], str) and isinstance(given, tuple):  # a text and its label
        return None
    if isinstance(given[0], str):
        place = next(place for place, text in enumerate(given) if not isinstance(text, str))
        raise fail(where, f"text {place} is {type(given[place]).__name__}", "give strings")
    rows = [row.tolist() if isinstance(row, Tensor | np.ndarray) and row.ndim == 1 else row for row in given]
    numbers = all(isinstance(row, list | tuple) and row and all(type(number) is int for number in row) for row in rows)
    return [list(row) for row in rows] if numbers else None


def _unpadded(ids: Any, mask: Any) -> list[list[int]]:
    """Return rows of token numbers without what the mask hides, on either side."""
    rows = [list(map(int, row)) for row in ids]
    if mask is None:
        return rows
    return [[number for number, kept in zip(row, seen, strict=True) if int(kept)]
            for row, seen in zip(rows, mask, strict=True)]  # fmt: skip


def _columns(given: Any, limit: int | None, where: str) -> dict[str, Any] | None:
    """Join rows of a data set, or batches of a loader, that are texts; None if they are none."""
    if not isinstance(given, Iterable) or isinstance(given, str | Tensor | np.ndarray):
        return None
    loader = isinstance(given, torch.utils.data.DataLoader)
    parts: list[GivenTexts] = []
    count = 0
    for part in islice(_each(given), limit):
        whole = part if loader else _single(part)
        found = None if whole is None else read_texts(whole, where)
        if found is None:
            return None
        parts.append(found)
        count += len(found.rows)
        if limit is not None and count >= limit:
            break
    if not parts:
        return None
    rows = [row for part in parts for row in part.rows]
    labels = [part.labels for part in parts if part.labels is not None]
    columns: dict[str, Any] = {_TEXTS[0] if isinstance(rows[0], str) else IDS: rows}
    return columns | ({_LABELS[0]: torch.cat(labels)} if len(labels) == len(parts) else {})


def _each(given: Any) -> Iterable[Any]:
    """Yield the rows of a data set, which may only know its length and its items."""
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return (given[place] for place in range(len(given)))
    return given


def _single(row: Any) -> Any:
    """Return a row as a batch of one; None if it is no text with a label."""
    if isinstance(row, Mapping):
        text = next((name for name in (IDS, *_TEXTS) if name in row), None)
        label = next((name for name in _LABELS if name in row), None)
        if text is None:
            return None
        hidden = {MASK: [row[MASK]]} if MASK in row else {}
        return {text: [row[text]], **hidden} | ({} if label is None else {label: [row[label]]})
    if isinstance(row, list | tuple) and len(row) == 2 and _rows([row[0]], "") is not None:
        return [row[0]], [row[1]]
    return None
