"""Printed results of `gradveil train` and `audit --train`: rounds as they end, and the cost of each defence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.core.errors import Problem
from gradveil.core.formatting import DASH, percent, plural, size
from gradveil.defences.aligned import OUTVOTING
from gradveil.federated.training_groups import TrainingGroup, TrainingSummary, Trials, group_trainings, no_progress
from gradveil.federated.training_run import FAILED
from gradveil.federated.training_setup import TrainingTrial
from gradveil.federated.training_state import RoundResult, Status
from gradveil.report.training_paper_table import accuracy_text, compared_seeds_text, difference_text, rounds_text

DIVERGED = 1
"""Exit code of a training that diverged or failed."""
_COLUMNS = ("defence", "accuracy", "to none", "rounds", "sent per round", "received per round", "s per round")
_WORDS = ("status", "proven")
_LEAST = 100
"""Least width of a table of trainings in characters."""


def show_trainings(trials: Trials, summaries: Sequence[TrainingSummary], as_json: bool, console: Console) -> int:
    """Print the results and the failed trainings; return the exit code."""
    if as_json:
        typer.echo(json.dumps(summaries, indent=1))
    else:
        wide().print(table(group_trainings(trials)))
    for row in summaries:
        if row["status"] == FAILED:
            failure = f"{row['defence']}, seed {row['seed']}: failed: {row['failed']}"
            console.print(Text(failure, style="red"))
        for doubt in _doubts(row.get("curve") or ()):
            console.print(Text(f"{row['defence']}, seed {row['seed']}: {doubt}", style="yellow"))
    return DIVERGED if any(row["status"] in ("diverged", FAILED) for row in summaries) else 0


def _doubts(curve: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return warnings about rounds with missing replies, updates or messages."""
    among = f"of {plural(len(curve), 'round')}"
    silent = sum(not record["clients"] and not record.get("refused") for record in curve)
    if silent:
        yield f"in {silent} {among} no client answered"
    left = sum(bool(record.get("refused")) for record in curve)
    if left:
        yield f"in {left} {among} updates that were not finite were left out"
    spoken = [record["spoke"] for record in curve if record.get("spoke")]
    short = [count for count, planned in spoken if count < planned]
    if short:
        few = f", at least once {min(short)}: too few to outvote a liar" if min(short) < OUTVOTING else ""
        yield f"in {len(short)} {among} fewer clients spoke than planned{few}"


def recorded(folder: Path) -> str:
    """Describe a folder of recorded updates; a training that was finished before sends none."""
    count = sum(1 for _ in folder.glob("round-*.safetensors"))
    if not count:
        reason = "these rounds were trained before, or the clients to record did not answer in them"
        return f"Nothing was recorded in {folder}: {reason}. Train again with --fresh, or record others."
    return f"{plural(count, 'recorded update')} in {folder}. To attack: gradveil audit RUN --observed {folder}"


def show_round(console: Console, rounds: int, trial: TrainingTrial, last: RoundResult, status: Status) -> None:
    """Print one line about the last round of a training."""
    parts = [f"{trial.title}, seed {trial.seed}: round {last.number} of {rounds}", f"accuracy {percent(last.accuracy)}"]
    if last.validation_loss is not None:
        parts.append(f"validation loss {last.validation_loss:.4f}")
    if not last.clients and not last.refused:
        parts.append("no client answered")
    if last.refused:
        parts.append(f"{plural(len(last.refused), 'update')} left out: not finite")
    if last.spoke is not None and last.spoke[0] < last.spoke[1]:
        parts.append(f"only {last.spoke[0]} of {last.spoke[1]} clients spoke before it")
    ended = "" if status == "running" else f" ({status})"
    console.print(f"{', '.join(parts)}, {last.seconds:.1f} s{ended}", highlight=False)


def warn(problems: Iterable[Problem]) -> None:
    """Print problems that do not stop the command."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    for problem in problems:
        console.print(Text(f"{problem.severity}: {problem}", style="yellow"))


def table(groups: Sequence[TrainingGroup]) -> Table:
    """Return the defences as a table; accuracies are of the round with the lowest validation loss."""
    out = Table(box=None, pad_edge=False)
    for title in (*_COLUMNS, *_WORDS):
        if title in ("defence", *_WORDS):
            # Folded and not cut off, because two defences may differ in their last setting.
            out.add_column(title, overflow="fold")
        else:
            out.add_column(title.replace(" per ", "\nper "), justify="right", no_wrap=True)
    caption = "\n".join(filter(None, [no_progress(groups), *_proofs(groups)]))
    out.caption, out.caption_justify = Text(caption, style="dim not italic"), "left"
    for group in groups:
        sent, received, seconds = (group.mean(key) for key in ("bytes_up", "bytes_down", "seconds"))
        numbers = (size(sent), size(received), DASH if seconds is None else f"{seconds:.1f}")
        statuses = ", ".join(text for _, text in group.statuses)
        texts = accuracy_text(group), difference_text(group) + compared_seeds_text(group), rounds_text(group) or DASH
        out.add_row(group.name, *texts, *numbers, statuses, group.proof)
    return out


def wide() -> Console:
    """Return a console as wide as the terminal and wide enough that no number is folded."""
    return Console(width=max(_LEAST, Console().width) if sys.stdout.isatty() else 120, markup=False)


def _proofs(groups: Sequence[TrainingGroup]) -> Iterator[str]:
    """Return the guarantee of every defence that has an epsilon."""
    for group in groups:
        if group.worst and group.worst["epsilon"]:
            yield f"Proven of {group.name}: {group.worst['guarantee']}."
            if group.reservation:
                yield f"Epsilon of {group.name}: {group.reservation}."
