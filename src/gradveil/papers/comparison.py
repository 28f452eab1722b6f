"""A paper's cells beside ours: the measured number with its interval, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from gradveil.core.formatting import plural
from gradveil.metrics import METRICS, wilson
from gradveil.papers.records import Record
from gradveil.papers.study import Cell, Measurement, PrintedMetric, Study, TableEntry

AGREES, DIFFERS, NOT_RUN, DRAWN = "agrees", "differs", "not run", "drawn only"
PENDING = "pending"
"""Text for the strongest attack that knows the defence, until it is recorded."""
LEAST = 8
"""Fewest images from which agreement is judged."""
NO_RECORD = "no record"
"""Why a number is not run that a command would measure."""
RATES = ("recovered", "label")
"""Scores that are 0 or 1: their mean is a rate of images."""
Measured = Mapping[tuple[str, str, str], Record]


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
    floor: float | None = None
    """What the best guess reaches without the update; of a training, the share of the largest class."""
    adaptive: float | None = None
    """What the strongest attack that knows the defence reaches; None until it is recorded."""
    record: Record | None = None
    rate: bool = False
    """Whether it is a rate of images, and no mean."""

    @property
    def count(self) -> int:
        """Number of images or trainings behind our number."""
        return self.record.count if self.record else 0

    @property
    def attacks(self) -> bool:
        """Whether an attack measures it, and no training."""
        return self.record is not None and bool(self.record.attack)


@dataclass(frozen=True)
class ComparedTable:
    """A table of a paper with our measurements."""

    study: Study
    entry: TableEntry
    cells: tuple[ComparedCell, ...]
    hidden: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many numbers of local runs are not shown, because a record is of a larger scale or of more images."""

    @property
    def notice(self) -> str:
        """Say that the reader's own runs are not shown; nothing if they are."""
        own = ", ".join(f"{plural(count, 'number')} at {scale} scale" for scale, count in self.hidden.items())
        hidden = f"Your own runs ({own}) are not shown, but records of a larger scale or of more images"
        return f"{hidden}. To see yours: --own." if own else ""

    @property
    def counts(self) -> Counter[str]:
        """Number of cells of each status."""
        return Counter(cell.status for cell in self.cells)

    @property
    def summary(self) -> str:
        """The share that agrees, and the number of cells of each other status."""
        counts = self.counts
        judged = counts[AGREES] + counts[DIFFERS]
        agreed = [f"{counts[AGREES]} of {judged} compared agree ({counts[AGREES] / judged:.0%})"] if judged else []
        return ", ".join([*agreed, *(f"{counts[name]} {name}" for name in (DRAWN, NOT_RUN) if counts[name])])

    @property
    def reasons(self) -> list[str]:
        """Why cells differ or were not run, with the number of cells of each reason."""
        found = Counter(f"{cell.status}: {cell.reason}" for cell in self.cells if cell.reason)
        return [f"{reason} [{count} numbers]" if count > 1 else reason for reason, count in found.items()]

    @property
    def scales(self) -> dict[str, int]:
        """Number of measured cells at each scale."""
        return dict(Counter(cell.record.scale for cell in self.cells if cell.record and cell.ours is not None))


def compare(
    study: Study,
    table: str,
    measured: Measured,
    rows: Collection[str] = (),
    columns: Collection[str] = (),
    settings: Collection[str] = (),
) -> ComparedTable:
    """Compare the numbers of a table, or of some rows, columns and settings, with our measurements."""
    entry = study.table(table)
    chosen = set(study.chosen_cells(entry.name, rows, columns, settings))
    cells = [_measured(study, cell, measured) for cell in study.cells_of(entry.name)]
    shown = (each for each in cells if each.cell in chosen)  # a place in an order is one among all rows
    return ComparedTable(study, entry, tuple(each if each.status else _judged(study, each, cells) for each in shown))


