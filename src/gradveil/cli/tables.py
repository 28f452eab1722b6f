"""`gradveil list`: what can be named in a run file."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradveil.attacks.presets import ATTACKS
from gradveil.audit.reader import bundled
from gradveil.data import DATASETS
from gradveil.defences import DEFENCES
from gradveil.nn.models import MODELS

Rows = list[dict[str, str]]


class Kind(StrEnum):
    """What can be listed."""

    attacks = "attacks"
    defences = "defences"
    models = "models"
    data = "data"
    runs = "runs"


def _attacks() -> Rows:
    return [{"name": n, "description": e.description, "citation": e.citation} for n, e in ATTACKS.items()]


def _defences() -> Rows:
    return [{"name": n, "description": e.description, "citation": e.citation} for n, e in DEFENCES.items()]


def _models() -> Rows:
    return [{"name": n, "description": e.description, "citation": e.citation} for n, e in MODELS.items()]


def _data() -> Rows:
    return [{"name": n, "description": e.description, "citation": e.source} for n, e in DATASETS.items()]


def _runs() -> Rows:
    # The first line of a bundled run file says what it shows.
    texts = {name: text.splitlines()[0].lstrip("# ") for name, text in bundled().items()}
    return [{"name": name, "description": text, "citation": ""} for name, text in texts.items()]


TABLES: dict[Kind, Callable[[], Rows]] = {
    Kind.attacks: _attacks,
    Kind.defences: _defences,
    Kind.models: _models,
    Kind.data: _data,
    Kind.runs: _runs,
}


def tables(
    kind: Annotated[Kind | None, typer.Argument()] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """List attacks, defences, models, data and bundled runs, with a line on each and whom to cite.

    Everything is listed unless one of them is named.
    """
    wanted = {kind: TABLES[kind]()} if kind else {each: make() for each, make in TABLES.items()}
    if as_json:
        typer.echo(json.dumps(wanted[kind] if kind else wanted, indent=1, ensure_ascii=False))
        return 0
    console = Console()
    for title, rows in wanted.items():
        table = Table(title=title.value, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("name", style="cyan", no_wrap=True)
        table.add_column("description", ratio=3)
        if any(row["citation"] for row in rows):
            table.add_column("citation", style="dim", ratio=2)
        for row in rows:
            table.add_row(*(row[column.header] for column in table.columns if isinstance(column.header, str)))
        console.print(table)
        console.print()
    return 0
