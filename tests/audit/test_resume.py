"""Killed at any point and started again, an audit ends with the records of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.audit.run_directory import load_run
from gradveil.cli.app import run
from tests.audit.forked_commands import begin
from tests.audit.test_store import assert_same

pytestmark = pytest.mark.processes

RUN = """
name = "small"
target_clients = 3
attacks = ["ig(iterations=150, report=10)"]
defences = ["none", "gaussian(0.01)", "prune(0.9)", "dgp"]
data = { name = "faces", size = 16 }
model = { name = "lenet-zhu" }
"""


def command(folder: Path, out: str, *more: str) -> list[str]:
    (folder / "small.toml").write_text(RUN)
    return ["audit", str(folder / "small.toml"), "--out", str(folder / out), *more]


def wait_for(folder: Path, pattern: str, alive: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)) and alive() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbed, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(command(folder, "whole", "--workers", "1")) == 0
    return folder / "whole"


# Once as soon as the directory is there, then shortly after a new trial, at different points of the next one.
@pytest.mark.parametrize(
    ("workers", "kills"),
    [("1", (("run.json", 0.0), ("trials/*/trial.json", 0.05))), ("2", (("trials/*/trial.json", 0.3),))],
)
def test_kills_lose_nothing_but_the_trials_in_flight(
    tmp_path: Path, undisturbed: Path, workers: str, kills: tuple[tuple[str, float], ...]
) -> None:
    finished: list[str] = []
    for pattern, delay in kills:
        process = begin(tmp_path, command(tmp_path, "killed", "--workers", workers))
        before = len(finished)
        wait_for(tmp_path / "killed", pattern, process.is_alive)
        end = time.monotonic() + 120
        while "trials" in pattern and process.is_alive() and time.monotonic() < end:
            if len(trials_in(tmp_path / "killed")) > before:
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was over before it was killed"
        now = trials_in(tmp_path / "killed")
        assert set(finished) <= set(now), "a finished trial was lost"
        finished = now
    assert run(command(tmp_path, "killed", "--workers", workers)) == 0
    assert len(trials_in(tmp_path / "killed")) == 4
    assert not list((tmp_path / "killed").rglob("*.tmp-*"))
    assert_same(tmp_path / "killed", undisturbed)


def trials_in(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("trials/*/trial.json") if ".tmp-" not in file.parent.name)


def test_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    # The first trials are short, and all others so long that they are left, also where this test is kept waiting.
    words = command(tmp_path, "out", "--attack", "ig(iterations=5)", "--attack", "ig(iterations=400, report=10)")
    process = subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(tmp_path / "out", "trials/*/trial.json", lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.count("run the same command again") == 1
    assert said.count(str(tmp_path / "small.toml")) == 1
    assert "Traceback" not in said
    assert load_run(tmp_path / "out").trials
    assert run([*words, "--workers", "1"]) == 0
    assert len(load_run(tmp_path / "out").trials) == 8


def test_a_worker_that_dies_fails_its_trial_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model ends its process, as the kernel does when memory runs out, whenever its update is made in a worker."""
    source = """
import os
import torch
from gradveil.nn.models import build

class Dies(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if x.requires_grad and os.environ.get("DIES_OUTSIDE") not in (None, str(os.getpid())):
            os._exit(9)
        return self.inner(x)

def net(channels, size, classes, generator):
    return Dies(build("lenet-zhu", channels=channels, size=size, classes=classes, generator=generator))
"""
    (tmp_path / "deadly.py").write_text(source)
    alone = ("--target-clients", "1", "--defence", "none")
    words = command(tmp_path, "out", "--workers", "2", *alone, "--set", "model.name=deadly:net")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DIES_OUTSIDE", str(os.getpid()))
    assert run(words) == 1, capsys.readouterr().err
    (trial,) = load_run(tmp_path / "out").trials
    assert trial.failed is not None
    assert "ended with code 9" in trial.failed
    monkeypatch.delenv("DIES_OUTSIDE")
    assert run(words) == 0, capsys.readouterr().err
    assert load_run(tmp_path / "out").trials[0].failed is None
