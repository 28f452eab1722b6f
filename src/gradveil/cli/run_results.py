"""The results of run directories, as `gradveil summary` exports them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from gradveil.audit.findings import findings
from gradveil.audit.run_directory import RUN, TRAINING, Trial, load_run
from gradveil.cli.audit_output import show_outcome
from gradveil.cli.shared_options import Detail, kept
from gradveil.cli.training_output import table, wide
from gradveil.core.errors import Problem, fail, refuse
from gradveil.federated.training_run import FAILED, is_training, load_training
from gradveil.report.paper_table import PaperTable, matrices
from gradveil.report.pareto import as_object, trials_with_fronts
from gradveil.report.table import as_csv
from gradveil.report.training_paper_table import TrainingTable, training_tables
from gradveil.report.training_table import ROUNDS, round_rows, training_rows

_EMPTY = {"failed": "", **dict.fromkeys(("model", "data", "client", "defence", "attack"), ""), "batch": 1, "round": 0}
"""A trial without a result, for the columns of an empty table."""


def is_audit(folder: Path) -> bool:
    """Say whether a folder is an audit's; it may hold a training."""
    return (folder / RUN).is_file()


class Audits:
    """Audits, as they lie on disk."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read them; refuse damaged ones."""
        self.runs = [load_run(folder) for folder in folders]
        self.findings = [findings(run.trials) for run in self.runs]

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return any(trial.failed is None for run in self.runs for trial in run.trials)

    def code(self) -> list[Mapping[str, str]]:
        """Say what of each trial's code was the user's own."""
        return [trial.info.get("code", {}) for run in self.runs for trial in run.trials]

    def as_object(self) -> dict[str, Any]:
        """Return the verdict in a sentence, and an entry per setting and per trial, each with its run among several."""
        each = [as_object([found]) for found in self.findings]
        return {
            **as_object(self.findings),
            **{key: self._named([one[key] for one in each]) for key in ("settings", "trials")},
        }

    def as_csv(self) -> str:
        """Write a line per trial, with the verdict on its defence."""
        return summaries_as_csv(self._named([trials_with_fronts(found) for found in self.findings]))

    def _named(self, entries: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        several = len(self.runs) > 1
        every = ((run, entry) for run, of_run in zip(self.runs, entries, strict=True) for entry in of_run)
        return [{"run": str(run.path), **entry} if several else entry for run, entry in every]

    def curves(self) -> str:
        """Audits have none."""
        return ""

    def sheets(self) -> list[PaperTable]:
        """Lay defences down, attackers across."""
        return [matrix.sheet() for matrix in matrices(self.runs)]

    def show(self, shown: Detail) -> None:
        """Print the results."""
        for run, found in zip(self.runs, self.findings, strict=True):
            if run.trials:
                show_outcome(found, run.info["config"], run.path, shown)

    def left(self) -> Iterator[tuple[Path, str]]:
        """Say of every run what is not done yet or failed, and how to go on."""
        for run in self.runs:
            folder = run.path or Path()
            counts = len(run.info["trials"]), len(run.trials), sum(trial.broken for trial in run.trials)
            if told := unfinished(folder, run.info, *counts):
                yield folder, told


class Trainings:
    """Trainings, as they lie on disk."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read them; refuse damaged ones."""
        self.runs = [load_training(folder) for folder in folders]

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return any(told is not None and told["status"] != FAILED for run in self.runs for _, told in run.trials)

    def code(self) -> list[Mapping[str, str]]:
        """Say what of each trial's code was the user's own."""
        return [told.get("code", {}) for run in self.runs for _, told in run.trials if told is not None]

    def as_object(self) -> list[dict[str, Any]]:
        """Sum up every finished trial, its curve with it."""
        return [self._named(run.path, told) for run in self.runs for _, told in run.trials if told is not None]

    def as_csv(self) -> str:
        """Write a line a trial."""
        return as_csv(self._named(run.path, row) for run in self.runs for row in training_rows(run.trials))

    def curves(self) -> str:
        """Write a line a round."""
        names = [*self._named(Path(), dict.fromkeys(ROUNDS))]
        every = (self._named(run.path, row) for run in self.runs for row in round_rows(run.trials))
        return as_csv(every, names)

    @cached_property
    def tables(self) -> list[TrainingTable]:
        """Put runs of one setting together."""
        return training_tables(self.runs)

    def sheets(self) -> list[PaperTable]:
        """Lay defences down, what each costs across."""
        return [one.sheet() for one in self.tables]

    def show(self, shown: Detail) -> None:
        """Print the results, which are the same in full."""
        console = wide()
        for one in self.tables:
            console.print(Text(one.title, style="bold"))
            console.print(table(one.groups))

    def left(self) -> Iterator[tuple[Path, str]]:
        """Say of every run what is not done yet or failed, and how to go on."""
        for run in self.runs:
            done = [told for _, told in run.trials if told is not None]
            counts = len(run.trials), len(done), sum(told["status"] == FAILED for told in done)
            if said := unfinished(run.path, run.info, *counts):
                yield run.path, said

    def _named(self, path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(path), **row} if len(self.runs) > 1 else dict(row)


def unfinished(folder: Path, info: Mapping[str, Any], planned: int, there: int, failed: int) -> str:
    """Say what is not done yet or failed, and how to go on; nothing where all is done."""
    missing, done = planned - there, there - failed
    counts = [f"{count} {what}" for count, what in ((missing, "not done yet"), (failed, "failed")) if count]
    told = f"{done or 'None'} of {planned} trials {'is' if done == 1 else 'are'} finished: {', '.join(counts)}."
    return f"{told} {_again(folder, info)}" if counts else ""


def _again(folder: Path, info: Mapping[str, Any]) -> str:
    command = str(info.get("command", ""))
    if not command.startswith(("gradveil audit ", "gradveil train ")):
        return f"To go on, call gradveil.audit again with the same arguments and out={str(folder)!r}."
    words = kept(shlex.split(command))
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    if words[1] == "audit" and folder.name == TRAINING:  # the training of an audit, which has no command of its own
        folder = folder.parent
    usual = folder == Path("runs") / str(info.get("name", ""))
    return f"To go on:\n  {shlex.join(words if usual else [*words, '--out', str(folder)])}"


def summaries_as_csv(trials: Sequence[dict[str, Any]]) -> str:
    """Write summaries of audits as CSV; every status becomes a column."""
    statuses = list(dict.fromkeys(status for trial in trials for status in trial["statuses"]))
    rows = [
        {key: value for key, value in trial.items() if key != "statuses"}
        | {f"status_{status}": trial["statuses"].get(status, 0) for status in statuses}
        for trial in trials
    ]
    names = [key for key in trials_with_fronts(findings([Trial(dict(_EMPTY), [])]))[0] if key != "statuses"]
    return as_csv(rows, names)


def open_runs(runs: Sequence[Path], curves: bool) -> Audits | Trainings:
    """Read runs of one kind, of which curves may be wanted."""
    audits = [run for run in runs if is_audit(run)]
    if any(is_training(run) for run in runs if run not in audits):
        what = "is an audit, and others are trainings", "sum up the ones and the others, each with a command"
        refuse([Problem(str(run), *what) for run in audits])
        return Trainings(runs)
    refuse([_curveless(run) for run in audits if curves])
    return Audits(runs)


def _curveless(run: Path) -> Problem:
    if is_training(run / TRAINING):
        return Problem(str(run), "is an audit; its training lies within", f"name that: {run / TRAINING}")
    return Problem(str(run), "is an audit, and has no rounds of a training", "leave --curves out")


def write(file: Path, text: str) -> None:
    """Write into a file, or on standard output."""
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", "choose another file") from error
