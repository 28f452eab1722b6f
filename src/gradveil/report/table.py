"""Tables of trials: columns, their values as text, and the same as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gradveil.core.formatting import DASH

R = TypeVar("R")
"""A row: a trial of an audit or of a training."""


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column: the value that sorts and goes to the CSV, and its text."""

    key: str
    title: str
    meaning: str
    get: Callable[[R], Any]
    show: Callable[[Any], str] = str
    numeric: bool = True
    missing_reason: Callable[[R], str | None] = lambda row: None
    """The reason why a row has no value, where it is known."""
    flag: Callable[[R], str] = lambda row: ""
    """A warning about the value; empty where there is none."""


@dataclass(frozen=True)
class TableCell:
    """One value of a table."""

    sort: str
    text: str
    flag: str = ""
    why: str = ""
    """The reason why there is no value."""


def text_column(key: str, title: str, meaning: str, get: Callable[[R], Any]) -> Column[R]:
    """Make a column of text, which sorts by the alphabet."""
    return Column(key, title, meaning, get, numeric=False)


def table_body(rows: Iterable[R], columns: Sequence[Column[R]]) -> list[list[TableCell]]:
    """Return the cells of these rows."""
    return [[_cell(row, column) for column in columns] for row in rows]


def _cell(row: R, column: Column[R]) -> TableCell:
    value = column.get(row)
    if value is None:
        return TableCell("", DASH, why=column.missing_reason(row) or "")
    return TableCell(repr(float(value)) if column.numeric else str(value), column.show(value), column.flag(row))


def as_csv(rows: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """Write rows as CSV, unrounded; a key that only some rows have is a column. `names` are those of an empty table."""
    lines = list(rows)
    columns = list(dict.fromkeys(key for line in lines for key in line)) or names
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in line.items()} for line in lines)
    return text.getvalue()


def _safe(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would run as a formula; None becomes empty."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return "" if value is None else value
