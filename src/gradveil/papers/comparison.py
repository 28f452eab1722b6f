"""A paper's cells beside ours: the measured number with its interval, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from gradveil.metrics import wilson
from gradveil.papers.records import Record
from gradveil.papers.study import Cell, Study

AGREES, DIFFERS, UNEXPLAINED, NOT_RUN = "agrees", "differs", "unexplained", "not run"
TOO_FEW, DRAWN = "too few", "drawn only"
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
    record: Record | None = None

    @property
    def count(self) -> int:
        """Number of images or trainings behind our number."""
        return len(self.record.scores) if self.record else 0


def compare(study: Study, table: str, measured: Mapping[tuple[str, str, str], Record]) -> list[ComparedCell]:
    """Compare every number of a table with our measurements."""
    cells = [_measured(study, cell, measured) for cell in study.cells_of(study.table(table).name)]
    return [cell if cell.status else _judged(study, cell, cells) for cell in cells]


def _measured(study: Study, cell: Cell, measured: Mapping[tuple[str, str, str], Record]) -> ComparedCell:
    """Add our number to a cell; its status is empty where it can be compared."""
    wanted = study.measurement(cell)
    if wanted is None:
        return ComparedCell(cell, NOT_RUN, study.unmeasured(cell))
    record = measured.get((wanted.run, wanted.defence, wanted.attack))
    if record is None:
        return ComparedCell(cell, NOT_RUN, "no record")
    values = record.values(wanted.metric)
    if record.status != "complete" or not values:
        why = record.status if record.status != "complete" else f"no {wanted.metric} was recorded"
        return ComparedCell(cell, NOT_RUN, why, record=record)
    scale = 100 if cell.unit == "%" else 1
    statistic = study.content.metrics[cell.metric].statistic
    ours = scale * {"mean": fmean, "max": max, "min": min}[statistic](values)
    if wanted.metric == "recovered":
        low, high = (scale * end for end in wilson(sum(map(round, values)), len(values)))
    else:
        spread = scale * stdev(values) if len(values) > 1 and statistic == "mean" else 0.0
        low, high = ours - spread, ours + spread
    status, reason = "", ""
    if wanted.attack and len(values) < LEAST:
        status, reason = TOO_FEW, f"fewer than {LEAST} images are not compared"
    elif cell.number is None:
        status = DRAWN
    return ComparedCell(cell, status, reason, ours, low, high, record)


def _judged(study: Study, compared: ComparedCell, cells: Sequence[ComparedCell]) -> ComparedCell:
    """Give a measured cell its status."""
    wrong = _wrong_orders(study, compared, cells) if study.content.compare == "orders" else _wrong(study, compared)
    if not wrong:
        return replace(compared, status=AGREES)
    known = study.deviation(compared.cell)
    if known is None:
        return replace(compared, status=UNEXPLAINED, reason=wrong)
    tested = f"tested: {known.tested}" if known.tested else "supposed"
    return replace(compared, status=DIFFERS, reason=f"{known.reason} ({tested})")


def _wrong(study: Study, compared: ComparedCell) -> str:
    """Say how far our number is from the printed one, where it is further than the tolerance."""
    cell = compared.cell
    assert cell.number is not None
    assert compared.ours is not None
    metric = study.content.metrics[cell.metric]
    near = abs(compared.ours - cell.number) <= max(metric.tolerance, cell.spread or 0)
    if metric.ours == "recovered" and compared.low is not None and compared.high is not None:
        near = near or compared.low <= cell.number <= compared.high
    return "" if near else "the numbers differ"


def _wrong_orders(study: Study, compared: ComparedCell, cells: Sequence[ComparedCell]) -> str:
    """Name the rows of the same column that stand on the other side of ours than of the printed number."""
    cell, tolerance = compared.cell, study.content.metrics[compared.cell.metric].tolerance
    wrong = []
    for other in cells:
        same = all(getattr(other.cell, key) == getattr(cell, key) for key in ("table", "setting", "column", "metric"))
        if not same or other.status == TOO_FEW or other.cell.number is None or other.ours is None:
            continue
        assert cell.number is not None
        assert compared.ours is not None
        printed, ours = cell.number - other.cell.number, compared.ours - other.ours
        if abs(printed) > tolerance and abs(ours) > tolerance and (printed > 0) != (ours > 0):
            wrong.append(other.cell.row)
    return f"another order than {', '.join(wrong)}" if wrong else ""
