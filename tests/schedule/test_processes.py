"""Worker processes: killed ones are replaced, refused ones end the run, none stays behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gradveil.core.errors import GradveilError
from gradveil.runs.pool import Processes
from gradveil.runs.task import Job, Parcel, Site, in_process
from tests.schedule.worker_sites import deadly

pytestmark = pytest.mark.processes


def workers() -> list[int]:
    """List the worker processes of this process."""
    threads = Path(f"/proc/{os.getpid()}/task")
    children = [int(pid) for task in threads.iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in children if b"gradveil.runs.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def job(setting: dict[str, Any], progress: list[Parcel]) -> Job[int]:
    return Job(
        deadly(setting), lambda n: Parcel({"number": n}, b"\n" * 100_000), lambda n, parcel: progress.append(parcel)
    )


def test_processes_replace_killed_workers_and_give_up_a_deadly_task(tmp_path: Path) -> None:
    setting = {"marks": str(tmp_path), "kills": {"2": 1, "3": 9}}
    progress: list[Parcel] = []
    processes = Processes(Site("tests.schedule.worker_sites:deadly", setting), 2)
    with processes(job(setting, progress), [1, 2, 3]) as done:
        results = dict(done)
    assert results == {
        1: Parcel({"did": 1}, b"\n" * 100_000),
        2: Parcel({"did": 2}, b"\n" * 200_000),
        3: "the worker process ended with code -9: a line that must not reach the messages (3 times)",
    }
    assert progress == [Parcel({"threads": 1}, b"\n" * 100_000)] * 6
    assert not workers()
    with in_process(job(setting, progress), [1, 2]) as done:
        assert {n: results[n] for n in (1, 2)} == dict(done)


def test_processes_site_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    processes = Processes(Site("tests.schedule.worker_sites:refusing", {}), 1)
    with (
        pytest.raises(GradveilError, match="workers: OSError: the disk has gone"),
        processes(job({}, []), [1]) as done,
    ):
        next(done)
    assert not workers()
