"""A paper: list, run, compare and show its tables, from Python as on the command line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.formatting import plural
from gradveil.papers.comparison import NO_RECORD, ComparedTable, Measured, compare
from gradveil.papers.cost_estimate import CostEstimate, estimate, modelled, rough
from gradveil.papers.records import Record, best, folder_to_write, read, records_folder, write
from gradveil.papers.study import SCALES, Scale, Study, TableEntry, keys, read_printed
from gradveil.papers.table_formats import FORMATS
from gradveil.papers.table_run import Only, row_runs, run_row, stand_in_data
from gradveil.runs.pool import cores

RUNS = Path("runs") / "papers"
"""Where the runs of papers lie."""
ADAPTIVE = "adaptive"
"""The attack that knows the defence, for the column of that name."""
QUICK_SECONDS = 60.0
"""Time after which a table at quick scale starts no further run."""
Told = Callable[[str], None]


@dataclass(frozen=True)
class TableOverview:
    """What a table shows, how much of it is measured, and what it takes on this machine."""

    entry: TableEntry
    compared: ComparedTable
    times: dict[Scale, CostEstimate]
    command: str
    """The command that runs it; empty if nothing does."""


class PaperStudy(Study):
    """One paper with its tables, our runs of them and our records."""

    def measured(self, runs: Path = RUNS, records: Path | None = None) -> Measured:
        """Choose the best measurement of each place, recorded or local."""
        folder = records_folder(records)
        return best([*(read(folder / self.key) if folder else ()), *self.local(runs)])

    def local(self, runs: Path = RUNS) -> list[Record]:
        """Read the local runs at every scale."""
        tables = product(self.tables, SCALES, ("", ADAPTIVE))
        planned = (each for name, scale, attack in tables for each in row_runs(self, name, scale, attack=attack))
        return [record for each in {one.folder: one for one in planned}.values() for record in each.finished(runs)]

    def list(self, runs: Path = RUNS, records: Path | None = None) -> list[TableOverview]:
        """List the tables, with the time of each at each scale."""
        measured = self.measured(runs, records)
        return [self._overview(entry, measured) for entry in self.tables.values()]

    def _overview(self, entry: TableEntry, measured: Measured) -> TableOverview:
        times: dict[Scale, CostEstimate] = {
            scale: estimate(row_runs(self, entry.name, scale), measured) for scale in SCALES
        }
        name = f'"{entry.name}"' if " " in entry.name else entry.name
        command = "" if entry.reason else f"gradveil paper run {self.key} {name}"
        return TableOverview(entry, compare(self, entry.name, measured), times, command)

    def with_times(self, compared: ComparedTable, measured: Measured, workers: int | None = None) -> ComparedTable:
        """Say how long it takes to measure the numbers without a record."""
        left = {one.cell: self.measurement(one.cell) for one in compared.cells if one.reason == NO_RECORD}
        places = {(each.run, each.defence, each.attack) for each in left.values() if each}
        every = row_runs(self, compared.entry.name, "standard")
        others = [each for each in every if each.place not in places]
        left_seconds = estimate(every, measured, workers).seconds - estimate(others, measured, workers).seconds
        machine = plural(workers or cores(), "core")
        reason = f"{NO_RECORD}; at standard scale all of these take about {rough(left_seconds)} on {machine}"
        cells = (replace(one, reason=reason) if one.cell in left else one for one in compared.cells)
        return replace(compared, cells=tuple(cells))

    def cost(
        self,
        table: str,
        scale: Scale,
        *,
        rows: Collection[str] = (),
        columns: Collection[str] = (),
        settings: Collection[str] = (),
        changes: Sequence[str] = (),
        attack: str = "",
        only: Only | None = None,
        workers: int | None = None,
        runs: Path = RUNS,
        records: Path | None = None,
    ) -> CostEstimate:
        """Estimate the time of a table, or of some of its rows, columns and settings."""
        todo = row_runs(self, table, scale, rows, columns, settings, changes, attack, only)
        return estimate(todo, self.measured(runs, records), workers)

    def compare(
        self,
        table: str,
        runs: Path = RUNS,
        records: Path | None = None,
        *,
        own: bool = False,
        rows: Collection[str] = (),
        columns: Collection[str] = (),
        settings: Collection[str] = (),
    ) -> ComparedTable:
        """Put our numbers next to the printed ones of a table, or of some of its rows, columns and settings.

        `own` leaves the records out, so that local runs are shown which a record of a larger scale would replace.
        """
        mine = compare(self, table, best(self.local(runs)), rows, columns, settings)
        if own:
            return mine
        measured = self.measured(runs, records)
        shown = self.with_times(compare(self, table, measured, rows, columns, settings), measured)
        pairs = zip(mine.cells, shown.cells, strict=True)
        hidden = Counter(a.record.scale for a, b in pairs if a.record and a.ours is not None and a.record != b.record)
        return replace(shown, hidden=hidden)

    def show(
        self,
        table: str,
        format: str = "text",
        runs: Path = RUNS,
        records: Path | None = None,
        *,
        own: bool = False,
        rows: Collection[str] = (),
        columns: Collection[str] = (),
        settings: Collection[str] = (),
    ) -> str:
        """Write a compared table as text, markdown, latex, html, json or csv; its choices are those of `compare`."""
        if format not in FORMATS:
            raise fail("format", f"'{format}' is unknown", f"known: {', '.join(FORMATS)}")
        return FORMATS[format](
            self.compare(table, runs, records, own=own, rows=rows, columns=columns, settings=settings)
        )

    def run(
        self,
        table: str,
        scale: Scale = "quick",
        *,
        rows: Collection[str] = (),
        columns: Collection[str] = (),
        settings: Collection[str] = (),
        changes: Sequence[str] = (),
        attack: str = "",
        only: Only | None = None,
        runs: Path = RUNS,
        data_dir: Path | None = None,
        workers: int | None = None,
        fresh: bool = False,
        record: bool = False,
        records: Path | None = None,
        seconds: float | None = None,
        tell: Told = lambda line: None,
        progress: bool = True,
    ) -> list[Record]:
        """Run a table, row by row, and return the measurements; finished rows are only read.

        `attack`, such as `adaptive`, takes the place of the table's attacks; `only` leaves its attacks or its trainings
        out. `tell` gets a line per row, and `progress` prints the trials of a row. After `seconds` no further row
        starts; at quick scale the default is 60 s. Without the data files, quick scale uses bundled images: that shows
        that it runs, and is never recorded or compared. Rows that are refused are named at the end, after the others.
        """
        todo = row_runs(self, table, scale, rows, columns, settings, changes, attack, only)
        if scale == "quick":
            todo, seconds = sorted(todo, key=modelled), QUICK_SECONDS if seconds is None else seconds
            reasons = {name: each.missing_data(data_dir) for name, each in {one.data: one for one in todo}.items()}
            if missing := ", ".join(f"{name} ({reason})" for name, reason in sorted(reasons.items()) if reason):
                tell(f"NO DATA: {missing}. Bundled images take its place, which only shows that it runs.")
                todo, runs, record = [stand_in_data(each) for each in todo], runs / "bundled-images", False
        into = folder_to_write(records) / self.key if record else None
        workers = workers or (1 if seconds is not None else None)  # starting processes takes longer than such rows
        begun, done, begun_rows, refused = time.monotonic(), list[Record](), 0, dict[Problem, list[str]]()
        checked = set[str]()  # runs whose data and model another row has checked
        for number, each in enumerate(todo, 1):
            measured = [] if fresh else each.finished(runs)
            if not measured:
                past = time.monotonic() - begun
                if seconds is not None and begun_rows and past + min(modelled(each), max(seconds - 5, 0)) > seconds:
                    tell(f"{len(todo) - number + 1} of {len(todo)} rows are left: the same command continues.")
                    break
                tell(f"[{number}/{len(todo)}] {each.title}")
                begun_rows += 1
                try:
                    # No number of quick scale is quoted: rows of an older version of the table are recomputed.
                    recompute = fresh or (scale == "quick" and each.outdated(runs))
                    measured = run_row(each, runs, data_dir, workers, recompute, progress, each.run in checked)
                    checked.add(each.run)
                except GradveilError as error:  # the other rows run; all that is refused is said together
                    tell(f"REFUSED: {each.title}")
                    for problem in error.problems:
                        refused.setdefault(problem, []).append(each.title)
            done += measured
            if into is not None:
                write(measured, into)
        refuse([replace(one, where=f"{_few(titles)}: {one.where}") for one, titles in refused.items()])
        return done


def _few(titles: Sequence[str]) -> str:
    more = len(titles) - 3
    return "; ".join(titles[:3]) + (f" and {more} more rows" if more > 0 else "")


def studies() -> dict[str, PaperStudy]:
    """Read all papers whose tables are described."""
    return {key: find_study(key) for key in keys()}


def find_study(key: str) -> PaperStudy:
    """Read one paper by its key.

    >>> find_study("combining-stochastic-defenses").compare("T1").cells[0].cell.number
    0.95
    """
    return PaperStudy(key, *read_printed(key))
