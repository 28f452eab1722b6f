"""A paper's cells beside ours: the measured number with its interval, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from gradveil.metrics import wilson
from gradveil.papers.records import RecordedMeasurement
from gradveil.papers.study import Cell, Study

AGREES, DIFFERS, UNEXPLAINED, NOT_RUN, TOO_FEW = "agrees", "differs", "unexplained", "not run", "too few"
LEAST = 8
"""Fewest images from which agreement is judged."""


@dataclass(frozen=True)
class ComparedCell:
    """A printed number, ours, and the result of comparing them."""

    cell: Cell
    status: str
    reason: str = ""
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval of a rate; one standard deviation either side of a mean."""
    record: RecordedMeasurement | None = None

    @property
    def count(self) -> int:
        """Number of images or trainings behind our number."""
        return len(self.record.scores) if self.record else 0


def compare(
    study: Study, table: str, measured: Mapping[tuple[str, str, str], RecordedMeasurement]
) -> list[ComparedCell]:
    """Compare every printed number of a table with our measurements."""
    entry = study.table(table)
    return [_compared(study, cell, entry.without_run, measured) for cell in study.cells_of(entry.name)]


def _compared(
    study: Study, cell: Cell, without_run: str, measured: Mapping[tuple[str, str, str], RecordedMeasurement]
) -> ComparedCell:
    wanted = study.measurement(cell)
    if wanted is None:
        return ComparedCell(cell, NOT_RUN, without_run or _unmeasured(cell))
    record = measured.get((wanted.run, wanted.defence, wanted.attack))
    if record is None:
        return ComparedCell(cell, NOT_RUN, "no record")
    if record.status != "complete" or not record.values(wanted.metric):
        return ComparedCell(cell, NOT_RUN, record.status, record=record)
    values = record.values(wanted.metric)
    scale = 100 if cell.unit == "%" else 1
    if wanted.metric == "recovered":
        ours = scale * fmean(values)
        low, high = (scale * end for end in wilson(sum(map(round, values)), len(values)))
    else:
        ours = scale * fmean(values)
        spread = scale * stdev(values) if len(values) > 1 else 0.0
        low, high = ours - spread, ours + spread
    assert cell.number is not None
    near = abs(ours - cell.number) <= max(study.content.metrics[cell.metric].tolerance, cell.spread or 0)
    if wanted.metric == "recovered":
        near = near or low <= cell.number <= high
    numbers = {"ours": ours, "low": low, "high": high, "record": record}
    if wanted.attack and len(values) < LEAST:
        return ComparedCell(cell, TOO_FEW, f"{len(values)} images, at least {LEAST} are compared", **numbers)
    if near:
        return ComparedCell(cell, AGREES, **numbers)
    known = study.deviation(cell)
    if known is None:
        return ComparedCell(cell, UNEXPLAINED, **numbers)
    reason = known.reason if known.tested else f"{known.reason} (supposed)"
    return ComparedCell(cell, DIFFERS, f"{reason}. Tested: {known.tested}" if known.tested else reason, **numbers)


def _unmeasured(cell: Cell) -> str:
    return "no number is printed" if cell.number is None else "nothing of ours measures this"
