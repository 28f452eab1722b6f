"""Killed twenty times at points drawn at random, a training ends with the bits of one that was left alone."""

from __future__ import annotations

import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from gradveil.audit.run_file import read_training
from gradveil.core.tree import Tensors
from gradveil.federated.parallel_clients import FEWEST, groups
from gradveil.federated.training_run import identity
from gradveil.federated.training_setup import open_setting, trials
from gradveil.federated.training_state import Standing, load_standing
from tests.audit.forked_commands import begin

pytestmark = pytest.mark.processes

RUN = """
name = "killed"
clients = 8
rounds = 45
absent = 0.2
defences = ["dp(clip=5, sigma=0.01) + topk(0.2, feedback=true)", "adgp"]
server = { optimiser = "yogi", lr = 0.02, weights = "angles" }
data = { name = "digits", size = 16, public = 200, gallery = 60 }
model = { name = "lenet-zhu" }
local = { batch = 8, lr = 0.01, epochs = 2, optimiser = "adam" }
"""
KILLS = 20


def start(folder: Path, out: str) -> BaseProcess:
    (folder / "killed.toml").write_text(RUN)
    return begin(folder, ["train", "killed.toml", "--threads", "1", "--workers", "1", "--out", out])


def standings(folder: Path) -> list[Standing]:
    setting = open_setting(read_training(str(folder.parent / "killed.toml")))
    found = []
    for trial in trials(setting.config):
        standing = load_standing(folder / "trials" / f"{trial.id}.safetensors", identity(setting, trial))
        assert standing is not None
        found.append(standing)
    return found


def at_once(folder: Path) -> list[int]:
    """How many clients of each training compute at once in its first round."""
    setting = open_setting(read_training(str(folder / "killed.toml")))
    found = []
    for trial in trials(setting.config):
        experiment = setting.federation(trial)
        batches = {i: experiment.shares[i].train for i in experiment.chosen(1)[0]}
        found.append(max(map(len, groups(experiment.client, experiment.client.params(), batches, "auto"))))
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_twenty_kills_change_nothing(tmp_path: Path):
    whole = start(tmp_path, "whole")
    assert min(at_once(tmp_path)) >= FEWEST
    chance, kills = random.Random(0), 0
    process = start(tmp_path, "killed")
    while kills < KILLS:
        trials_there = tmp_path / "killed" / "trials"
        before = {file: file.stat().st_mtime_ns for file in trials_there.glob("*.safetensors")} if kills else {}
        end = time.monotonic() + 60
        while time.monotonic() < end and process.is_alive():  # it has to get on, or nothing would ever end
            now = {file: file.stat().st_mtime_ns for file in trials_there.glob("*.safetensors")}
            if now != before:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.12))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
        process = start(tmp_path, "killed")
    for each in (process, whole):
        each.join(300)
        assert each.exitcode == 0
    assert kills == KILLS, "the training was over before it was killed so often: make it longer"
    for one, other in zip(standings(tmp_path / "whole"), standings(tmp_path / "killed"), strict=True):
        assert [r.number for r in other.records] == list(range(1, 46))
        assert [(r.clients, r.accuracy, r.loss, r.bytes_up) for r in one.records] == [
            (r.clients, r.accuracy, r.loss, r.bytes_up) for r in other.records
        ]
        assert equal(one.params, other.params)
        assert equal(one.server, other.server)
        assert one.clients.keys() == other.clients.keys()
        assert all(equal(one.clients[i], other.clients[i]) for i in one.clients)
    assert not [file for file in (tmp_path / "killed" / "trials").iterdir() if ".tmp-" in file.name]
