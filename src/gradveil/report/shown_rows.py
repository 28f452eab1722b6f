"""Rows of tables beside their reconstructions, cell by cell, and what leaks of each column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.result_rows import Row
from gradveil.core.formatting import percent
from gradveil.report.exhibits import Exhibit
from gradveil.report.pictures import OUTCOMES, outcome
from gradveil.spaces import TableColumn, TableSpace

SHOWN = 6
"""Rows of each defence on the page, at most."""
FIRST = 3
"""Rows of the run on the first screen."""


@dataclass(frozen=True)
class ColumnLeak:
    """How often a column comes back, next to two guesses that need no update."""

    name: str
    kind: str
    right: float
    usual: float
    """The best constant."""
    inferred: float
    """A linear model of the other columns, which have to be known."""
    certainty: float | None
    """How far the attack's restarts agree; None where it has one answer."""


@dataclass(frozen=True)
class ShownCell:
    """A true cell and its reconstruction, in words."""

    truth: str
    answer: str
    is_right: bool


@dataclass(frozen=True)
class ShownRow:
    """A private row with its reconstruction."""

    number: int
    outcome: str
    right: float
    cells: tuple[ShownCell, ...]


@dataclass(frozen=True)
class RowTable:
    """The leak of each column by the strongest attack on a defence, and the rows that come back best."""

    exhibit: Exhibit
    leaks: tuple[ColumnLeak, ...]
    rows: tuple[ShownRow, ...]
    first: tuple[ShownRow, ...]
    """The first rows of the run, whatever comes back of them."""

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [leak.name for leak in self.leaks]

    @property
    def exact(self) -> str:
        """Count the rows whose cells are all right."""
        scores = [scores for _, _, scores in self.exhibit.row.scores()]
        return f"{sum(bool(each.get('exact')) for each in scores)} of {len(scores)}"

    @property
    def surest(self) -> str:
        """State how many of the cells are right that the attack is surest of; empty where it has one answer."""
        surest = self.exhibit.row.info.get("surest")
        return f"{percent(surest['right'])} of its {surest['cells']:,} surest cells right" if surest else ""


def columns_of(info: Mapping[str, Any]) -> tuple[TableColumn, ...]:
    """Read the columns of a trial's record."""
    found = list[TableColumn]()
    for each in info.get("columns") or ():
        told: dict[str, Any] = {**each, "levels": tuple(each["levels"])}
        del told["right"]
        told.pop("certainty", None)
        found.append(TableColumn(**told))
    return tuple(found)


def shown_rows(exhibits: Sequence[Exhibit]) -> list[RowTable]:
    """Lay out the rows of each defence's strongest attack; nothing where the examples are no rows."""
    found = list[RowTable]()
    for exhibit in exhibits:
        row = exhibit.row
        if columns := columns_of(row.info):
            leaks = [
                ColumnLeak(
                    column.name,
                    "category" if column.levels else "number",
                    float(told["right"]),
                    column.usual,
                    column.inferred,
                    told.get("certainty"),
                )
                for column, told in zip(columns, row.info["columns"], strict=True)
            ]
            every = _rows(row, columns)
            best = sorted(every, key=lambda one: -one.right)[:SHOWN]
            found.append(RowTable(exhibit, tuple(leaks), tuple(best), tuple(every[:FIRST])))
    return found


def _rows(row: Row, columns: tuple[TableColumn, ...]) -> list[ShownRow]:
    kept = row.trial.images() or {}
    if "truth" not in kept or "reconstruction" not in kept:
        return []
    truths, answers = (kept[name].double().flatten(0, 1) for name in ("truth", "reconstruction"))
    right = TableSpace(columns).right(answers, truths)
    each = [(record, scores) for record in row.trial.records for scores in record["per_image"]]
    return [
        ShownRow(
            place + 1,
            OUTCOMES[outcome(each[place][1], str(each[place][0].get("status")))],
            float(each[place][1]["cells"]),
            tuple(_cells(columns, truths[place], answers[place], right[place])),
        )
        for place in range(len(each))
    ]


def _cells(columns: tuple[TableColumn, ...], truth: Tensor, answer: Tensor, right: Tensor) -> list[ShownCell]:
    return [
        ShownCell(column.words(float(t)), column.words(float(a)), bool(ok))
        for column, t, a, ok in zip(columns, truth, answer, torch.atleast_1d(right), strict=True)
    ]
