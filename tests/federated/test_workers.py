"""Trainings by worker processes end with the bits of one process, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gradveil.federated.training_run import TRAINING_RUN, describe, identity, run, site
from gradveil.federated.training_setup import TrainingTrial, open_setting, trials
from gradveil.federated.training_state import RoundResult, Status, load_standing
from gradveil.runs.pool import Processes
from tests.federated.test_engine import same
from tests.federated.test_run import config, timeless, trained
from tests.schedule.test_processes import workers

pytestmark = pytest.mark.processes


def test_run_with_a_killed_worker_equals_one_process(tmp_path: Path) -> None:
    setting = open_setting(config("validation=0.2", rounds=6, defences=["none", "topk(0.2, feedback=true)"]))
    whole, _ = trained(tmp_path / "whole", setting)
    seen: dict[str, list[int]] = {trial.id: [] for trial in trials(setting.config)}
    killed: list[int] = []

    def tell(trial: TrainingTrial, record: RoundResult, status: Status) -> None:
        seen[trial.id].append(record.number)
        if record.number == 2 and len(killed) < 2:
            killed.append(workers()[0])
            os.kill(killed[-1], signal.SIGKILL)

    with TRAINING_RUN.opened(tmp_path / "killed", describe(setting.config, "command")):
        result = run(setting, tmp_path / "killed", tell, Processes(site(setting, None), 2))
    assert len(killed) == 2
    assert set(map(tuple, seen.values())) == {(1, 2, 3, 4, 5, 6)}
    assert [timeless(row) for row in result] == [timeless(row) for row in whole]
    for trial in trials(setting.config):
        one, other = (
            load_standing(tmp_path / out / "trials" / f"{trial.id}.safetensors", identity(setting, trial))
            for out in ("whole", "killed")
        )
        assert one is not None
        assert other is not None
        assert same(one.params, other.params)
        assert all(same(one.clients[i], other.clients[i]) for i in one.clients)
