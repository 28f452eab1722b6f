"""Results of run directories, as `gradveil summary` exports them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from gradveil.audit.defence_costs import joined
from gradveil.audit.findings import findings, findings_of
from gradveil.audit.gate import Accepted, gate
from gradveil.audit.run_directory import RUN, TRAINING, Trial, load_run
from gradveil.cli.audit_output import show_gate, show_outcome
from gradveil.cli.shared_options import Detail, kept
from gradveil.cli.training_output import table, wide
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.federated.training_run import FAILED, is_training, load_training
from gradveil.report.outcomes import RunOutcome, outcome_of
from gradveil.report.paper_table import PaperTable, matrices
from gradveil.report.pareto import as_object, trials_with_fronts
from gradveil.report.table import as_csv
from gradveil.report.training_paper_table import TrainingTable, training_tables
from gradveil.report.training_table import ROUNDS, round_rows, training_rows

_TEXTS = ("failed", "model", "data", "client", "update", "defence", "attack")
_EMPTY = {**dict.fromkeys(_TEXTS, ""), "batch": 1, "round": 0, "trained": None, "undefended": False, "changes": None}
"""A trial without a result, for the columns of an empty table."""


def is_audit(folder: Path) -> bool:
    """Return whether a folder holds an audit, with or without a training."""
    return (folder / RUN).is_file()


class Audits:
    """Audits on disk."""

    def __init__(self, folders: Sequence[Path], trainings: Sequence[Path] = ()) -> None:
        """Read them, with trainings to join them with; reject damaged ones, and trainings that do not fit."""
        self.runs = [load_run(folder) for folder in folders]
        costs = joined(self.runs, [load_training(folder) for folder in trainings])
        self.findings = [findings_of(run, own) for run, own in zip(self.runs, costs, strict=True)]

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return any(trial.failed is None for run in self.runs for trial in run.trials)

    def code(self) -> list[Mapping[str, str]]:
        """Return the custom code of each trial."""
        return [trial.info.get("code", {}) for run in self.runs for trial in run.trials]

    def as_object(self) -> dict[str, Any]:
        """Return the verdict, and an entry per setting and per trial, each with its run if there are several."""
        each = [as_object([of_run]) for of_run in self.findings]
        return {
            **as_object(self.findings),
            **{key: self._named([entry[key] for entry in each]) for key in ("settings", "trials")},
        }

    def as_csv(self) -> str:
        """Return one line per trial, with the verdict on its defence."""
        return summaries_as_csv(self._named([trials_with_fronts(of_run) for of_run in self.findings]))

    def _named(self, entries: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        several = len(self.runs) > 1
        every = ((run, entry) for run, of_run in zip(self.runs, entries, strict=True) for entry in of_run)
        return [{"run": str(run.path), **entry} if several else entry for run, entry in every]

    def curves(self) -> str:
        """Return nothing: audits have no rounds."""
        return ""

    def outcomes(self, limit: float | None, accepted: Sequence[Accepted]) -> list[RunOutcome]:
        """Return the outcome of every run; print that of its gate, if there is a limit."""
        held = [None if limit is None else gate(run, limit, accepted) for run in self.runs]
        for run, each in zip(self.runs, held, strict=True):
            if each is not None:
                show_gate(each, (run.path or Path()) / "report.html")
        return [outcome_of(run, each) for run, each in zip(self.runs, held, strict=True)]

    def sheets(self) -> list[PaperTable]:
        """Return tables of defences by attacks."""
        costs = {name: cost for of_run in self.findings for name, cost in of_run.costs.items()}
        return [matrix.sheet() for matrix in matrices(self.runs, costs)]

    def recommendation(self) -> str:
        """Return what each run recommends as Markdown; empty where nothing can be recommended."""
        told: list[str] = []
        for run, of_run in zip(self.runs, self.findings, strict=True):
            title = f"Recommendation of {run.path}" if len(self.runs) > 1 else "Recommendation"
            told += [f"\n**{title}.** {of_run.recommendation.text}\n"] if of_run.recommendation else []
        return "".join(told)

    def show(self, shown: Detail) -> None:
        """Print the results."""
        for run, of_run in zip(self.runs, self.findings, strict=True):
            if run.trials:
                show_outcome(of_run, run.info, run.path, shown)

    def left(self) -> Iterator[tuple[Path, str]]:
        """Return every run with unfinished or failed trials, and how to continue it."""
        for run in self.runs:
            folder = run.path or Path()
            counts = len(run.info["trials"]), len(run.trials), sum(trial.broken for trial in run.trials)
            if text := unfinished(folder, run.info, *counts):
                yield folder, text


class Trainings:
    """Trainings on disk."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read them; reject damaged ones."""
        self.runs = [load_training(folder) for folder in folders]

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return any(each is not None and each["status"] != FAILED for run in self.runs for _, each in run.trials)

    def code(self) -> list[Mapping[str, str]]:
        """Return the custom code of each trial."""
        return [each.get("code", {}) for run in self.runs for _, each in run.trials if each is not None]

    def as_object(self) -> list[dict[str, Any]]:
        """Return the summary of every finished trial, with its curve."""
        return [self._named(run.path, each) for run in self.runs for _, each in run.trials if each is not None]

    def as_csv(self) -> str:
        """Return one line per trial."""
        return as_csv(self._named(run.path, row) for run in self.runs for row in training_rows(run.trials))

    def curves(self) -> str:
        """Return one line per round."""
        names = [*self._named(Path(), dict.fromkeys(ROUNDS))]
        every = (self._named(run.path, row) for run in self.runs for row in round_rows(run.trials))
        return as_csv(every, names)

    @cached_property
    def tables(self) -> list[TrainingTable]:
        """The tables, one per setting over all runs."""
        return training_tables(self.runs)

    def outcomes(self, limit: float | None, accepted: Sequence[Accepted]) -> list[RunOutcome]:
        """Reject: a training has no verdict."""
        fix = "leave out --fail-above, --sarif and --junit, or name audits"
        raise GradveilError(Problem(str(run.path), "is a training, and has no verdict", fix) for run in self.runs)

    def sheets(self) -> list[PaperTable]:
        """Return tables of defences by costs."""
        return [each.sheet() for each in self.tables]

    def recommendation(self) -> str:
        """Return nothing: a training alone says nothing of protection."""
        return ""

    def show(self, shown: Detail) -> None:
        """Print the results, which have no longer form."""
        console = wide()
        for each in self.tables:
            console.print(Text(each.title, style="bold"))
            console.print(table(each.groups))

    def left(self) -> Iterator[tuple[Path, str]]:
        """Return every run with unfinished or failed trials, and how to continue it."""
        for run in self.runs:
            done = [summary for _, summary in run.trials if summary is not None]
            counts = len(run.trials), len(done), sum(summary["status"] == FAILED for summary in done)
            if text := unfinished(run.path, run.info, *counts):
                yield run.path, text

    def _named(self, path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(path), **row} if len(self.runs) > 1 else dict(row)


