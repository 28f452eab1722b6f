"""`gradveil report` and `gradveil summary`: what lies in a run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradveil.audit.layout import TRAINING
from gradveil.cli.audit import EveryOption, ExplainOption, Shown
from gradveil.cli.summing import Audits, Trainings, is_audit
from gradveil.cli.train import warn
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.own import mixed
from gradveil.federated.reading import is_training
from gradveil.report import write_report
from gradveil.report.sheet import as_latex, as_markdown

NOTHING = 1
"""Exit code of a summary without a finished cell."""
_RUN = typer.Argument(metavar="RUN", help="A run directory, such as runs/faces.")
_JSON = "Print verdict, settings and trials as a JSON object; of trainings a list with one object per cell."
_CURVES = "Write every round of trainings as CSV; - for stdout."


def _sheet_option(form: str) -> Any:
    told = f"Write a table as {form}, of defences by attackers or by what each costs; - for stdout."
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
    every: EveryOption = False,
    explain: ExplainOption = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - for stdout.")] = None,
    curves: Annotated[Path | None, typer.Option(metavar="FILE", help=_CURVES)] = None,
    markdown: Annotated[Path | None, _sheet_option("Markdown")] = None,
    latex: Annotated[Path | None, _sheet_option("LaTeX")] = None,
) -> int:
    """Export results as a table, JSON, CSV, Markdown or LaTeX. Unfinished runs are included.

    Exit codes: 0 there are results; 1 no cell is finished, which standard error says with the command to go on; 2 wrong
    use, or a damaged run.
    """
    found = _opened(runs, curves is not None)
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=1))
    for file, write in (
        (table, found.as_csv),
        (curves, found.curves),
        (markdown, lambda: as_markdown(found.sheets())),
        (latex, lambda: as_latex(found.sheets())),
    ):
        if file is not None:
            _write(file, write())
    if not as_json and all(file is None for file in (table, curves, markdown, latex)):
        found.show(Shown(every, explain))
    warn(mixed(found.code()))
    for path, left in found.left():
        typer.echo(f"{path}: {left}" if len(runs) > 1 else left, err=True)
    return 0 if found.finished else NOTHING


def _opened(runs: Sequence[Path], curves: bool) -> Audits | Trainings:
    audits = [run for run in runs if is_audit(run)]
    if any(is_training(run) for run in runs if run not in audits):
        what = "is an audit, and others are trainings", "sum up the ones and the others, each with a command"
        refuse([Problem(str(run), *what) for run in audits])
        return Trainings(runs)
    refuse([_curveless(run) for run in audits if curves])
    return Audits(runs)


def _curveless(run: Path) -> Problem:
    if is_training(run / TRAINING):
        return Problem(str(run), "is an audit; its training lies within", f"name that: {run / TRAINING}")
    return Problem(str(run), "is an audit, and has no rounds of a training", "leave --curves out")


def _write(file: Path, text: str) -> None:
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", "choose another file") from error
