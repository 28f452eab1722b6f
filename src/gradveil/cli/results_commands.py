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
    LabelOption,
    OrderOption,
    SarifOption,
)

NOTHING = 1
"""Exit code of a summary without a finished trial."""
_RUNS = typer.Argument(metavar="RUN...", help="A run directory, such as runs/faces; and trainings to join it with.")
_JSON = "Print verdict, settings and trials as a JSON object; of trainings a list with one object per trial."
_CURVES = "Write every round of trainings as CSV; - for stdout."
_METRIC = (
    "Metric in a paper's table. Audits: verdict, identifiable, recovered, identified, ssim, psnr, mse, lpips, images, "
    "seconds; trainings: accuracy, difference, best-round, rounds, sent, received, guarantee. Repeatable."
)
_ONLY = "Show only this {} in a paper's table. Repeatable."
_HEADER = "Text of a column in a paper's table: defence, verdict or a metric; or caption=TEXT. Repeatable."


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


def assure(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of an audit, such as runs/faces.")],
    defence: Annotated[
        str | None, typer.Option(help="Defence that the statement is about. Default: the recommended one.")
    ] = None,
    training: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Training that measures the cost. Repeatable.")
    ] = None,
    epsilon_audit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of gradveil audit-epsilon --json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the files. Default: RUN.")] = None,
    pdf: Annotated[
        bool | None, typer.Option("--pdf/--no-pdf", help="Print a PDF. Default: if Chromium is installed.")
    ] = None,
) -> int:
    """Write the assurance statement of an audit: one A4 page for a privacy officer, as HTML, JSON and PDF.

    It restates the run for one defence, lists what was not examined, and has a block for the signature.
    """
    from rich.console import Console

    from gradveil.report import write_assurance

    audited = _audited(epsilon_audit) if epsilon_audit else []
    for path in write_assurance(run, out, defence, trainings=training or (), audited=audited, pdf=pdf):
        Console(soft_wrap=True, markup=False, highlight=False).print(f"Statement: {path}")
    return 0


def _audited(file: Path) -> list[dict[str, Any]]:
    """Read the output of `gradveil audit-epsilon --json`."""
    from gradveil.core.errors import fail

    remedy = "give the output of: gradveil audit-epsilon RUN --json"
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fail(str(file), f"cannot be read ({error})", remedy) from error
    entries = [entry for entry in found if _is_audit(entry)] if isinstance(found, list) else []
    if not entries or len(entries) < len(found):
        raise fail(str(file), "is no list of audits of epsilon", remedy)
    return entries


def _is_audit(entry: Any) -> bool:
    """Report whether a value is the audit of one defence, or the reason why there is none."""
    kinds = {"unit": str, "claimed": float, "at_least": float, "confidence": float, "delta": float, "violated": bool}
    if not isinstance(entry, dict) or not isinstance(entry.get("defence"), str):
        return False
    return "claimed" not in entry or all(isinstance(entry.get(key), kind) for key, kind in kinds.items())


def summary(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, such as runs/faces.")],
    every: EveryOption = False,
    explain: ExplainOption = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - for stdout.")] = None,
    curves: Annotated[Path | None, typer.Option(metavar="FILE", help=_CURVES)] = None,
    markdown: Annotated[Path | None, _sheet_option("Markdown")] = None,
    latex: Annotated[Path | None, _sheet_option("LaTeX")] = None,
    metric: Annotated[list[str] | None, typer.Option(help=_METRIC)] = None,
    defence: Annotated[list[str] | None, typer.Option(help=_ONLY.format("defence"))] = None,
    attack: Annotated[list[str] | None, typer.Option(help=_ONLY.format("attack"))] = None,
    order: OrderOption = None,
    label: LabelOption = None,
    header: Annotated[list[str] | None, typer.Option(metavar="KEY=TEXT", help=_HEADER)] = None,
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
    from gradveil.core.errors import Problem, refuse
    from gradveil.core.formatting import listing
    from gradveil.core.user_code import mixed
    from gradveil.report.choices import TableChoices, pairs_of
    from gradveil.report.paper_table import as_latex, as_markdown

    accepted = [Accepted(each) for each in accept or ()]
    check_accepted(fail_above, accepted)
    exports = Exports(sarif, junit)
    exports.check()
    problems: list[Problem] = []
    choices = TableChoices(
        defences=defence or (),
        attacks=attack or (),
        order=order or (),
        labels=pairs_of("label", label or (), problems),
        metrics=metric or (),
        headers=pairs_of("header", header or (), problems),
    )
    if choices != TableChoices() and markdown is None and latex is None:
        given = {
            "metric": metric,
            "defence": defence,
            "attack": attack,
            "order": order,
            "label": label,
            "header": header,
        }
        words = listing(f"--{key}" for key, value in given.items() if value)
        problems.append(Problem(words, "shape tables for papers", "add --latex FILE or --markdown FILE"))
    refuse(problems)
    results = open_runs(runs, curves is not None)
    if as_json:
        typer.echo(json.dumps(results.as_object(), indent=1))
    for file, text in (
        (table, results.as_csv),
        (curves, results.curves),
        (markdown, lambda: as_markdown(results.sheets(choices)) + results.recommendation()),
        (latex, lambda: as_latex(results.sheets(choices))),
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