def unfinished(folder: Path, info: Mapping[str, Any], planned: int, stored: int, failed: int) -> str:
    """Count unfinished and failed trials, with the command to continue; empty if all trials are finished."""
    missing, done = planned - stored, stored - failed
    counts = [f"{count} {status}" for count, status in ((missing, "not done yet"), (failed, "failed")) if count]
    text = f"{done or 'None'} of {planned} trials {'is' if done == 1 else 'are'} finished: {', '.join(counts)}."
    return f"{text} {_again(folder, info)}" if counts else ""


def _again(folder: Path, info: Mapping[str, Any]) -> str:
    command = str(info.get("command", ""))
    if not command.startswith(("gradveil audit ", "gradveil train ")):
        return f"To go on, call gradveil.audit again with the same arguments and out={str(folder)!r}."
    words = kept(shlex.split(command))
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    if words[1] == "audit" and folder.name == TRAINING:  # the training of an audit, which the audit's command runs
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


def split(runs: Sequence[Path]) -> tuple[Path, list[Path]]:
    """Split runs into the one whose report is written and the trainings to join it with."""
    main = next((run for run in runs if is_audit(run) or not is_training(run)), runs[0])
    others = [run for run in runs if run is not main]
    several = [run for run in others if not is_training(run) or is_audit(run)] or (others if not is_audit(main) else [])
    refuse([Problem(str(run), f"is a second report next to {main}", "write the report of each") for run in several])
    return main, others


def open_runs(runs: Sequence[Path], curves: bool) -> Audits | Trainings:
    """Read runs; join audits with trainings if there are both. Reject curves of audits."""
    audits = [run for run in runs if is_audit(run)]
    trainings = [run for run in runs if run not in audits and is_training(run)]
    if trainings and not audits:
        return Trainings(runs)
    refuse([_curveless(run) for run in audits if curves])
    return Audits([run for run in runs if run not in trainings], trainings)


def _curveless(run: Path) -> Problem:
    if is_training(run / TRAINING):
        return Problem(str(run), "is an audit; its training is a folder in it", f"use that folder: {run / TRAINING}")
    return Problem(str(run), "is an audit, and has no rounds of a training", "leave --curves out")
