"""Run the tables of a paper: one audit or training per run and defence, so that each row is kept when it is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import describe as describe_audit
from gradveil.audit.audit_run import run as run_audit
from gradveil.audit.audit_run import site as audit_site
from gradveil.audit.display import Screen
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import Store
from gradveil.audit.run_file import assemble, assemble_training
from gradveil.audit.trial import sharing
from gradveil.core.errors import Problem, refuse
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import TRAINING_RUN
from gradveil.federated.training_run import describe as describe_training
from gradveil.federated.training_run import run as run_training
from gradveil.federated.training_run import site as training_site
from gradveil.federated.training_setup import open_setting
from gradveil.papers.records import Record, read_run
from gradveil.papers.study import Scale, Study
from gradveil.runs.pool import Processes, cores
from gradveil.runs.task import Scheduler, Site, in_process


@dataclass(frozen=True)
class RowRun:
    """One audit or training: the cells of a table that share a run and a defence."""

    study: Study
    run: str
    defence: str
    attacks: tuple[str, ...]
    """Empty for a training."""
    scale: Scale

    @property
    def folder(self) -> Path:
        """Where it lies below the folder of paper runs."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.defence).strip("-")
        return Path(self.study.key) / self.scale / self.run / name

    @property
    def trains(self) -> bool:
        """Whether it is a training."""
        return self.study.content.runs[self.run].kind == "train"

    def config(self) -> RunConfig | TrainConfig:
        """Return its settings at its scale."""
        kind = "train" if self.trains else "audit"
        raw: dict[str, Any] = {
            "name": f"{self.study.key}-{self.run}",
            **self.study.content.runs[self.run].settings,
            **self.study.content.scales[self.scale].get(kind, {}),
            "defences": [self.defence],
        }
        if self.trains:
            return assemble_training(raw, ())
        return assemble({**raw, "attacks": list(self.attacks), "control": False, "images": False}, ())

    def measured(self, root: Path) -> list[Record]:
        """Read what is finished of it below a folder of paper runs."""
        return list(read_run(root / self.folder, self.run, self.scale, self.defence))


def row_runs(
    study: Study, table: str, scale: Scale, rows: Collection[str] = (), columns: Collection[str] = ()
) -> list[RowRun]:
    """List what has to be run for a table, or for some of its rows and columns (printed names)."""
    entry = study.table(table)
    cells = study.cells_of(entry.name)
    refuse(
        [
            *_unknown("--row", rows, [cell.row for cell in cells]),
            *_unknown("--column", columns, [cell.column for cell in cells]),
        ]
    )
    attacks: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        wanted = study.measurement(cell)
        if wanted is None or (rows and cell.row not in rows) or (columns and cell.column not in columns):
            continue
        attacks.setdefault((wanted.run, wanted.defence), {}).update({wanted.attack: None} if wanted.attack else {})
    return [RowRun(study, run, defence, tuple(texts), scale) for (run, defence), texts in attacks.items()]


def _unknown(option: str, given: Collection[str], known: Collection[str]) -> Iterator[Problem]:
    names = list(dict.fromkeys(known))
    for name in given:
        if name not in names:
            yield Problem(f"{option} '{name}'", "is not printed in this table", f"known: {', '.join(names)}")


def run_row(
    row: RowRun, root: Path, data_dir: Path | None = None, workers: int | None = None, fresh: bool = False
) -> list[Record]:
    """Run what is not finished of a row, and return its measurements."""
    config, folder = row.config(), root / row.folder
    console = Console(stderr=True, markup=False)
    command = f"gradveil paper run {row.study.key} --scale {row.scale}"
    if isinstance(config, TrainConfig):
        _train(config, folder, data_dir, workers, fresh, command)
    else:
        _audit(config, folder, data_dir, workers, fresh, command, console)
    return row.measured(root)


def _audit(
    config: RunConfig,
    folder: Path,
    data_dir: Path | None,
    workers: int | None,
    fresh: bool,
    command: str,
    console: Console,
) -> None:
    count = workers or cores()
    experiment = open_experiment(config, data_dir)
    share = -(-config.target_clients // count)
    info = describe_audit(config, share, command, experiment.held, sharing(experiment), (), experiment.images)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Store(folder).open(info, fresh) as store, Screen(console) as screen:
            share = store.info()["share"]
            run_audit(experiment, store, screen, share, _schedule(count)(audit_site(experiment, data_dir)))
    finally:
        torch.set_num_threads(before)


def _train(
    config: TrainConfig, folder: Path, data_dir: Path | None, workers: int | None, fresh: bool, command: str
) -> None:
    count = min(workers or cores(), len(config.seeds))
    setting = open_setting(config, data_dir)
    info = describe_training(config, command, setting.weights, setting.data.identities())
    with TRAINING_RUN.opened(folder, info, fresh):
        schedule = _schedule(count)(training_site(setting, data_dir))
        run_training(setting, folder, lambda trial, record, status: None, schedule)


def _schedule(count: int) -> Callable[[Site], Scheduler]:
    return lambda site: Processes(site, count) if count > 1 else in_process
