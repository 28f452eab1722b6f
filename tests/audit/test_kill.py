"""Killed at points drawn at random and started again, an audit ends with the results of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.audit.forked_commands import begin, left_over, workers_of
from tests.audit.runs import without_times

pytestmark = pytest.mark.processes

RUN = """
name = "killed"
target_clients = 2
seeds = [0, 1, 2, 3]
attacks = ["ig(iterations=16, restarts=2)", "cdia(iterations=12)"]
defences = ["none", "gaussian(0.01) + topk(0.2, feedback=true)", "dropout"]
data = { name = "faces", size = 16 }
model = { name = "lenet-zhu" }
"""
KILLS, TRIALS = 20, 24
State = dict[Path, tuple[int, int]]
"""Files, and what changes when one is written again."""


def state(folder: Path, *patterns: str) -> State:
    """The files of these patterns that lie there whole."""
    while True:
        try:
            files = [file for pattern in patterns for file in folder.glob(pattern) if ".tmp-" not in str(file)]
            return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}
        except FileNotFoundError:  # put in place or removed while it was looked at
            continue


def finished(folder: Path) -> State:
    return state(folder, "trials/*/*")


def results(folder: Path) -> dict[str, Any]:
    """What a run came to: records, facts and images of every trial, but for what the clock decides."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("trials/*/*")):
        name = str(file.relative_to(folder))
        found[name] = without_times(json.loads(file.read_bytes())) if file.suffix == ".json" else file.read_bytes()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An audit that was left alone, and the seconds that each of its trials took."""
    folder = tmp_path_factory.mktemp("audits")
    (folder / "killed.toml").write_text(RUN)
    started = time.monotonic()
    process = begin(folder, ["audit", "killed.toml", "--out", "whole", "--workers", "1"])
    try:
        process.join(300)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert len(finished(folder / "whole")) == 3 * TRIALS
    return folder / "whole", (time.monotonic() - started) / TRIALS


class Audit:
    """An audit that is killed and started again, and what of it was finished."""

    def __init__(self, out: Path, workers: int) -> None:
        self.out = out
        self.command = ["audit", "killed.toml", "--out", str(out), "--workers", str(workers)]
        self.process = begin(out.parent, self.command)
        self.workers = set[int]()
        self.done = State()

    def alive(self) -> bool:
        return self.process.exitcode is None

    def wait(self, what: Callable[[], object], seconds: float = 60) -> None:
        """Wait for something as long as the audit lives."""
        end = time.monotonic() + seconds
        while not what() and self.alive() and time.monotonic() < end:
            time.sleep(0.005)

    def get_on(self) -> None:
        """Wait until it has planned or finished a trial."""
        before = state(self.out, "trials/*", "plans/*/*")
        self.wait(lambda: state(self.out, "trials/*", "plans/*/*") != before)

    def find_workers(self) -> list[int]:
        found = workers_of(self.process.pid or 0)
        self.workers |= found
        return sorted(found)

    def kill(self) -> None:
        """Kill all of it; its workers notice. What is finished stays as it is."""
        self.find_workers()
        self.process.kill()
        self.process.join()
        assert not left_over(self.workers)
        self.look()
        self.process = begin(self.out.parent, self.command)

    def kill_worker(self, chance: random.Random) -> None:
        self.wait(self.find_workers)
        os.kill(chance.choice(self.find_workers()), signal.SIGKILL)
        self.look()

    def look(self) -> None:
        now = finished(self.out)
        assert self.done.items() <= now.items(), "what is finished is never made again"
        self.done = now

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        for pid in left_over(self.workers):
            os.kill(pid, signal.SIGKILL)


def disturb(alone: Path, pause: float, strikes: list[str], workers: int) -> None:
    """Kill an audit again and again, let it end, and hold it against the one that was left alone."""
    chance, audit = random.Random(0), Audit(alone.parent / f"by-{workers}", workers)
    try:
        for count, strike in enumerate(strikes):
            if chance.random() < 0.75:  # else it may be killed before it has done anything
                audit.get_on()
            time.sleep(chance.uniform(0, pause))
            if not audit.alive():  # a machine that was busy when `pause` was measured is faster now
                assert count > len(strikes) / 2, f"it was over after {count} kills: make it longer"
                break
            if strike == "worker":
                audit.kill_worker(chance)
            else:
                audit.kill()
        audit.process.join(300)
        assert audit.process.exitcode == 0
        audit.look()
    finally:
        audit.end()
    assert results(audit.out) == results(alone)
    assert not [file for file in audit.out.rglob("*") if ".tmp-" in file.name]


def test_twenty_kills_change_nothing_and_lose_nothing(whole: tuple[Path, float]) -> None:
    disturb(*whole, ["whole"] * KILLS, workers=1)


def test_killed_workers_and_their_killed_parents_change_nothing(whole: tuple[Path, float]) -> None:
    # Two at the most before the whole: a trial that costs three workers is given up.
    disturb(*whole, [*["worker", "worker", "whole"] * 2, "worker", "worker"], workers=2)
