"""`gradveil paper`: run the tables of the five papers, and show the printed numbers beside ours."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from gradveil.papers import ComparedCell, Record, Study

paper = typer.Typer(no_args_is_help=True, help="Run the papers' tables, and compare the printed numbers with ours.")

_SCALES = ("quick", "standard", "paper")
_HELP = {
    "key": "A paper's key: gradveil paper list.",
    "table": "A table or figure of the paper: gradveil paper list KEY.",
    "scale": "quick: minutes, shows that it runs. standard: fewer targets and rounds. paper: the paper's counts.",
    "rows": "Printed rows, instead of all: --rows none CVB. Repeatable.",
    "columns": "Printed columns, instead of all. Repeatable.",
    "settings": "Printed settings, such as a data set with a network, instead of all. Repeatable.",
    "set": "Set one key of the runs, such as target_clients=8. The command is recorded. Repeatable.",
    "records": "Folder of the records. Default: benchmarks/results/papers of the checkout.",
    "record": "Write each finished row into the records.",
    "runs": "Folder of the paper runs.",
    "data": "Folder where data files lie (or set GRADVEIL_DATA).",
    "workers": "Single-threaded worker processes. Default: one per CPU core.",
}
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=_HELP["key"], show_default=False)]
TableArgument = Annotated[str, typer.Argument(metavar="TABLE", help=_HELP["table"], show_default=False)]
RunsOption = Annotated[Path, typer.Option("--runs", metavar="DIR", help=_HELP["runs"])]
RecordsOption = Annotated[Path | None, typer.Option("--records", metavar="DIR", help=_HELP["records"])]
ScaleOption = Annotated[str, typer.Option(click_type=click.Choice(_SCALES), help=_HELP["scale"])]
_RUNS = Path("runs") / "papers"


class WithLists(TyperCommand):
    """A command whose repeatable options also take several values at once: `--rows none CVB`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each value that follows it."""
        lists = {name for each in self.params if getattr(each, "multiple", False) for name in each.opts}
        spread, option = list[str](), ""
        for word in args:
            if word.startswith("-"):
                option = word if word in lists else ""
                spread += [] if option else [word]
            else:
                spread += [option, word] if option else [word]
        return super().parse_args(ctx, spread)


@paper.command(name="list")
def list_tables(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help=_HELP["key"], show_default=False)] = None,
    runs: RunsOption = _RUNS,
    records: RecordsOption = None,
) -> int:
    """List the tables of the papers: what each shows, and how many of its numbers are measured."""
    from rich.console import Console
    from rich.table import Table

    from gradveil.papers import compare, find_study, studies

    console = Console(highlight=False)
    for study in [find_study(key)] if key else studies().values():
        measured = _measured(study, runs, records)
        console.print(f"{study.key}: {study.citation}", style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("table", "shows", "numbers", "result"):
            table.add_column(title, justify="right" if title == "numbers" else "left", overflow="fold")
        for entry in study.tables.values():
            cells = compare(study, entry.name, measured)
            result = entry.without_run or _counts(cells)
            table.add_row(entry.name, entry.shows, str(len(cells)), result)
        console.print(table)
        console.print()
    console.print("Run one: gradveil paper run KEY TABLE --scale quick. Compare: gradveil paper show KEY TABLE.")
    return 0


@paper.command(name="run", cls=WithLists)
def run_table(
    key: KeyArgument,
    table: TableArgument,
    scale: ScaleOption = "quick",
    rows: Annotated[list[str] | None, typer.Option(help=_HELP["rows"])] = None,
    columns: Annotated[list[str] | None, typer.Option(help=_HELP["columns"])] = None,
    settings: Annotated[list[str] | None, typer.Option(help=_HELP["settings"])] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    runs: RunsOption = _RUNS,
    data_dir: Annotated[Path | None, typer.Option(help=_HELP["data"])] = None,
    workers: Annotated[int | None, typer.Option(min=1, help=_HELP["workers"])] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier results and start again.")] = False,
    record: Annotated[bool, typer.Option("--record", help=_HELP["record"])] = False,
    records: RecordsOption = None,
) -> int:
    """Run a table, row by row. The same command continues where it stopped and repeats no finished trial."""
    from gradveil.papers import find_study, row_runs, run_row
    from gradveil.papers.records import folder_to_write, write

    study = find_study(key)
    todo = row_runs(study, table, scale, rows or (), columns or (), settings or (), changes or ())  # type: ignore[arg-type]
    into = folder_to_write(records) / study.key if record else None
    if not todo:
        typer.echo(f"{study.table(table).name}: nothing to run. {study.table(table).without_run}")
        return 0
    for number, each in enumerate(todo, 1):
        what = f"against {each.attack}" if each.attack else "training"
        typer.echo(f"[{number}/{len(todo)}] {each.run}: {each.defence}, {what}", err=True)
        measured = run_row(each, runs, data_dir, workers, fresh)
        if into is not None:
            write(measured, into)
    typer.echo(f"Compare: gradveil paper show {key} {json.dumps(study.table(table).name)}", err=True)
    return 0


@paper.command(name="show")
def show_table(
    key: KeyArgument,
    table: TableArgument,
    runs: RunsOption = _RUNS,
    records: RecordsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per printed number.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Include numbers without a measurement.")] = False,
) -> int:
    """Show a table's printed numbers beside ours, with a status for each."""
    from rich.console import Console
    from rich.table import Table

    from gradveil.papers import compare, find_study

    study = find_study(key)
    cells = compare(study, table, _measured(study, runs, records))
    if as_json:
        typer.echo(json.dumps([_as_object(cell) for cell in cells], indent=1))
        return 0
    console = Console(highlight=False)
    console.print(f"{study.citation}: {study.table(table).name}", style="bold")
    console.print(study.table(table).shows)
    lines = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("setting", "row", "column", "metric", "paper", "ours", "n", "scale", "status"):
        lines.add_column(title, justify="right" if title in ("paper", "ours", "n") else "left")
    for compared in cells:
        if every or compared.ours is not None:
            lines.add_row(*_line(compared))
    console.print(lines)
    console.print(_counts(cells))
    for reason in dict.fromkeys(f"{cell.status}: {cell.reason}" for cell in cells if cell.reason):
        console.print(reason)
    return 0


