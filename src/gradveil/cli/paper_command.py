"""`gradveil paper`: run the tables of the five papers, and show the printed numbers beside ours."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand

from gradveil.cli.shared_options import DataDirOption, FreshOption

if TYPE_CHECKING:
    from gradveil.papers import CostEstimate, TableOverview

paper = typer.Typer(no_args_is_help=True, help="Run the papers' tables, and compare the printed numbers with ours.")

_SCALES = ("quick", "standard", "paper")
_ONLY = ("attacks", "trainings")
_FORMATS = ("text", "markdown", "latex", "html", "json", "csv")
_NOT_SHOWN = "Quick scale shows that the table runs: with so few targets and iterations, no number can be compared."
_HELP = {
    "key": "A paper's key: gradveil paper list.",
    "table": "A table or figure of the paper: gradveil paper list KEY.",
    "scale": "quick: at most 90 s, shows that it runs. standard: fewer targets and rounds. paper: the paper's counts.",
    "rows": "Printed rows, instead of all: --rows none CVB. Repeatable.",
    "columns": "Printed columns, instead of all. Repeatable.",
    "settings": "Printed settings, such as a data set with a network, instead of all. Repeatable.",
    "set": "Set one key of the runs, such as target_clients=8. The command is recorded. Repeatable.",
    "records": "Folder of the records. Default: benchmarks/results/papers of the checkout.",
    "of_scale": "Only runs of this scale.",
    "attack": "Run this attack in place of the table's, such as adaptive, which fills the column of that name.",
    "only": "Leave the table's attacks or its trainings out.",
    "all": "Include groups of settings and of numbers in the text.",
    "format": "How to write the table. html draws a figure of the paper again.",
    "out": "File to write instead of the terminal.",
    "every": "Include numbers without a measurement.",
    "own": "Show only your own runs, and no records.",
    "record": "Write each finished row into the records.",
    "runs": "Folder of the paper runs.",
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
    every: Annotated[bool, typer.Option("--all", help=_HELP["all"])] = False,
    runs: RunsOption = _RUNS,
    records: RecordsOption = None,
) -> int:
    """List the papers' tables: what each shows, what it takes on this machine, and how far it is measured."""
    from gradveil.papers import find_study, studies
    from gradveil.runs.pool import cores

    _say_where_records_are(records)
    for study in [find_study(key)] if key else studies().values():
        typer.secho(study.key, bold=True)
        typer.echo("\n".join(textwrap.wrap(study.citation, 78)))
        tables = study.list(runs, records)
        shown = [each for each in tables if every or not each.entry.in_text]
        for each in shown:
            typer.echo("\n".join(_overview(each)))
        if left := len(tables) - len(shown):
            typer.echo(f"  {left} groups of numbers in the text: settings of the runs, or quoted (--all)")
        typer.echo()
    typer.echo(
        f"Times are for {cores()} cores: from recorded seconds, or (~) from a cost model.\n"
        "Compare: gradveil paper show KEY TABLE."
    )
    return 0


def _overview(each: TableOverview) -> list[str]:
    entry, compared = each.entry, each.compared
    lines = textwrap.wrap(f"{entry.name}: {entry.shows}", 78, initial_indent="  ", subsequent_indent="    ")
    if not each.command:
        reason = f"{len(compared.cells)} numbers, not run: {entry.reason}"
        return [*lines, *textwrap.wrap(reason, 78, initial_indent="    ", subsequent_indent="    ")]
    recorded = ", ".join(f"{count} at {scale}" for scale, count in compared.scales.items()) or "none"
    times = ", ".join(f"{scale} {_time(scale, cost)}" for scale, cost in each.times.items())
    facts = [f"{len(compared.cells)} numbers, measured: {recorded}", f"takes: {times}", compared.summary]
    indented = [line for fact in facts for line in textwrap.wrap(fact, 78, initial_indent="    ")]
    return [*lines, *indented, f"    $ {each.command}"]


def _time(scale: str, cost: CostEstimate) -> str:
    """Write a time; a quick run that would take longer than its limit goes on when it is called again."""
    return f"90 s of {cost.text}" if scale == "quick" and cost.seconds > 90 else cost.text


