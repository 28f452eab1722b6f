"""A paper's tables: the printed numbers, and the run behind each cell.

In a paper's folder `printed/numbers.csv` has one line per printed number, and `printed/tables.toml` maps rows to
defences, columns to attacks, and settings to runs.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradveil.core.errors import Problem, fail, refuse

_FOLDER = files("gradveil.papers")
Scale = Literal["quick", "standard", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "standard", "paper")


OF_TRAININGS = ("accuracy", "best_accuracy", "loss")
"""Numbers of a training; all others are scores of reconstructed images."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Section):
    """Cells of a table that are measured in the same way."""

    settings: dict[str, str]
    """The printed setting, and the run that measures it."""
    rows: dict[str, str]
    """The printed row, and its defence."""
    columns: dict[str, str]
    """The printed column, and its attack; empty for a training."""
    drawn: list[str] = []
    """Metrics that a figure draws without printing numbers."""
    scores: dict[str, str] = {}
    """The printed metric, and another score of ours than the usual one."""


class CellPattern(_Section):
    """Some cells. An omitted key stands for all of its kind."""

    table: str | None = None
    row: str | None = None
    column: str | None = None
    setting: str | None = None
    metric: str | None = None
    reason: str = ""

    def covers(self, cell: Cell) -> bool:
        """Return whether a cell is one of them."""
        keys = ("table", "row", "column", "setting", "metric")
        return all(getattr(self, key) in (None, getattr(cell, key)) for key in keys)


class Deviation(CellPattern):
    """Why some cells differ from the paper."""

    reason: str = ""
    """Why the numbers differ; empty if no reason was found."""
    tested: str = ""
    """How the reason was tested; empty for a supposed one."""
    tried: str = ""
    """What was tried without finding a reason."""

    @model_validator(mode="after")
    def _reason_or_tried(self) -> Deviation:
        if bool(self.reason) == bool(self.tried):
            raise ValueError("a deviation needs either a reason or what was tried to find one")
        return self

    @property
    def words(self) -> str:
        """The reason, and how certain it is."""
        if not self.reason:
            return f"unexplained; tried: {self.tried}"
        return f"{self.reason} ({f'tested: {self.tested}' if self.tested else 'supposed'})"


class TableEntry(_Section):
    """A table or figure of a paper."""

    name: str
    shows: str
    parts: list[Part] = []
    without_run: str = ""
    """Why nothing is measured for it, such as pictures without numbers."""
    settings_only: bool = False
    """Whether its numbers are the settings of the runs."""

    @model_validator(mode="after")
    def _measured_or_not(self) -> TableEntry:
        if [bool(self.parts), bool(self.without_run), self.settings_only].count(True) != 1:
            raise ValueError(f"{self.name} needs one of parts, without_run and settings_only")
        return self

    @property
    def reason(self) -> str:
        """Why nothing is measured for it; empty if something is."""
        return "settings of the runs" if self.settings_only else self.without_run

    @property
    def in_text(self) -> bool:
        """Whether it is a group of numbers in the text, or of settings."""
        return self.settings_only or self.name.lower().startswith("text")

    @property
    def is_figure(self) -> bool:
        """Whether the paper shows it as a figure."""
        return self.name.startswith("F")


class PrintedMetric(_Section):
    """How a printed metric is measured and compared."""

    ours: str
    """A score of each image (`ssim`), a rate of images (`recovered`, `label`), or a number of a training: `accuracy`,
    the `best_accuracy` of all rounds, or its `loss`."""
    tolerance: Annotated[float, Field(gt=0)]
    """Largest difference that counts as agreement, in the printed unit."""
    statistic: Literal["mean", "max", "min"] = "mean"


