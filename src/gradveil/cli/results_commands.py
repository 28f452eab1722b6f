"""`gradveil report` and `gradveil summary`: show the results of run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli.shared_options import (
    AcceptOption,
    Detail,
    EveryOption,
    ExplainOption,
    FailAboveOption,
    JunitOption,
    SarifOption,
)

NOTHING = 1
"""Exit code of a summary without a finished trial."""
_RUNS = typer.Argument(metavar="RUN...", help="A run directory, such as runs/faces; and trainings to join it with.")
_JSON = "Print verdict, settings and trials as a JSON object; of trainings a list with one object per trial."
_CURVES = "Write every round of trainings as CSV; - for stdout."


def _sheet_option(form: str) -> Any:
    text = f"Write a table as {form}: defences by attacks, or by costs; - for stdout."
    return typer.Option(f"--{form.lower()}", metavar="FILE", help=text)


def report(
    runs: Annotated[list[Path], _RUNS],
    out: Annotated[Path | None, typer.Option(help="File of the page. Default: RUN/report.html.")] = None,
) -> int:
    """Write the report of an audit or a training as one HTML file that needs no network.

    An audit and trainings on the same data with the same model are joined: accuracy against leak.
    """
    from rich.console import Console

    from gradveil.cli.run_results import split
    from gradveil.report import write_report

    run, trainings = split(runs)
    Console(soft_wrap=True, markup=False).print(f"Report: {write_report(run, out, trainings)}")
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
    sarif: SarifOption = None,
    junit: JunitOption = None,
    fail_above: FailAboveOption = None,
    accept: AcceptOption = None,
) -> int:
    """Export results as a table, JSON, CSV, Markdown, LaTeX, SARIF or JUnit XML. Unfinished runs are included.

    Audits and trainings on the same data with the same model are joined: the audits' tables get their accuracies.

    Exit codes: 0 there are results; 1 no trial is finished (standard error names the command to continue); 2 wrong
    use, or a damaged run. With --fail-above: those of `gradveil audit`, the worst of all runs.
    """
    from gradveil.audit.gate import Accepted
    from gradveil.cli.exports import Exports, check_accepted, write
    from gradveil.cli.run_results import open_runs
    from gradveil.cli.training_output import warn
    from gradveil.core.user_code import mixed
    from gradveil.report.paper_table import as_latex, as_markdown

    accepted = [Accepted(each) for each in accept or ()]
    check_accepted(fail_above, accepted)
    exports = Exports(sarif, junit)
    exports.check()
    results = open_runs(runs, curves is not None)
    if as_json:
        typer.echo(json.dumps(results.as_object(), indent=1))
    for file, text in (
        (table, results.as_csv),
        (curves, results.curves),
        (markdown, lambda: as_markdown(results.sheets()) + results.recommendation()),
        (latex, lambda: as_latex(results.sheets())),
    ):
        if file is not None:
            write(file, text())
    outcomes = results.outcomes(fail_above, accepted) if exports.asked or fail_above is not None else []
    exports.write(outcomes)
    if not as_json and all(file is None for file in (table, curves, markdown, latex, sarif, junit)):
        results.show(Detail(every, explain))
    warn(mixed(results.code()))
    for path, left in results.left():
        typer.echo(f"{path}: {left}" if len(runs) > 1 else left, err=True)
    if fail_above is not None:
        return max(each.exit_code for each in outcomes)
    return 0 if results.finished else NOTHING
