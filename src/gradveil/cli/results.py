"""`gradveil report` and `gradveil summary`: what lies in a run directory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradveil.audit.store import load_run, summarise
from gradveil.cli.audit import show_table
from gradveil.core.errors import fail
from gradveil.report import write_report
from gradveil.report.table import disarmed

_RUN = typer.Argument(metavar="RUN", help="A run directory, such as runs/faces.")


def report(
    run: Annotated[Path, _RUN],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; by default RUN/report.html.")] = None,
) -> int:
    """Write the report of a run as one HTML file that needs no network."""
    load_run(run)
    Console(soft_wrap=True).print(f"Report: {write_report(run, out) if out else write_report(run)}")
    return 0


def summary(
    run: Annotated[Path, _RUN],
    as_json: Annotated[bool, typer.Option("--json", help="One object a cell, as a JSON list.")] = False,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - for stdout.")] = None,
) -> int:
    """Sum a run up, cell by cell, finished or not."""
    found = load_run(run)
    rows = [summarise(cell) for cell in found.cells]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    if table is not None:
        text = as_csv(rows)
        if str(table) == "-":
            typer.echo(text, nl=False)
        else:
            _write(table, text)
    if not as_json and table is None:
        show_table(found.cells)
        missing = len(found.info.get("cells", [])) - len(found.cells)
        if missing:
            Console(stderr=True).print(f"{missing} cells are not done yet: run the audit again to go on.")
    return 0


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Write summaries as CSV; statuses become one column each."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["statuses"]))
    flat = [
        {key: disarmed(value) for key, value in row.items() if key != "statuses"}
        | {f"status_{kind}": row["statuses"].get(kind, 0) for kind in kinds}
        for row in rows
    ]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", "choose another file") from error
