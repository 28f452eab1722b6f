"""`gradveil report` and `gradveil summary`: what lies in a run directory."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradveil.audit.store import Cell, Run, load_run
from gradveil.cli.audit import show_table
from gradveil.core.errors import fail
from gradveil.report import write_report
from gradveil.report.matrix import Matrix, as_latex, as_markdown, matrices
from gradveil.report.pareto import summaries_with_fronts
from gradveil.report.table import disarmed

NOTHING = 1
"""Exit code of a summary without a finished cell."""
_RUN = typer.Argument(metavar="RUN", help="A run directory, such as runs/faces.")


def _matrix_option(form: str) -> Any:
    told = f"Write a table of defences by attackers as {form}; - for stdout."
    return typer.Option(f"--{form.lower()}", metavar="FILE", help=told)


def report(
    run: Annotated[Path, _RUN],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; by default RUN/report.html.")] = None,
) -> int:
    """Write the report of an audit or a training as one HTML file that needs no network."""
    Console(soft_wrap=True, markup=False).print(f"Report: {write_report(run, out) if out else write_report(run)}")
    return 0


def summary(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, such as runs/faces.")],
    as_json: Annotated[bool, typer.Option("--json", help="One object a cell, as a JSON list.")] = False,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - for stdout.")] = None,
    markdown: Annotated[Path | None, _matrix_option("Markdown")] = None,
    latex: Annotated[Path | None, _matrix_option("LaTeX")] = None,
) -> int:
    """Sum runs up, cell by cell, however far they got; or defences down, attackers across, as a paper's table.

    Exit codes: 0 there are results; 1 no cell is finished, which standard error says with the command to go on; 2 wrong
    use, or a damaged run.
    """
    found = [load_run(run) for run in runs]
    rows = [row for run in found for row in _summed_up(run, len(found) > 1)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    for file, write in (
        (table, lambda: as_csv(rows)),
        (markdown, _as(as_markdown, found)),
        (latex, _as(as_latex, found)),
    ):
        if file is not None:
            _write(file, write())
    if not as_json and table is None and markdown is None and latex is None:
        for run in found:
            if run.cells:
                show_table(run.cells, run.info["config"], run.path)
    for run in found:
        if left := unfinished(run):
            typer.echo(f"{run.path}: {left}" if len(found) > 1 else left, err=True)
    return 0 if any(cell.failed is None for run in found for cell in run.cells) else NOTHING


def _summed_up(run: Run, named: bool) -> list[dict[str, Any]]:
    """Sum up a run's cells; among those of other runs each says where it lies."""
    rows = summaries_with_fronts(run.cells)
    return [{"run": str(run.path), **row} for row in rows] if named else rows


def _as(write: Callable[[Sequence[Matrix]], str], runs: Sequence[Run]) -> Callable[[], str]:
    return lambda: write(matrices(runs))


def unfinished(run: Run) -> str:
    """Say what is not done yet or failed, and how to go on; nothing where all is done."""
    planned = len(run.info["cells"])
    failed = sum(cell.broken for cell in run.cells)
    missing = planned - len(run.cells)
    counts = [f"{count} {what}" for count, what in ((missing, "not done yet"), (failed, "failed")) if count]
    done = planned - missing - failed
    told = f"{done or 'None'} of {planned} cells {'is' if done == 1 else 'are'} finished: {', '.join(counts)}."
    return f"{told} {_again(run)}" if counts else ""


def _again(run: Run) -> str:
    command, folder = str(run.info.get("command", "")), str(run.path)
    if not command.startswith("gradveil audit "):
        return f"To go on, call gradveil.audit again with the same arguments and out={folder!r}."
    usual = run.path == Path("runs") / str(run.info.get("name", ""))
    return f"To go on:\n  {command}" + ("" if usual else f" --out {shlex.quote(folder)}")


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Write summaries as CSV; statuses become one column each."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["statuses"]))
    flat = [
        {key: disarmed(value) for key, value in row.items() if key != "statuses"}
        | {f"status_{kind}": row["statuses"].get(kind, 0) for kind in kinds}
        for row in rows
    ]
    buffer = io.StringIO()
    names = (
        list(flat[0])
        if flat
        else [key for key in summaries_with_fronts([Cell({"failed": ""}, [])])[0] if key != "statuses"]
    )
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _write(file: Path, text: str) -> None:
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", "choose another file") from error
