"""Worker processes on this machine: two with one thread each do almost twice the work of one with two threads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from gradveil.schedule.crew import Inbox, Message, crew
from gradveil.schedule.pipes import read, write
from gradveil.schedule.work import Done, Job, Parcel, Site, T


@dataclass(frozen=True)
class Processes:
    """A schedule: so many processes of so many threads each."""

    site: Site
    workers: int
    threads: int = 1

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Get every task done; leaving the `with` ends the processes."""
        return crew(lambda inbox: _Process(self.site, self.threads, inbox), self.workers, job, tasks)


class _Process:
    """One process, told by its input and listened to by its output."""

    def __init__(self, site: Site, threads: int, inbox: Inbox) -> None:
        self.complaints = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed when the worker ends
        # Its own session: Ctrl-C reaches the parent only, which then ends its workers in order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil.schedule.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self.thread.start()
        self.send(Parcel({"opener": site.opener, "setting": site.setting, "threads": threads}))

    def _read(self, inbox: Inbox) -> None:
        assert self.process.stdout is not None
        while (said := read(self.process.stdout)) is not None:
            inbox.put(Message(self, *said))
        inbox.put(Message(self, None, Parcel({})))

    def send(self, order: Parcel) -> None:
        """Give out a task; a dead process is noticed when its output ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            write(self.process.stdin, "order", order)

    def end(self) -> str:
        """Stop the process and say what it ended with, and the last thing it complained about."""
        self.process.kill()
        code = self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.complaints.seek(0)
        lines = self.complaints.read().decode("utf-8", "replace").strip().splitlines()
        self.complaints.close()
        return f"the worker process ended with code {code}" + (f": {lines[-1]}" if lines else "")


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
