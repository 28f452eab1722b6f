"""Killed at any point and started again, an audit ends with the records of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradveil.audit.run_directory import load_run
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
    head = [sys.executable, "-m", "gradveil", "audit", str(folder / "small.toml")]
    return [*head, "--out", str(folder / out), *more]


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(folder, out, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(folder: Path, out: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, out, *more), capture_output=True, text=True, timeout=300, check=False)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbed, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "whole", "--workers", "1")
    assert done.returncode == 0, done.stderr
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
        process = start(tmp_path, "killed", "--workers", workers)
        before = len(finished)
        wait_for(tmp_path / "killed", pattern, process)
        end = time.monotonic() + 120
        while "trials" in pattern and process.poll() is None and time.monotonic() < end:
            if len(trials_in(tmp_path / "killed")) > before:
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = trials_in(tmp_path / "killed")
        assert set(finished) <= set(now), "a finished trial was lost"
        finished = now
    done = run(tmp_path, "killed", "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert len(trials_in(tmp_path / "killed")) == 4
    assert not list((tmp_path / "killed").rglob("*.tmp-*"))
    assert_same(tmp_path / "killed", undisturbed)


def trials_in(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("trials/*/trial.json") if ".tmp-" not in file.parent.name)


def test_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    # Long enough that trials are left when the first one is there, also where this test is kept waiting.
    long = ("--attack", "ig(iterations=1000, report=10)")
    process = subprocess.Popen(
        command(tmp_path, "out", *long),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(tmp_path / "out", "trials/*/trial.json", process)  # pyright: ignore[reportArgumentType]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.count("run the same command again") == 1
    assert said.count(str(tmp_path / "small.toml")) == 1
    assert "Traceback" not in said
    assert load_run(tmp_path / "out").trials
    assert run(tmp_path, "out", *long).returncode == 0
    assert len(load_run(tmp_path / "out").trials) == 4


def test_a_worker_that_dies_fails_its_trial_only(tmp_path: Path) -> None:
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
        if x.requires_grad and os.environ.get("OMP_NUM_THREADS") == "1" and os.environ.get("DIES"):
            os._exit(9)
        return self.inner(x)

def net(channels, size, classes, generator):
    return Dies(build("lenet-zhu", channels=channels, size=size, classes=classes, generator=generator))
"""
    (tmp_path / "deadly.py").write_text(source)
    words = command(tmp_path, "out", "--workers", "2", "--defence", "none", "--set", "model.name=deadly:net")
    environment = {**os.environ, "DIES": "1", "PYTHONPATH": str(tmp_path)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    (trial,) = load_run(tmp_path / "out").trials
    assert trial.failed is not None
    assert "ended with code 9" in trial.failed
    environment.pop("DIES")
    again = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert again.returncode == 0, again.stderr
    assert load_run(tmp_path / "out").trials[0].failed is None
