"""`gradveil figure`: draw a figure for a paper from run directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click
import typer

from gradveil.cli.index import read_index
from gradveil.cli.shared_options import LabelOption, OrderOption, numbers_of

_KINDS: dict[str, Any] = read_index()["options"]["figures"]


def _words(key: str) -> str:
    """List the words of an option, kind by kind."""
    texts = [f"{kind}: {', '.join(entry[key])}" for kind, entry in _KINDS.items() if entry[key]]
    return "; ".join(texts)


_HELP = {
    "kind": "Kind of the figure. " + " ".join(f"{kind}: {entry['title'].lower()}." for kind, entry in _KINDS.items()),
    "metric": f"Metric that is shown. {_words('metrics')}.",
    "against": f"Horizontal axis. {_words('against')}.",
    "targets": "Target clients in a grid, such as 0,2,5-7. Default: the first eight images.",
    "header": "Replace a text: x=TEXT and y=TEXT of the axes, truth=TEXT of a grid. Repeatable.",
    "size": "single (3.4), double (7.0), a width such as 5.5, or width and height such as 3.4x2.2, in inches.",
    "out": "File of the figure. Default: RUN/KIND.pdf.",
}


def figure(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, such as runs/faces.")],
    kind: Annotated[
        str, typer.Option(metavar="KIND", click_type=click.Choice(list(_KINDS)), help=_HELP["kind"])
    ] = "grid",
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            click_type=click.Choice(["pdf", "svg", "png"]),
            help="pdf, svg or png. Default: that of --out, else pdf.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    metric: Annotated[str | None, typer.Option(help=_HELP["metric"])] = None,
    against: Annotated[str | None, typer.Option(help=_HELP["against"])] = None,
    defence: Annotated[list[str] | None, typer.Option(help="Show only this defence. Repeatable.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Show only this attack. Repeatable.")] = None,
    targets: Annotated[str | None, typer.Option(metavar="NUMBERS", help=_HELP["targets"])] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Show only this seed. Repeatable.")] = None,
    order: OrderOption = None,
    label: LabelOption = None,
    header: Annotated[list[str] | None, typer.Option(metavar="KEY=TEXT", help=_HELP["header"])] = None,
    title: Annotated[str | None, typer.Option(help="Title of the figure. Default: none.")] = None,
    size: Annotated[str, typer.Option(help=_HELP["size"])] = "single",
    font: Annotated[str, typer.Option(help="sans or serif.")] = "sans",
    dpi: Annotated[float, typer.Option(help="Dots per inch of png.")] = 300,
) -> int:
    """Draw a figure for a paper: pictures, leak against cost, progress or noise per layer.

    It needs the extra plot. Equal runs and options give equal bytes.
    """
    from gradveil.core.errors import Problem
    from gradveil.report.choices import pairs_of
    from gradveil.report.figures import draw_figure

    problems: list[Problem] = []
    chosen = numbers_of("targets", targets or "", problems)
    labels, headers = pairs_of("label", label or (), problems), pairs_of("header", header or (), problems)
    file = runs[0] / f"{kind}.{format or 'pdf'}" if out is None else out
    draw_figure(
        runs,
        kind,
        out=file,
        format=format,
        metric=metric,
        against=against,
        defences=defence or (),
        attacks=attack or (),
        targets=chosen,
        seeds=seed or (),
        order=order or (),
        labels=labels,
        headers=headers,
        title=title,
        size=size,
        font=font,
        dpi=dpi,
        problems=problems,
    )
    typer.echo(f"Figure: {file}")
    return 0
