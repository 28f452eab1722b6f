"""`gradveil ledger`: the count of the privacy that a client spends, made and shown by its owner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradveil.core.errors import fail, refuse
from gradveil.core.words import plural
from gradveil.defences.privacy import NOTHING
from gradveil.federated.ledger import FOLDER, accounted, create, place, read
from gradveil.theory.accounting import PROBABILITY

_HELP = {
    "identity": "The client: the gradveil-identity of its SuperNode, or partition-NUMBER.",
    "training": "The training's name, as the app has it.",
    "folder": "Where the client keeps its files: the gradveil-folder of its SuperNode.",
    "delta": "Should be well below one over the number of examples.",
}

ledger = typer.Typer(no_args_is_help=True)
"""What can be done with a ledger."""

Identity = Annotated[str, typer.Option(help=_HELP["identity"])]
Name = Annotated[str, typer.Option("--training", help=_HELP["training"])]
Folder = Annotated[Path, typer.Option(help=_HELP["folder"])]


@ledger.callback()
def ledgers() -> None:
    """Count the differential privacy that a client in Flower spends, over all runs of a training.

    A client with a limit (epsilon) answers only where such a ledger is.
    """


def create_ledger(identity: Identity, training: Name, folder: Folder = Path(FOLDER)) -> int:
    """Make a client's ledger for a training. Do it once: what was spent before, it does not know."""
    file = place(folder.expanduser(), identity, training)
    create(file)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"Made {file}. It counts from zero; keep a copy of it, and never remove it while the data is used.")
    return 0


def show_ledger(
    identity: Identity,
    training: Name,
    folder: Folder = Path(FOLDER),
    delta: Annotated[float, typer.Option(help=_HELP["delta"])] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Report what a client has spent in a training: its rounds, and the epsilon of each unit."""
    refuse(PROBABILITY.problems("--delta", delta))
    file = place(folder.expanduser(), identity, training)
    found = read(file)
    if found is None:
        raise fail(str(file), "is missing", "make it, once for this training: gradveil ledger create")
    epsilon, texts = accounted(found.spent, delta)
    lost = {spent.unit for spent in found.spent} - set(epsilon)
    texts += [f"{NOTHING} of each {unit}: a round of this training was sent without" for unit in sorted(lost)]
    if as_json:
        values = {"file": str(file), "rounds": found.rounds, "epsilon": epsilon, "delta": delta}
        typer.echo(json.dumps({**values, "guarantee": "; ".join(texts)}, indent=1))
        return 0
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"{plural(found.rounds, 'round')} counted: {'; '.join(texts) or 'nothing is spent'}")
    console.print(str(file), style="dim")
    return 0
