"""`gradveil account`: what a noise multiplier promises, or how much noise a promise takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, cast

import typer
from rich.console import Console

from gradveil.core.errors import GradveilError, fail
from gradveil.core.words import number
from gradveil.theory.accounting import Accountant, Sampling, Training, assumptions, epsilon, multiplier

_HELP = {
    "sigma": "Noise multiplier: the noise's standard deviation on the sum, over the clip norm.",
    "epsilon": "Look for the noise multiplier with this epsilon.",
    "steps": "Noisy sums (steps of DP-SGD, rounds of user-dp) in the whole training.",
    "rate": "Share of the examples (of the clients, for user-dp) that is in each sum.",
    "sampling": "poisson: each is in a sum with probability RATE; shuffled: fixed batches, no amplification.",
    "accountant": "pld is nearly exact; rdp is what most papers print.",
}


def account(
    sigma: Annotated[float | None, typer.Option(help=_HELP["sigma"])] = None,
    target: Annotated[float | None, typer.Option("--epsilon", help=_HELP["epsilon"])] = None,
    delta: Annotated[float, typer.Option(help="Should be well below one over the number of examples.")] = 1e-5,
    rate: Annotated[float, typer.Option(help=_HELP["rate"])] = 1.0,
    steps: Annotated[int, typer.Option(help=_HELP["steps"])] = 1,
    sampling: Annotated[str, typer.Option(metavar="poisson|shuffled", help=_HELP["sampling"])] = "poisson",
    accountant: Annotated[str, typer.Option(metavar="pld|rdp", help=_HELP["accountant"])] = "pld",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tell the epsilon of a noise multiplier, or the noise multiplier of an epsilon.

    It holds for noise that does not depend on the data, on sums of clipped vectors: `dp`, `user-dp`. Heuristic defences
    have no epsilon.
    """
    if (sigma is None) == (target is None):
        what = "needs exactly one of --sigma and --epsilon"
        raise fail("account", what, "give the one that you know: gradveil account --sigma 1 --steps 1000 --rate 0.01")
    with _as_options():
        training = Training(steps, rate, delta, cast(Sampling, sampling), cast(Accountant, accountant))
        noise = multiplier(target, training) if sigma is None and target is not None else cast(float, sigma)
        found = epsilon(noise, training)
    taken = assumptions(training)
    if as_json:
        values = {"sigma": noise, "epsilon": found if math.isfinite(found) else None, "delta": delta}
        values |= {"rate": rate, "steps": steps, "sampling": sampling, "accountant": accountant, "assumes": taken}
        typer.echo(json.dumps(values, indent=1))
        return 0
    console = Console(soft_wrap=True, markup=False)
    console.print(
        f"epsilon {number(found, 4) if math.isfinite(found) else 'infinite'} at delta {delta:g}", style="bold"
    )
    console.print(
        f"noise multiplier (sigma) {noise:.4g}: the noise's standard deviation on the sum, over the clip norm"
    )
    console.print(f"Assumed: {taken}.", style="dim")
    return 0


@contextmanager
def _as_options() -> Iterator[None]:
    """Name what is wrong as the user wrote it."""
    try:
        yield
    except GradveilError as error:
        raise GradveilError(replace(p, where=p.where.replace("privacy.", "--")) for p in error.problems) from error
