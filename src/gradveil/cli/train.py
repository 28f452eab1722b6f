"""`gradveil train`: federated training with every defence; what each costs in accuracy, bytes and time."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gradveil.audit.reader import read_training
from gradveil.core.words import percent
from gradveil.federated.engine import Standing
from gradveil.federated.run import describe, load_summaries, opened, run, spread
from gradveil.federated.setting import Cell, open_setting

DIVERGED = 1
"""Exit code of a training that diverged."""
_COLUMNS = ("defence", "accuracy", "to none", "rounds", "sent a round", "received a round", "s a round", "status")
_HELP = {
    "run": "A run file (TOML), or the name of a bundled training: digits.",
    "rounds": "How many rounds. A finished training goes on where it ended if this is raised.",
    "out": "Where results go; by default runs/NAME.",
    "set": "Any setting of the run file: --set clients=20 --set partition.kind=dirichlet. Repeatable.",
    "data": "Folder where data files lie (or set GRADVEIL_DATA).",
    "threads": "Threads of the computation; by default one for two cores. The same number gives the same bits.",
}


def train(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_HELP["run"])],
    rounds: Annotated[int | None, typer.Option(min=1, help=_HELP["rounds"])] = None,
    defence: Annotated[list[str] | None, typer.Option(help="Defence, instead of the file's. Repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed, instead of the file's. Repeatable.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier results and start again.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_HELP["data"])] = None,
    threads: Annotated[int | None, typer.Option(min=1, help=_HELP["threads"])] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON; progress goes to stderr.")
    ] = False,
) -> int:
    """Train a model among many clients with every defence, and say what each costs in accuracy, bytes and time.

    Every round is written down. The same command again goes on where it stopped, and ends with the same bits.
    """
    overrides: dict[str, Any] = {"rounds": rounds, "device": device, "defences": defence or None, "seeds": seed or None}
    config = read_training(name, overrides, setting or ())
    torch.set_num_threads(threads or _threads())
    folder = out or Path("runs") / config.name
    console = Console(stderr=True, soft_wrap=True)
    told = open_setting(config, data_dir)
    try:
        info = describe(config, shlex.join(["gradveil", *sys.argv[1:]]), told.weights)
        with opened(folder, info, fresh):
            run(told, folder, lambda cell, now: _tell(console, cell, now, config.rounds))
    except KeyboardInterrupt:
        again = shlex.join(["gradveil", *(argument for argument in sys.argv[1:] if argument != "--fresh")])
        typer.echo(f"\nStopped. Every finished round is kept in {folder}. To go on:\n  {again}", err=True)
        raise
    summaries = load_summaries(folder)
    if as_json:
        typer.echo(json.dumps(summaries, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(summaries))
    return DIVERGED if any(row["status"] == "diverged" for row in summaries) else 0


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)  # threads that have to share a core wait for each other


def _tell(console: Console, cell: Cell, now: Standing, rounds: int) -> None:
    last = now.records[-1]
    parts = [f"{cell.title}, seed {cell.seed}: round {last.number} of {rounds}", f"accuracy {percent(last.accuracy)}"]
    if last.validation_loss is not None:
        parts.append(f"validation loss {last.validation_loss:.4f}")
    ended = "" if now.status == "running" else f" ({now.status})"
    console.print(f"{', '.join(parts)}, {last.seconds:.1f} s{ended}", highlight=False)


def table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the defences side by side; the accuracy is that after the round with the lowest validation loss."""
    out = Table(box=None, pad_edge=False)
    for title in (
        "defence",
        "accuracy",
        "to none",
        "rounds",
        "sent a round",
        "received a round",
        "s a round",
        "status",
    ):
        out.add_column(title, justify="left" if title in ("defence", "status") else "right")
    rows = spread(summaries)
    base = next((row["accuracy"] for row in rows if row["defence"] == "none"), None)
    for row in rows:
        wide = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.2f}"
        own = row["defence"] == "none" or base is None
        out.add_row(
            row["defence"],
            f"{100 * row['accuracy']:.2f}%{wide}",
            "" if own else f"{100 * (row['accuracy'] - base):+.2f}",
            f"{row['rounds']:.0f}",
            _volume(row["bytes_up"]),
            _volume(row["bytes_down"]),
            f"{row['seconds']:.1f}",
            ", ".join(row["statuses"]),
        )
    return out


def _volume(count: float) -> str:
    """Write bytes for people.

    >>> _volume(900), _volume(1_234_567)
    ('900 B', '1.23 MB')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