def _measured(study: Study, cell: Cell, measured: Measured) -> ComparedCell:
    """Add our number to a cell; its status is empty where it can be compared."""
    wanted = study.measurement(cell)
    if wanted is None:
        return ComparedCell(cell, NOT_RUN, study.unmeasured(cell))
    record = measured.get((wanted.run, wanted.defence, wanted.attack))
    if record is None:
        return ComparedCell(cell, NOT_RUN, NO_RECORD)
    metric = study.content.metrics[cell.metric]
    values = record.values(wanted.metric)
    if record.status != "complete" or not values:
        why = record.status if record.status != "complete" else f"no {wanted.metric} was recorded"
        return ComparedCell(cell, NOT_RUN, why, record=record)
    scale = 100 if cell.unit == "%" else 1
    ours, low, high = (scale * value for value in _number(metric, wanted, values))
    floor = record.baseline if wanted.metric in ("recovered", "accuracy", "best_accuracy") else None
    known = ComparedCell(
        cell,
        "",
        "",
        ours,
        low,
        high,
        None if floor is None else scale * floor,
        _strongest(wanted.metric, [scale * value for value in _adaptive(metric, wanted, measured)]),
        record,
        wanted.metric in RATES,
    )
    if wanted.attack and len(values) < LEAST:
        return replace(known, status=NOT_RUN, reason=f"fewer than {LEAST} images are not compared")
    return replace(known, status=DRAWN) if cell.number is None else known


def _number(metric: PrintedMetric, wanted: Measurement, values: Sequence[float]) -> tuple[float, float, float]:
    ours = {"mean": fmean, "max": max, "min": min}[metric.statistic](values)
    if wanted.metric in RATES:
        return (ours, *wilson(sum(map(round, values)), len(values)))
    spread = stdev(values) if len(values) > 1 and metric.statistic == "mean" else 0.0
    return ours, ours - spread, ours + spread


def _strongest(metric: str, values: Sequence[float]) -> float | None:
    lower = metric in METRICS and not METRICS[metric].higher_is_better
    return (min if lower else max)(values, default=None)


def _adaptive(metric: PrintedMetric, wanted: Measurement, measured: Measured) -> Iterator[float]:
    """Yield the numbers of `adaptive` attacks on the defence of a cell."""
    for (run, defence, attack), record in measured.items():
        if (run, defence) == (wanted.run, wanted.defence) and wanted.attack and attack.startswith("adaptive"):
            values = record.values(wanted.metric)
            if record.status == "complete" and values:
                yield _number(metric, wanted, values)[0]


def _judged(study: Study, compared: ComparedCell, cells: Sequence[ComparedCell]) -> ComparedCell:
    """Give a measured cell its status."""
    wrong = _wrong_orders(study, compared, cells) if study.content.compare == "orders" else _wrong(study, compared)
    if wrong is None:
        return replace(compared, status=AGREES)
    known = study.deviation(compared.cell)
    reason = known.words if known else "unexplained; tried: nothing yet"
    return replace(compared, status=DIFFERS, reason=f"{wrong}{reason}")


def _wrong(study: Study, compared: ComparedCell) -> str | None:
    """Return a text (an empty one) where our number is further from the printed one than the tolerance."""
    cell = compared.cell
    assert cell.number is not None
    assert compared.ours is not None
    metric = study.content.metrics[cell.metric]
    near = abs(compared.ours - cell.number) <= max(metric.tolerance, cell.spread or 0)
    if metric.ours in RATES and compared.low is not None and compared.high is not None:
        near = near or compared.low <= cell.number <= compared.high
    return None if near else ""


def _wrong_orders(study: Study, compared: ComparedCell, cells: Sequence[ComparedCell]) -> str | None:
    """Name the rows of the same column that stand on the other side of ours than of the printed number."""
    cell, tolerance = compared.cell, study.content.metrics[compared.cell.metric].tolerance
    wrong = []
    for other in cells:
        same = all(getattr(other.cell, key) == getattr(cell, key) for key in ("table", "setting", "column", "metric"))
        if not same or other.status == NOT_RUN or other.cell.number is None or other.ours is None:
            continue
        assert cell.number is not None
        assert compared.ours is not None
        printed, ours = cell.number - other.cell.number, compared.ours - other.ours
        if abs(printed) > tolerance and abs(ours) > tolerance and (printed > 0) != (ours > 0):
            wrong.append(other.cell.row)
    return f"another order than {', '.join(wrong)}: " if wrong else None