@paper.command(name="run", cls=WithLists)
def run_table(
    key: KeyArgument,
    table: TableArgument,
    scale: ScaleOption = "quick",
    rows: Annotated[list[str] | None, typer.Option(help=_HELP["rows"])] = None,
    columns: Annotated[list[str] | None, typer.Option(help=_HELP["columns"])] = None,
    settings: Annotated[list[str] | None, typer.Option(help=_HELP["settings"])] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    attack: Annotated[str, typer.Option("--attack", metavar="NAME", help=_HELP["attack"])] = "",
    only: Annotated[str | None, typer.Option(click_type=click.Choice(_ONLY), help=_HELP["only"])] = None,
    runs: RunsOption = _RUNS,
    data_dir: DataDirOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help=_HELP["workers"])] = None,
    fresh: FreshOption = False,
    record: Annotated[bool, typer.Option("--record", help=_HELP["record"])] = False,
    records: RecordsOption = None,
) -> int:
    """Run a table, row by row. The same command continues where it stopped and repeats no finished trial."""
    from gradveil.papers import find_study

    study = find_study(key)
    entry = study.table(table)
    if entry.reason:
        typer.echo(f"{entry.name}: nothing to run. {entry.reason}")
        return 0
    chosen: Any = {"rows": rows or (), "columns": columns or (), "settings": settings or (), "changes": changes or ()}
    chosen |= {"attack": attack, "only": only}
    cost = study.cost(table, scale, **chosen, workers=workers, records=records)  # type: ignore[arg-type]
    most = ", at most 90 s at a time" if scale == "quick" else ""
    typer.echo(f"{entry.name} at scale {scale}: {cost.runs} rows, about {cost.text}{most}.", err=True)
    if scale == "quick":
        typer.echo(_NOT_SHOWN, err=True)
    study.run(
        table,
        scale,  # type: ignore[arg-type]
        **chosen,
        runs=runs,
        data_dir=data_dir,
        workers=workers,
        fresh=fresh,
        record=record,
        records=records,
        tell=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"Compare: gradveil paper show {shlex.join([key, entry.name])}", err=True)
    return 0


@paper.command(name="show", cls=WithLists)
def show_table(
    key: KeyArgument,
    table: TableArgument,
    form: Annotated[str, typer.Option("--format", click_type=click.Choice(_FORMATS), help=_HELP["format"])] = "text",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help=_HELP["out"])] = None,
    every: Annotated[bool, typer.Option("--all", help=_HELP["every"])] = False,
    own: Annotated[bool, typer.Option("--own", help=_HELP["own"])] = False,
    rows: Annotated[list[str] | None, typer.Option(help=_HELP["rows"])] = None,
    columns: Annotated[list[str] | None, typer.Option(help=_HELP["columns"])] = None,
    settings: Annotated[list[str] | None, typer.Option(help=_HELP["settings"])] = None,
    runs: RunsOption = _RUNS,
    records: RecordsOption = None,
) -> int:
    """Show a table's printed numbers next to ours: which agree, which differ and why, and which were not run."""
    from gradveil.papers import find_study
    from gradveil.papers.table_formats import FORMATS, as_text

    if not own:
        _say_where_records_are(records)
    chosen: Any = {"rows": rows or (), "columns": columns or (), "settings": settings or ()}
    compared = find_study(key).compare(table, runs, records, own=own, **chosen)
    if compared.notice and (form != "text" or out):
        typer.echo(compared.notice, err=True)
    width = max(80, shutil.get_terminal_size().columns)
    text = as_text(compared, width, every) if form == "text" else FORMATS[form](compared)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text, "utf-8")
        typer.echo(f"{compared.summary}. Written: {out}")
    return 0


@paper.command(name="record")
def record_runs(
    key: KeyArgument,
    runs: RunsOption = _RUNS,
    scale: Annotated[str | None, typer.Option(click_type=click.Choice(_SCALES), help=_HELP["of_scale"])] = None,
    records: RecordsOption = None,
) -> int:
    """Write finished runs into the records: the scores of every image, and what each measurement took.

    It takes runs with the tables' own settings; what ran with --set is recorded by that command with --record.
    """
    from gradveil.papers import find_study
    from gradveil.papers.records import folder_to_write, write

    study = find_study(key)
    found = [each for each in study.local(runs) if each.scale == (scale or each.scale) and each.status == "complete"]
    if not found:
        typer.echo(f"Nothing recorded: {runs} has no finished run of {key} with the tables' own settings.", err=True)
        typer.echo("What ran with --set is recorded by its own command: repeat it with --record.", err=True)
        return 0
    for file in write(found, folder_to_write(records) / study.key):
        typer.echo(str(file))
    return 0


def _say_where_records_are(records: Path | None) -> None:
    from gradveil.papers.records import RECORDS, records_folder

    if records_folder(records) is None:
        where = f"in {RECORDS} of Gradveil's repository"
        typer.echo(f"No records here: they are {where}. Run from a checkout, or give --records DIR.", err=True)
