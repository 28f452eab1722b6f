"""Killed twenty times at points drawn at random, a training ends with the bits of one that was left alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradveil.audit.reader import read_training
from gradveil.core.tree import Tensors
from gradveil.federated.checkpoint import load_standing
from gradveil.federated.engine import Standing
from gradveil.federated.setting import cells, open_setting
from gradveil.federated.work import identity

pytestmark = pytest.mark.processes

RUN = """
name = "killed"
clients = 4
rounds = 45
absent = 0.2
defences = ["dp(clip=5, sigma=0.01) + topk(0.2, feedback=true)", "adgp"]
server = { optimiser = "yogi", lr = 0.02, weights = "angles" }
data = { name = "digits", size = 16, public = 200, gallery = 60 }
model = { name = "lenet-zhu" }
local = { batch = 16, lr = 0.01, epochs = 2, optimiser = "adam" }
"""
KILLS = 20


def start(folder: Path, out: str) -> subprocess.Popen[bytes]:
    file = folder / "killed.toml"
    file.write_text(RUN)
    command = [sys.executable, "-m", "gradveil", "train", str(file), "--threads", "1", "--out", str(folder / out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def standings(folder: Path) -> list[Standing]:
    setting = open_setting(read_training(str(folder.parent / "killed.toml")))
    found = []
    for cell in cells(setting.config):
        standing = load_standing(folder / "cells" / f"{cell.id}.safetensors", identity(setting, cell))
        assert standing is not None
        found.append(standing)
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_twenty_kills_change_nothing(tmp_path: Path):
    whole = start(tmp_path, "whole")
    chance, kills = random.Random(0), 0
    process = start(tmp_path, "killed")
    while kills < KILLS:
        cells_there = tmp_path / "killed" / "cells"
        before = {file: file.stat().st_mtime_ns for file in cells_there.glob("*.safetensors")} if kills else {}
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:  # it has to get on, or nothing would ever end
            now = {file: file.stat().st_mtime_ns for file in cells_there.glob("*.safetensors")}
            if now != before:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.12))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        process = start(tmp_path, "killed")
    assert process.wait(timeout=300) == 0
    assert whole.wait(timeout=300) == 0
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
    assert not [file for file in (tmp_path / "killed" / "cells").iterdir() if ".tmp-" in file.name]