class RunEntry(_Section):
    """The run behind a setting: a run file's keys, without defences and attacks."""

    kind: Literal["audit", "train"] = "audit"
    settings: dict[str, Any]
    scales: dict[Scale, dict[str, Any]] = {}
    """Keys that a scale sets in this run only."""

    def at(self, scale: Scale, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings at a scale; `shared` are the keys that it sets in every run of this kind."""
        return merged(merged(self.settings, shared), self.scales.get(scale, {}))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes, tables merged key by key.

    >>> merged({"data": {"name": "mnist", "size": 32}}, {"data": {"public": 400}, "rounds": 1})
    {'data': {'name': 'mnist', 'size': 32, 'public': 400}, 'rounds': 1}
    """
    new = dict(settings)
    for key, value in changes.items():
        old = new.get(key)
        new[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return new


class _Tables(_Section):
    title: str
    authors: str
    year: str
    metrics: dict[str, PrintedMetric]
    runs: dict[str, RunEntry]
    scales: dict[Scale, dict[Literal["audit", "train"], dict[str, Any]]]
    """Keys that a scale sets in the runs of each kind, and what it cannot show."""
    compare: Literal["numbers", "orders"] = "numbers"
    """`orders`: the paper prints no number of images, so only the order of the rows of a column is compared."""
    tables: list[TableEntry]
    unmeasured: list[CellPattern] = []
    deviations: list[Deviation] = []


@dataclass(frozen=True)
class Cell:
    """One printed number."""

    table: str
    row: str
    column: str
    setting: str
    metric: str
    printed: str
    spread: float | None
    unit: str
    note: str

    @property
    def number(self) -> float | None:
        """The printed number; None for words and empty cells."""
        try:
            return float(self.printed)
        except ValueError:
            return None


@dataclass(frozen=True)
class Measurement:
    """What has to be run for a cell."""

    run: str
    defence: str
    attack: str
    metric: str
    """The name of our metric."""


@dataclass(frozen=True)
class Study:
    """One paper with its tables."""

    key: str
    content: _Tables
    cells: tuple[Cell, ...]

    @cached_property
    def tables(self) -> dict[str, TableEntry]:
        """The tables by name, in the paper's order."""
        return {table.name: table for table in self.content.tables}

    @property
    def citation(self) -> str:
        """Authors, year and title."""
        return f"{self.content.authors} {self.content.year}, {self.content.title}"

    def table(self, name: str) -> TableEntry:
        """Find a table by name, in any case."""
        for known, table in self.tables.items():
            if known.lower() == name.lower():
                return table
        near = get_close_matches(name, self.tables, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise fail("TABLE", f"{self.key} has no '{name}'", f"{hint}known: {', '.join(self.tables)}")

    def cells_of(self, table: str) -> list[Cell]:
        """List the numbers of a table: the printed ones, then those that a figure only draws."""
        printed = [cell for cell in self.cells if cell.table == table]
        drawn = [
            Cell(table, row, column, setting, metric, "", None, self._unit(metric), "drawn, not printed")
            for part in self.tables[table].parts
            for setting, row, column, metric in product(part.settings, part.rows, part.columns, part.drawn)
        ]
        return [*printed, *drawn]

    def chosen_cells(
        self, table: str, rows: Collection[str] = (), columns: Collection[str] = (), settings: Collection[str] = ()
    ) -> list[Cell]:
        """List the numbers of some rows, columns and settings of a table (printed names, none for all)."""
        cells, problems = self.cells_of(table), list[Problem]()
        for key, chosen in (("row", rows), ("column", columns), ("setting", settings)):
            known = list(dict.fromkeys(getattr(cell, key) for cell in cells))
            what, remedy = "is not printed in this table", f"known: {', '.join(known)}"
            problems += [Problem(f"--{key}s '{name}'", what, remedy) for name in chosen if name not in known]
        refuse(problems)
        return [
            cell
            for cell in cells
            if (not rows or cell.row in rows)
            and (not columns or cell.column in columns)
            and (not settings or cell.setting in settings)
        ]

    def _unit(self, metric: str) -> str:
        """Return the unit of values that are only drawn."""
        shares = ("recovered", "label", "accuracy", "best_accuracy")
        return "%" if metric in self.content.metrics and self.content.metrics[metric].ours in shares else ""

    def measurement(self, cell: Cell) -> Measurement | None:
        """Return how a cell is measured; None if it is not."""
        metric = self.content.metrics.get(cell.metric)
        drawn = cell.note == "drawn, not printed"
        if metric is None or (cell.number is None and not drawn):
            return None
        if not drawn and any(pattern.covers(cell) for pattern in self.content.unmeasured):
            return None
        for part in self.tables[cell.table].parts:
            if cell.setting in part.settings and cell.row in part.rows and cell.column in part.columns:
                run = part.settings[cell.setting]
                if (self.content.runs[run].kind == "train") != (metric.ours in OF_TRAININGS):
                    continue
                score = part.scores.get(cell.metric, metric.ours)
                return Measurement(run, part.rows[cell.row], part.columns[cell.column], score)
        return None

    def unmeasured(self, cell: Cell) -> str:
        """Return why nothing measures a cell."""
        known = next((pattern.reason for pattern in self.content.unmeasured if pattern.covers(cell)), "")
        if known or self.tables[cell.table].reason:
            return known or self.tables[cell.table].reason
        return "no number is printed" if cell.number is None else "nothing of ours measures this"

    def deviation(self, cell: Cell) -> Deviation | None:
        """Return the known reason why a cell differs."""
        return next((deviation for deviation in self.content.deviations if deviation.covers(cell)), None)


def keys() -> list[str]:
    """List the papers whose tables are described."""
    folders = (entry for entry in _FOLDER.iterdir() if entry.is_dir())
    return sorted(folder.name for folder in folders if (folder / "printed" / "tables.toml").is_file())


@cache
def read_printed(key: str) -> tuple[_Tables, tuple[Cell, ...]]:
    """Read the tables and printed numbers of a paper."""
    known = keys()
    if key not in known:
        near = get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise fail("KEY", f"no paper '{key}'", f"{hint}known: {', '.join(known)}")
    content = _Tables.model_validate(tomllib.loads((_FOLDER / key / "printed" / "tables.toml").read_text("utf-8")))
    lines = csv.DictReader(io.StringIO((_FOLDER / key / "printed" / "numbers.csv").read_text("utf-8")))
    return content, tuple(_cell(line) for line in lines)


def _cell(line: Mapping[str, str]) -> Cell:
    spread = float(line["spread"]) if line["spread"] else None
    texts = {name: line[name] for name in ("table", "row", "column", "setting", "metric", "unit", "note")}
    return Cell(**texts, printed=line["value"], spread=spread)
