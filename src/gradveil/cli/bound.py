"""`gradveil bound`: the error that no attacker can stay below, without attacking anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gradveil.audit.bound import leaked, mse_bound
from gradveil.audit.cell import Address, raw_update
from gradveil.audit.reader import read
from gradveil.audit.rounds import observe
from gradveil.audit.scene import Scene, open_scene
from gradveil.audit.utility import worth
from gradveil.core.words import number, percent

_HELP = {
    "run": "A run file (TOML), or the name of a bundled run.",
    "set": "Any setting of the run file: --set model.name='\"lenet-zhu\"'. Repeatable.",
    "data": "Folder where data files lie (or set GRADVEIL_DATA).",
}

_UTILITIES = {"utility": "first_order_utility", "2nd order": "second_order_utility"}


def bound(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_HELP["run"])],
    victims: Annotated[int | None, typer.Option(help="How many victims the information is averaged over.")] = None,
    defence: Annotated[list[str] | None, typer.Option(help="Defence, instead of the file's. Repeatable.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_HELP["data"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a defence.")] = False,
) -> int:
    """Tell how large the mean squared error of every attacker must be, for defences that add noise.

    It holds for images that are normal with the public images' spectrum; labels and the model's own randomness count as
    known. Of Bayesian Cramér-Rao and of mutual information the higher bound is told; the first needs a model without
    ReLU. Of other defences no bound is known. Beside it stands what is left of a step's worth: its utilities of first
    and of second order, 1 and -1 without a defence.
    """
    config = read(name, {"victims": victims, "defences": defence or None}, setting or ())
    torch.set_num_threads(1)
    rows = list(_rows(open_scene(config, data_dir)))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return 0
    console = Console(width=None if Console().is_terminal else 120, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    several = len({(row["client"], row["seed"]) for row in rows}) > 1
    numbers = ("MSE bound", "of guessing", *_UTILITIES)
    for header in ("defence", *(("client", "seed") if several else ()), *numbers, "by"):
        table.add_column(header, overflow="fold")
    for row in rows:
        where = [row["client"], str(row["seed"])] if several else []
        share = row["mse_bound"] / row["mse_prior"] if row["mse_bound"] is not None else None
        left = [number(row[key]) for key in _UTILITIES.values()]
        why = row["by"] or row["unbounded"]
        table.add_row(row["defence"], *where, number(row["mse_bound"]), percent(share), *left, why)
    console.print(table)
    told = "No attacker can have a lower mean squared error (pixels in [0, 1]) in expectation, if images are normal "
    told += "with the public images' spectrum. Guessing: the mean image, for which no update is needed. Utility: what "
    told += "a small step along what is sent lowers the loss by, in units of an undefended one; minus its mean square."
    console.print(told, style="dim")
    return 0


def _rows(scene: Scene) -> Iterator[dict[str, Any]]:
    config = scene.config
    for seed in config.seeds:
        for index, settings in enumerate(config.client):
            for text in scene.defences:
                client = scene.client(index, text, seed)
                address = Address("", index, text, "", seed)
                seen, truth = observe(scene, address, client, range(config.victims))
                found, why = leaked(scene, seed, client, seen, truth)
                limit = {"mse": None, "prior": None, "by": None} if why else mse_bound(scene, found, settings.examples)
                last = seen[-1]
                left = worth(last.update, raw_update(client, scene.undefended(index, seed), last.params, truth))
                yield {
                    "defence": text,
                    "client": settings.title,
                    "seed": seed,
                    "victims": config.victims,
                    "mse_bound": limit["mse"],
                    "mse_prior": limit["prior"],
                    "by": limit["by"],
                    "unbounded": why,
                    **{name: float(value.mean()) for name, value in left.items()},
                }
