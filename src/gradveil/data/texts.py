"""Texts with labels: Parquet and CSV files, lists of strings, a bundled sample, and the pieces they are cut into."""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.formatting import listing
from gradveil.data.dataset import Dataset, Splits
from gradveil.data.given_tokenizer import GivenTokenizer, padded_rows, read_tokenizer
from gradveil.data.tables import Halves, Values, label_of, label_problems, parsed, read_values, shared_out
from gradveil.data.word_pieces import LENGTH, WordPieces

FORM = "texts:"
"""Beginning of the name of a file with a column `text`: `texts:reviews.csv`."""
_COLUMNS = ("text", "sentence", "review", "content")
"""Names of the column with the texts."""


def is_texts(name: str) -> bool:
    """Report whether data of this name are a file with texts.

    >>> is_texts("texts:reviews.csv"), is_texts("patients.csv")
    (True, False)
    """
    return name.startswith(FORM)


def open_texts(
    name: str,
    data_dir: Path | None,
    label: str | None = None,
    source: str = "",
    tokenizer: str | None = None,
    tokens: int | None = None,
) -> Splits:
    """Load texts: the bundled `reviews`, `texts/NAME-{train,test}.parquet` in the data folder, or a file.

    Without a tokenizer's name, the vocabulary is learned from the public texts. Texts are cut after `tokens`, 32 if
    none are given. Of a single file every fourth text of each class is private.
    """
    halves = _halves(name, data_dir, label)
    column = next((one for one in _COLUMNS if one in halves.public), None)
    if column is None:
        what = f"has no column {' or '.join(_COLUMNS)}"
        raise fail(f"data {name!r}", what, f"rename one of: {', '.join(halves.public)}")
    target = label_of(halves.public, name, label)
    own = None if tokenizer is None else read_tokenizer(tokenizer, "tokenizer")
    source = source or f"{name}, as given by the user."
    return splits_of_texts(halves, name, column, target, source, own, tokens or LENGTH)


def splits_of_texts(
    halves: Halves,
    name: str,
    column: str,
    target: str,
    source: str,
    tokenizer: GivenTokenizer | None = None,
    tokens: int = LENGTH,
) -> Splits:
    """Make data of public and private texts with labels."""
    where, problems = f"data {name!r}", list[Problem]()
    if lacks := [each for each in (column, target) if each not in halves.private]:
        raise fail(where, f"has no {listing(lacks)} in its private texts", "give both files the same columns")
    for split, half in zip(("public", "private"), halves, strict=True):
        wrong = next((i for i, text in enumerate(half[column]) if not isinstance(text, str) or not text.strip()), None)
        if wrong is not None:
            problems.append(Problem(where, f"text {wrong} of the {split} ones is empty or no string", "remove it"))
        if not len(half[column]):
            problems.append(Problem(where, f"has no {split} texts", "give more"))
    problems += label_problems(halves, target, name, "texts")
    names = sorted({*halves.public[target]}, key=str)
    if strange := {*halves.private[target]} - {*names}:
        what = f"class {next(iter(strange))!r} is in the private texts only"
        problems.append(Problem(where, what, "split the texts so that each class is in both"))
    refuse(problems)
    if tokenizer is None:
        pieces = WordPieces.learned(halves.public[column], length=tokens)
        encode, space = pieces.encode, pieces.space()
    else:
        space = tokenizer.space(tokens, tokenizer.padding)

        def encode(texts: Sequence[str]) -> Tensor:
            return padded_rows(tokenizer.numbers(texts), tokens, tokenizer.padding, end=space.end)

    places = {value: place for place, value in enumerate(names)}
    parts = []
    for split, half in zip(("public", "private"), halves, strict=True):
        marks = tuple(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) for text in half[column])
        labels = torch.tensor([places[value] for value in half[target]])
        data = Dataset(
            f"{name}/{split}", encode(half[column]), labels, tuple(map(str, names)), source=source,
            marks=marks, example=space,
        )  # fmt: skip
        parts.append(data)
    return Splits(*parts)


def _halves(name: str, data_dir: Path | None, label: str | None) -> Halves:
    if name == "reviews":
        return Halves(*(_bundled(part) for part in ("public", "private")))
    if is_texts(name):
        rest = name.removeprefix(FORM)
        path = next((p for p in (Path(rest), (data_dir or Path()) / rest) if p.is_file()), None)
        if path is None:
            raise fail(f"data {name!r}", "is no file here or in the data folder", "correct the path")
        values = read_values(path)
        return shared_out(values, label_of(values, name, label))
    homes = (data_dir or Path()) / "texts", (data_dir or Path()) / "text", data_dir or Path()
    pairs = [[home / f"{name}-{split}.parquet" for split in ("train", "test")] for home in homes]
    there = next((pair for pair in pairs if all(path.is_file() for path in pair)), None)
    if there is None:
        remedy = f"set --data-dir (or GRADVEIL_DATA) to a folder with text/{name}-train.parquet and -test.parquet"
        raise fail(f"data {name!r}", "needs files, and they are not there", remedy)
    return Halves(*(read_values(path) for path in there))


def _bundled(part: str) -> Values:
    file = importlib.resources.files("gradveil.data") / f"reviews_{part}.csv.gz"
    return parsed(gzip.decompress(file.read_bytes()).decode(), "reviews")
