"""Run the tables of a paper: one audit or training per run and defence, so that each row is kept when it is done."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from gradveil.audit.attackers.run_attackers import choice_of_texts, decide, widened
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import describe as describe_audit
from gradveil.audit.audit_run import machine as describe_machine
from gradveil.audit.audit_run import run as run_audit
from gradveil.audit.audit_run import site as audit_site
from gradveil.audit.display import Screen
from gradveil.audit.experiment import Experiment
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import AUDIT, Store
from gradveil.audit.run_file import assemble, assemble_training
from gradveil.audit.trial import sharing
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import TRAINING_RUN
from gradveil.federated.training_run import describe as describe_training
from gradveil.federated.training_run import run as run_training
from gradveil.federated.training_run import site as training_site
from gradveil.federated.training_setup import TrainingSetting, open_setting
from gradveil.papers.records import Record, read_run
from gradveil.papers.study import Cell, Scale, Study
from gradveil.runs.pool import Processes, cores
from gradveil.runs.task import Scheduler, Site, in_process

Only = Literal["attacks", "trainings"]


@dataclass(frozen=True)
class RowRun:
    """One audit or training: the cells of a table that share a run, a defence and an attack."""

    study: Study
    run: str
    defence: str
    attack: str
    """Empty for a training."""
    scale: Scale
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the scale, such as `target_clients=8`."""
    command: str = ""
    """The command that runs nothing else of the table."""

    @property
    def folder(self) -> Path:
        """Where it lies below the folder of paper runs; other settings have a folder of their own."""
        texts = (self.defence, " ".join([self.attack or "training", *self.changes]))
        names = [re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")[:200] for text in texts]
        return Path(self.study.key, self.scale, self.run, *names)

    @property
    def trains(self) -> bool:
        """Whether it is a training."""
        return self.study.content.runs[self.run].kind == "train"

    @property
    def place(self) -> tuple[str, str, str]:
        """What is measured, as in its record."""
        return self.run, self.defence, self.attack

    @property
    def title(self) -> str:
        """Name the run, the defence and the attack."""
        return f"{self.run}: {self.defence}, {f'against {self.attack}' if self.attack else 'training'}"

    @property
    def data(self) -> str:
        """The name of its data."""
        return self.config().data.name

    def missing_data(self, data_dir: Path | None) -> str:
        """Return why its data cannot be read; nothing if they can."""
        try:
            load(self.data, size=32, data_dir=data_dir, limit_public=1, limit_private=1)
        except GradveilError as error:
            return str(error)
        return ""

    def finished(self, root: Path) -> list[Record]:
        """Read it if it is finished with these settings, below a folder of paper runs."""
        records = self.measured(root) if self._lies_there(root) else []
        return records if all(record.status != "unfinished" for record in records) else []

    def outdated(self, root: Path) -> bool:
        """Return whether it lies there with other settings, such as those of an older version of the table."""
        return self._lies_there(root) is False

    def _lies_there(self, root: Path) -> bool | None:
        """Return whether what lies there has these settings; None where nothing does."""
        kind = TRAINING_RUN if self.trains else AUDIT
        if not kind.exists(root / self.folder):
            return None
        return kind.read(root / self.folder)["config_hash"] == self.config().digest()

    def config(self) -> RunConfig | TrainConfig:
        """Return its settings at its scale."""
        kind = "train" if self.trains else "audit"
        raw: dict[str, Any] = {
            "name": f"{self.study.key}-{self.run}",
            **self.study.content.runs[self.run].at(self.scale, self.study.content.scales[self.scale].get(kind, {})),
            "defences": [self.defence],
        }
        if self.trains:
            return assemble_training(raw, self.changes)
        return assemble({**raw, "attacks": [self.attack], "control": False, "images": False}, self.changes)

    def measured(self, root: Path) -> list[Record]:
        """Read what is finished of it below a folder of paper runs."""
        return list(read_run(root / self.folder, self.run, self.scale, self.defence))


def row_runs(
    study: Study,
    table: str,
    scale: Scale,
    rows: Collection[str] = (),
    columns: Collection[str] = (),
    settings: Collection[str] = (),
    changes: Sequence[str] = (),
    attack: str = "",
    only: Only | None = None,
) -> list[RowRun]:
    """List what has to be run for a table, or for some of its rows, columns and settings (printed names).

    `changes` are settings that differ from those of the scale: `["target_clients=8"]`. `attack` takes the place of the
    table's attacks, and leaves its trainings out. `only` leaves its trainings or its attacks out.
    """
    entry = study.table(table)
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in study.chosen_cells(entry.name, rows, columns, settings):
        wanted = study.measurement(cell)
        if wanted is None or (only == "trainings" and wanted.attack):
            continue
        if not wanted.attack and (attack or only == "attacks"):
            continue
        groups.setdefault((wanted.run, wanted.defence, attack or wanted.attack), []).append(cell)
    more = [word for change in changes for word in ("--set", change)]
    more += (["--attack", attack] if attack else []) + (["--only", only] if only else [])
    return [
        RowRun(study, *place, scale, tuple(changes), _command(study.key, entry.name, scale, members, more))
        for place, members in groups.items()
    ]


def _command(key: str, table: str, scale: Scale, cells: Sequence[Cell], more: Sequence[str]) -> str:
    words = ["gradveil", "paper", "run", key, table, "--scale", scale]
    for name in ("setting", "row", "column"):
        values = dict.fromkeys(getattr(cell, name) for cell in cells)
        words += [f"--{name}s", *values] if all(values) else []
    return shlex.join([*words, *more])


def stand_in_data(row: RowRun) -> RowRun:
    """Return a run on bundled images: digits, or patches of photographs where colour images are only attacked."""
    coloured = row.data != "mnist"
    if coloured and not row.trains:  # patches have no labels to learn
        return replace(row, changes=(*row.changes, "data.name=patches"))
    changes = ["data.name=digits", *(["data.channels=3"] if coloured else [])]
    return replace(row, changes=(*row.changes, *changes))


def running_code() -> str:
    """Return the version of Gradveil, and the commit where it runs from its repository."""
    package, release = Path(__file__).parents[1], version("gradveil")
    if not (package.parents[1] / ".git").exists():
        return release
    git = ["git", "-C", str(package)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return release
    return f"{release}+{commit.stdout.strip()}{'.changed' if changed.returncode else ''}"


def run_row(
    row: RowRun,
    root: Path,
    data_dir: Path | None = None,
    workers: int | None = None,
    fresh: bool = False,
    progress: bool = True,
    model_checked: bool = False,
) -> list[Record]:
    """Run what is not finished of a row, and return its measurements; another row may have checked its model."""
    config, folder = row.config(), root / row.folder
    console = Console(stderr=True, quiet=not progress, markup=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if isinstance(config, TrainConfig):
            setting = open_setting(config, data_dir, model_checked=model_checked)
            _train(setting, folder, data_dir, workers, fresh, row.command)
        else:
            experiment = open_experiment(config, data_dir, model_checked=model_checked)
            _audit(experiment, folder, data_dir, workers, fresh, row.command, console)
    finally:
        torch.set_num_threads(before)
    return row.measured(root)


def _audit(
    experiment: Experiment,
    folder: Path,
    data_dir: Path | None,
    workers: int | None,
    fresh: bool,
    command: str,
    console: Console,
) -> None:
    count = workers or cores()
    if (joins := choice_of_texts(experiment.config.attacks)) is not None:
        experiment, _, _ = widened(experiment, decide(experiment), joins)
    config = experiment.config
    share = -(-config.target_clients // count)
    info = describe_audit(config, share, command, experiment.held, sharing(experiment), (), experiment.images)
    info |= {"code": running_code()}
    with Store(folder).open(info, fresh) as store, Screen(console) as screen:
        share = store.info()["share"]
        run_audit(experiment, store, screen, share, _schedule(count)(audit_site(experiment, data_dir)))


def _train(
    setting: TrainingSetting, folder: Path, data_dir: Path | None, workers: int | None, fresh: bool, command: str
) -> None:
    count = min(workers or cores(), len(setting.config.seeds))
    info = describe_training(setting.config, command, setting.weights, setting.data.identities())
    info |= {"code": running_code(), "machine": describe_machine(setting.config.device)}
    with TRAINING_RUN.opened(folder, info, fresh):
        schedule = _schedule(count)(training_site(setting, data_dir))
        run_training(setting, folder, lambda trial, record, status: None, schedule)


def _schedule(count: int) -> Callable[[Site], Scheduler]:
    return lambda site: Processes(site, count) if count > 1 else in_process
