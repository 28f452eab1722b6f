"""Printed results of an audit: verdict, tables, and the gate of `--fail-above`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.findings import MORE, Findings, print_outcome
from gradveil.audit.gate import CountedSetting, Gate, called, images_needed
from gradveil.audit.run_directory import TRAINING
from gradveil.audit.verdict import LEVELS
from gradveil.cli.shared_options import Detail
from gradveil.cli.training_output import table, wide
from gradveil.core.formatting import DASH, interval, listing, percent, plural
from gradveil.federated.training_groups import group_trainings
from gradveil.federated.training_run import is_training, load_training


def show_gate(outcome: Gate, page: Path) -> None:
    """Print the outcome of the gate on standard error; `page` is the report."""
    console = Console(stderr=True, markup=False, highlight=False, width=None if sys.stderr.isatty() else 120)
    limit = f"--fail-above {percent(outcome.limit)}"
    weakened = f"Weakened by {listing(f'--accept {each} ({each.meaning})' for each in outcome.accepted)}."
    if outcome.above:
        settings = plural(len(outcome.counted), "setting")
        verb = "is" if len(outcome.above) == 1 else "are"
        console.print(f"{limit}: failed. {len(outcome.above)} of {settings} {verb} above it.", style="bold red")
        console.print(above_table(outcome.above))
        console.print(
            f"To go on: see in {page} what was recovered, and try other defences (gradveil list defences); or raise "
            "the limit if you accept this.",
            soft_wrap=True,
        )
    if outcome.obstacles:
        console.print(f"{limit}: not shown. The run does not show that every rate is within it.", style="bold red")
        for obstacle in outcome.obstacles:
            console.print(f"  {obstacle}", soft_wrap=True)
        console.print(
            "To go on: correct these points and give the command again. Finished trials are kept, and failed ones "
            "run again.",
            soft_wrap=True,
        )
    if outcome.passed:
        top = max(outcome.counted, key=lambda setting: setting.upper)
        console.print(
            f"{limit}: passed. Of {plural(len(outcome.counted), 'setting')} the least certain is", soft_wrap=True
        )
        console.print(f"  {called(top.row)}: {top.count}, 95% interval up to {percent(top.upper)}.", soft_wrap=True)
    if (needed := images_needed(outcome.limit)) and not outcome.above:
        console.print(
            f"To show {percent(outcome.limit)} takes {plural(needed, 'image')} per setting with none recovered.",
            soft_wrap=True,
        )
    criterion = "Recovered images count, identifiable or not; where identification alone is a leak, identified ones do."
    console.print(criterion, soft_wrap=True)
    if outcome.accepted:
        console.print(weakened, style="bold yellow", soft_wrap=True)


def above_table(above: Sequence[CountedSetting]) -> Table:
    """Return the settings above a limit as a table, each with its trial of the highest rate."""
    rows = [each.row for each in above]
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
    for each in above:
        row = each.row
        where = [str(row.seed), row.setting.client] if settings else []
        where += [str(row.setting.trained)] if trained else []
        count = f"{each.hits}/{each.of} {percent(each.rate)} {each.criterion}"
        ends = interval(*each.ends)
        label = LEVELS[each.verdict.level][0].upper()
        guess = DASH if each.baseline is None else f"{percent(each.baseline)} {each.criterion}"
        if leak := each.leak:  # the criterion of the leak may differ from that of the count
            count += f"\nleak: {leak.observed}/{leak.images} {percent(leak.observed / leak.images)} {leak.criterion}"
            guess += f"\n{percent(leak.baseline)} {leak.criterion}"
        table.add_row(row.defence, label, row.attack, *where, ATTACKERS[row.attacker][0], count, ends, guess)
    return table


def show_outcome(
    findings: Findings, info: Mapping[str, Any], folder: Path | None, shown: Detail, *, ran: bool = False
) -> None:
    """Print the results of a run that `info` describes; 120 columns wide without a terminal.

    `ran` tells that the command has run the trials, so that another one shows more of them.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    more = f"More: gradveil summary {folder} --explain (reasons, definitions) or --all (trials)." if ran else MORE
    config, warnings = info["config"], info.get("warnings") or ()
    flags = {"every": shown.every, "explain": shown.explain}
    print_outcome(console, findings, config, **flags, warnings=warnings, more=more)
    if config.get("train") and folder is not None and is_training(folder / TRAINING):
        console.print("Training", style="bold")
        wide().print(table(group_trainings(load_training(folder / TRAINING).trials)))