@paper.command(name="record")
def record_runs(
    key: KeyArgument,
    runs: RunsOption = _RUNS,
    scale: ScaleOption = "paper",
    records: RecordsOption = None,
) -> int:
    """Write finished runs into the records: the scores of every image, and what each measurement took."""
    from gradveil.papers import find_study
    from gradveil.papers.records import folder_to_write, write

    study = find_study(key)
    found = [record for record in _local(study, runs) if record.scale == scale and record.status == "complete"]
    for file in write(found, folder_to_write(records) / study.key):
        typer.echo(str(file))
    return 0


def _measured(study: Study, runs: Path, records: Path | None) -> dict[tuple[str, str, str], Record]:
    """Choose the best measurement of each place, recorded or local."""
    from gradveil.papers import best
    from gradveil.papers.records import RECORDS, read, records_folder

    folder = records_folder(records)
    if folder is None:
        where = f"in {RECORDS} of Gradveil's repository"
        typer.echo(f"No records here: they are {where}. Run from a checkout, or give --records DIR.", err=True)
    return best([*(read(folder / study.key) if folder else ()), *_local(study, runs)])


def _local(study: Study, runs: Path) -> list[Record]:
    """Read the local runs of a paper at every scale."""
    from gradveil.papers import row_runs

    everything = {
        each.folder: each
        for entry in study.tables.values()
        for scale in _SCALES
        for each in row_runs(study, entry.name, scale)
    }
    return [record for each in everything.values() for record in each.measured(runs)]


def _counts(cells: list[ComparedCell]) -> str:
    counts = Counter(cell.status for cell in cells)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _line(compared: ComparedCell) -> list[str]:
    cell = compared.cell
    spread = "" if cell.spread is None else f" ± {cell.spread:g}"
    ours = "" if compared.ours is None else f"{compared.ours:.4g} ({compared.low:.3g} to {compared.high:.3g})"
    scale = compared.record.scale if compared.record else ""
    texts = [cell.setting, cell.row, cell.column, cell.metric, f"{cell.printed}{spread}", ours]
    return [*texts, str(compared.count or ""), scale, compared.status]


def _as_object(compared: ComparedCell) -> dict[str, Any]:
    cell, record = compared.cell, compared.record
    told = {name: getattr(cell, name) for name in ("table", "setting", "row", "column", "metric", "unit")}
    return {
        **told,
        "paper": cell.number if cell.number is not None else cell.printed,
        "paper_spread": cell.spread,
        **{name: getattr(compared, name) for name in ("ours", "low", "high", "count", "status", "reason")},
        "baseline": record.baseline if record else None,
        "scale": record.scale if record else None,
        "date": record.date if record else None,
        "machine": record.machine if record else None,
    }
