"""A run that takes a second: two small faces, one small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradveil.attacks.protocol import Progress
from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.audit_run import describe, run
from gradveil.audit.findings import definitions, details, findings, remarks_on
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_directory import Run, Store, Trial, load_run
from gradveil.audit.run_file import resolve
from gradveil.audit.trial import sharing
from gradveil.core.errors import Problem


def settings(**changes: Any) -> dict[str, Any]:
    """Plain settings of the small run, with changes."""
    return {
        "name": "small",
        "data": {"name": "faces", "size": 16},
        "model": {"name": "lenet-zhu"},
        "attacks": ["ig(iterations=6, report=2)"],
        "defences": ["none", "gaussian(0.01)"],
        "target_clients": 2,
        "control": False,
        **changes,
    }


def config(**changes: Any) -> RunConfig:
    return resolve(settings(**changes))


def legend(trials: Sequence[Trial], settings: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Everything that stands below the tables with --explain."""
    found = findings(trials)
    return "\n".join([*remarks_on(found, settings), *details(found), *definitions(found, settings)])


class Silent:
    """A display that remembers what it was told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.skipped: set[str] = set()
        self.damaged: list[Problem] = []
        self.steps: list[Progress] = []
        self.finished: list[Trial] = []

    def start(
        self,
        planned: Sequence[TrialAddress],
        finished: set[str],
        target_clients: int,
        damaged: Sequence[Problem] = (),
        work: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.started, self.skipped, self.damaged = [address.id for address in planned], finished, list(damaged)

    def progress(self, trial: TrialAddress, share: int, step: Progress) -> None:
        self.steps.append(step)

    def done(self, trial: TrialAddress, result: Trial) -> None:
        self.finished.append(result)


def execute(chosen: RunConfig, folder: Path, share: int = 10**6, fresh: bool = False) -> tuple[Run, Silent]:
    """Run an audit in this process and read it back."""
    display = Silent()
    experiment = open_experiment(chosen)
    with Store(folder).open(
        describe(chosen, share, "gradveil audit small", sharing=sharing(experiment)), fresh
    ) as store:
        run(experiment, store, display, share)
    return load_run(folder), display


def without_times(value: Any) -> Any:
    """Drop what the clock decides."""
    if isinstance(value, dict):
        clock = {"seconds", "client_seconds", "iterations_per_second", "created"}
        return {key: without_times(item) for key, item in value.items() if key not in clock}
    return [without_times(item) for item in value] if isinstance(value, list) else value
