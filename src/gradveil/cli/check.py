"""`gradveil check`: whether a model can be audited with some data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.nn.check import check as check_model
from gradveil.nn.models import build
from gradveil.nn.paths import called

FOUND = 1


def check(
    model: Annotated[str, typer.Option(help="A model of `gradveil list models`, or pkg.module:factory.")],
    data: Annotated[str, typer.Option(help="Data of `gradveil list data`, hf:NAME, parquet:PATH or folder:PATH.")],
    size: Annotated[int, typer.Option(min=1, help="Side the images are resized to.")] = 32,
    channels: Annotated[int | None, typer.Option(help="1 for grey, 3 for colour; the data's own if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples to try it with.")] = 4,
    data_dir: Annotated[Path | None, typer.Option(help="Folder where data files lie (or set GRADVEIL_DATA).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the problems as JSON.")] = False,
) -> int:
    """Say whether a model can be audited with some data: every problem, with its place and its remedy."""
    splits = load(
        data, size=size, channels=channels, data_dir=data_dir, limit_public=max(batch, 64), limit_victims=batch
    )
    victims = splits.victims
    classes = len(victims.classes)
    built = build(
        model, channels=victims.channels, size=size, classes=classes, generator=Key(0, ("model",)).generator()
    )
    examples = Batch(victims.inputs[:batch], victims.targets[:batch])
    problems = check_model(built, examples, bounds=victims.bounds, classes=classes)
    if as_json:
        keys = ("where", "what", "remedy", "severity")
        typer.echo(json.dumps([{key: getattr(p, key) for key in keys} for p in problems], indent=1))
    else:
        console = Console(soft_wrap=True)
        for problem in problems:
            style = "red" if problem.severity == "error" else "yellow"
            console.print(Text.assemble((problem.severity, style), f": {called(built, problem.where)}: {problem.what}"))
            console.print(Text(f"    -> {problem.remedy}", style="green"))
        if not problems:
            console.print(f"No problems: {model} can be audited with {data}.")
    return FOUND if any(problem.severity == "error" for problem in problems) else 0
