"""Private sentences and rows above their reconstructions, for the first screen of pages without pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.report.exhibits import Exhibit
from gradveil.report.marked_sentences import MarkedText, marked_sentences
from gradveil.report.shown_rows import FIRST, RowTable

COLUMNS = 6
"""Columns of a table, at most."""
Cell = tuple[MarkedText, ...]
"""One column of one example; a sentence has one column."""


@dataclass(frozen=True)
class OpeningExamples:
    """The first private examples, and what the strongest attack on each defence makes of them."""

    names: tuple[str, ...]
    """The names of the columns; empty for sentences."""
    more: int
    """The number of columns that are left out."""
    truths: tuple[tuple[Cell, ...], ...]
    """The private examples, by column."""
    answers: dict[int, tuple[tuple[Cell, ...], ...]]
    """The reconstructions by the number of the trial, then by column. Trials of other examples are left out."""


def opening_examples(shown: Sequence[Exhibit], tables: Sequence[RowTable]) -> OpeningExamples | None:
    """Return the first examples of the run with their reconstructions; None where it kept none."""
    names, more, truths = tuple[str, ...](), 0, tuple[tuple[Cell, ...], ...]()
    answers = dict[int, tuple[tuple[Cell, ...], ...]]()
    for exhibit in shown:
        table = next((each for each in tables if each.exhibit is exhibit), None)
        if table is not None and table.first:
            columns = range(min(COLUMNS, len(table.names)))
            mine = tuple(tuple((MarkedText(row.cells[at].truth, False),) for row in table.first) for at in columns)
            found = tuple(
                tuple((MarkedText(row.cells[at].answer, not row.cells[at].is_right),) for row in table.first)
                for at in columns
            )
            names, more = tuple(table.names[:COLUMNS]), len(table.names) - len(columns)
        elif pairs := marked_sentences(exhibit.row.info)[:FIRST]:
            mine = (tuple((MarkedText(" ".join(part.words for part in pair.truth), False),) for pair in pairs),)
            found = (tuple(pair.reconstruction for pair in pairs),)
        else:
            continue
        truths = truths or mine
        if mine == truths:
            answers[exhibit.row.number] = found
    return OpeningExamples(names, more, truths, answers) if truths else None
