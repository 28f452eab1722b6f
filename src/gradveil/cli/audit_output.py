"""What `gradveil audit` and `summary` print of an audit: its outcome, and the gate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.findings import Findings, print_outcome
from gradveil.audit.gate import CountedSetting, Gate, called, images_needed
from gradveil.audit.run_directory import TRAINING
from gradveil.audit.verdict import LEVELS
from gradveil.cli.shared_options import Detail
from gradveil.cli.training_output import table, wide
from gradveil.core.formatting import DASH, interval, listing, percent, plural
from gradveil.federated.training_run import is_training, load_training
from gradveil.report.training_groups import group_trainings


def show_gate(found: Gate, page: Path) -> None:
    """Print the outcome of the gate on standard error; `page` is the report."""
    console = Console(stderr=True, markup=False, highlight=False, width=None if sys.stderr.isatty() else 120)
    limit = f"--fail-above {percent(found.limit)}"
    weakened = f"Weakened by {listing(f'--accept {each} ({each.meaning})' for each in found.accepted)}."
    if found.above:
        settings = plural(len(found.counted), "setting")
        verb = "is" if len(found.above) == 1 else "are"
        console.print(f"{limit}: failed. {len(found.above)} of {settings} {verb} above it.", style="bold red")
        console.print(above_table(found.above))
        console.print(
            f"To go on: see in {page} what was recovered, and try other defences (gradveil list defences); or raise "
            "the limit if you accept this.",
            soft_wrap=True,
        )
    if found.obstacles:
        console.print(f"{limit}: not shown. The run does not show that every rate is within it.", style="bold red")
        for obstacle in found.obstacles:
            console.print(f"  {obstacle}", soft_wrap=True)
        console.print(
            "To go on: correct these points and give the command again. Finished trials are kept, and failed ones "
            "run again.",
            soft_wrap=True,
        )
    if found.passed:
        top = max(found.counted, key=lambda one: one.upper)
        count = (
            f"{top.hits} of {plural(top.row.images, 'image')} {top.criterion}, 95% interval up to {percent(top.upper)}"
        )
        console.print(f"{limit}: passed. Of {plural(len(found.counted), 'setting')} the least sure is", soft_wrap=True)
        console.print(f"  {called(top.row)}: {count}.", soft_wrap=True)
    if (needed := images_needed(found.limit)) and not found.above:
        console.print(
            f"To show {percent(found.limit)} takes {plural(needed, 'image')} per setting with none recovered.",
            soft_wrap=True,
        )
    told = "Recovered images count, identifiable or not; where identification alone is a leak, identified ones do."
    console.print(told, soft_wrap=True)
    if found.accepted:
        console.print(weakened, style="bold yellow", soft_wrap=True)


def above_table(above: Sequence[CountedSetting]) -> Table:
    """Lay out the settings above a limit, each at the trial with its highest rate."""
    rows = [one.row for one in above]
    settings = len({(row.seed, row.setting.client) for row in rows}) > 1
    trained = any(row.setting.trained is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("defence", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for title in ("attack", *(("seed", "client") if settings else ()), *(("round",) if trained else ())):
        table.add_column(title, overflow="fold")
    table.add_column("attacker", no_wrap=True)
    for title in ("images", "95% CI", "baseline"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in above:
        row = one.row
        where = [str(row.seed), row.setting.client] if settings else []
        where += [str(row.setting.trained)] if trained else []
        count = f"{one.hits}/{row.images} {percent(one.rate)} {one.criterion}"
        ends = interval(*one.ends)
        label = LEVELS[one.verdict.level][0].upper()
        guess = DASH if one.baseline is None else f"{percent(one.baseline)} {one.criterion}"
        if leak := one.leak:  # a count below its own baseline is not why it leaks
            count += f"\nleak: {leak.observed}/{leak.images} {percent(leak.observed / leak.images)} {leak.criterion}"
            guess += f"\n{percent(leak.baseline)} {leak.criterion}"
        table.add_row(row.defence, label, row.attack, *where, ATTACKERS[row.attacker][0], count, ends, guess)
    return table


def show_outcome(found: Findings, config: Mapping[str, Any], folder: Path | None, shown: Detail) -> None:
    """Print the results of a run with this resolved configuration; where there is no terminal, 120 columns wide."""
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    print_outcome(console, found, config, every=shown.every, explain=shown.explain)
    if config.get("train") and folder is not None and is_training(folder / TRAINING):
        console.print("Training", style="bold")
        wide().print(table(group_trainings(load_training(folder / TRAINING).trials)))
