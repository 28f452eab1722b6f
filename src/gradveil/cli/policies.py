"""How the result of a search for a policy of ATS is shown: a table, what it means, and what to do with it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.core.words import number, plural
from gradveil.defences.ats import spelled
from gradveil.tune.policies import NONE

_MEANING = (
    "privacy: how much gradients on the way from noise to the transformed image resemble those to match, from 0 to 1; "
    "lower is better. again: the same on other images and draws, since the best of many are also the luckiest of many. "
    "utility: how well an untrained network tells the transformed images apart; higher is better.",
    "Both are proxies. Nobody was attacked: an attacker who knows the policy may undo it, which no score foresees. "
    "`gradveil audit` measures what comes back, `gradveil train` what it costs in accuracy.",
)


def show(found: Mapping[str, Any], run: Sequence[str], weights: str | None, file: Path) -> None:
    """Print the best policies beside the controls, and say plainly what they are worth. `run` are a command's words."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in ("defence", "privacy", "again", "utility"):
        table.add_column(header, justify="left" if header == "defence" else "right", no_wrap=True)
    for header in ("filter", "what it does"):
        table.add_column(header, overflow="fold")
    for style, rows in (("dim", found["controls"]), ("", found["best"])):
        for row in rows:
            passes = "passes" if row["passes"] else "too low"
            what = "images as they are" if row["policy"] == NONE else spelled(row["policy"])
            scores = [number(row[key]) for key in ("privacy", "privacy_again", "utility")]
            table.add_row(row["defence"], *scores, passes, what, style=style)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False).print(table)
    for line in _lines(found, weights):
        console.print(Text(line))
    if found["better_than_none"]:
        for line in _next_steps(found, run):
            console.print(Text(line, style="green"))
    for line in (*_MEANING, f"Every score: {file}"):
        console.print(Text(line, style="dim"))


def defence_text(policy: str) -> str:
    """Write a policy as a defence.

    >>> defence_text("3-1-7")
    'ats(policy="3-1-7")'
    """
    return NONE if policy == NONE else f'ats(policy="{policy}")'


def _lines(found: Mapping[str, Any], weights: str | None) -> Iterator[str]:
    """Say what was scored by what, and what came of it."""
    by = f"the weights of {weights}" if weights else "initial weights (the authors train a little first: model.weights)"
    yield f"Privacy by {by}; utility by initial weights; seed {found['settings']['seed']}."
    share = f"{found['passed']} of {plural(found['candidates'], 'candidate')} pass the filter"
    yield f"{share}: a utility of at least {number(found['least'])}."
    if not found["best"]:
        yield "No policy passes: lower the bar with --least, or ask for more with --candidates."
        return
    best, hybrid = found["best"][0], found["controls"][-1]
    told = f"again {number(best['privacy_again'])}, images as they are {number(found['controls'][0]['privacy_again'])}"
    if not found["better_than_none"]:
        yield f"Nothing found: by its second look the best is not below no transform by two standard errors ({told})."
        return
    yield f"The best scores below images as they are ({told})."
    if not best["below_the_authors"]:
        yield f"It is no better than the authors' hybrid (again {number(hybrid['privacy_again'])})."


def _next_steps(found: Mapping[str, Any], run: Sequence[str]) -> Iterator[str]:
    """Write the best as a defence, and the command that measures it."""
    best = found["best"][0]["defence"]
    yield f"As a defence: {best}"
    texts = (best, found["controls"][-1]["defence"])
    words = ["gradveil", "audit", *run, "--attack", "ig", "--attack", "adaptive", "--defence", NONE]
    for text in texts:
        words += ["--defence", text]
    yield f"To measure it: {shlex.join(words)}"
