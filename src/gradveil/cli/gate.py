"""What `--fail-above` says: which cells are above the limit, what stands in the way of an answer, and how to go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradveil.audit.attacker import ATTACKERS
from gradveil.audit.rows import Row
from gradveil.core.words import interval, listing, percent, plural
from gradveil.report.gate import Gate, called


def show_gate(found: Gate, page: Path) -> None:
    """Say on standard error what the gate came to; `page` is the report."""
    console = Console(stderr=True, markup=False, highlight=False, width=None if sys.stderr.isatty() else 120)
    limit = f"--fail-above {percent(found.limit)}"
    if found.above:
        what = plural(len(found.above), "attack success rate")
        console.print(f"{limit}: {what} of {len(found.counted)} {_be(found.above)} above it.", style="bold red")
        console.print(above_table(found.above))
        console.print(
            f"To go on: see in {page} what was recovered, and try other defences (gradveil list defences); or raise "
            "the limit if you accept this.",
            soft_wrap=True,
        )
    if found.obstacles:
        console.print(f"{limit}: nobody can say that all rates stay within it.", style="bold red")
        for obstacle in found.obstacles:
            console.print(f"  {obstacle}", soft_wrap=True)
        console.print(
            "To go on: correct what these lines say and give the command again; what is finished is kept, and what "
            "failed is done again.",
            soft_wrap=True,
        )
    if found.passed:
        top = found.counted[0]
        rates = plural(len(found.counted), "attack success rate")
        highest = f"{percent(top.asr)} (95% CI {interval(*top.bounds)}), {called(top)}"
        console.print(f"{limit}: passed. The highest of {rates}: {highest}.", soft_wrap=True)
        if found.unproven:
            console.print(f"A low rate shows little of {listing(found.unproven)}: see {page}.", soft_wrap=True)


def above_table(rows: Sequence[Row]) -> Table:
    """Lay out the cells above a limit: who attacked what, how often it succeeded, and how sure that is."""
    settings = len({(row.seed, row.setting.client) for row in rows}) > 1
    trained = any(row.setting.trained is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("defence", "attack", *(("seed", "client") if settings else ()), *(("round",) if trained else ())):
        table.add_column(title, overflow="fold")
    table.add_column("attacker", no_wrap=True)
    for title in ("ASR", "95% CI", "images"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        where = [row.defence, row.attack, *([str(row.seed), row.setting.client] if settings else [])]
        where += [str(row.setting.trained)] if trained else []
        table.add_row(
            *where,
            ATTACKERS[row.attacker][0],
            percent(row.asr),
            interval(*row.bounds),
            f"{row.recovered} of {row.images}",
        )
    return table


def _be(rows: Sequence[Row]) -> str:
    return "is" if len(rows) == 1 else "are"
