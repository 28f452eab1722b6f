"""Worker processes on this machine: a free worker gets the next task; tasks of lost workers are repeated."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from gradveil.core.errors import fail
from gradveil.runs.messages import read, write
from gradveil.runs.task import Done, Job, Parcel, Site, T, ordered

TRIES = 3
"""Number of workers that a task may lose before it counts as failed."""
Kind = Literal["progress", "done", "failed", "refused"]
"""Progress or the result of a task, the reason of its failure, or the reason why a worker cannot open its site."""


@dataclass(frozen=True)
class Message:
    """A message from a worker."""

    worker: Worker
    kind: Kind | None
    """None if the worker is gone and sends nothing more."""
    parcel: Parcel


class Worker(Protocol):
    """A worker elsewhere that does one task at a time, and whose messages arrive in the inbox it was started with."""

    def send(self, order: Parcel) -> None:
        """Send a task; a message to the inbox reports a worker that is gone."""
        ...

    def end(self) -> str:
        """Stop the worker; return the reason if it was gone."""
        ...


Inbox = queue.Queue[Message]
"""The queue of all workers' messages."""


@contextmanager
def crew(hire: Callable[[Inbox], Worker], workers: int, job: Job[T], tasks: Sequence[T]) -> Generator[Done[T]]:
    """Do the tasks with up to `workers` workers; replace workers that are lost."""
    hired: list[Worker] = []
    inbox: Inbox = queue.Queue()

    def another() -> Worker:
        hired.append(hire(inbox))
        return hired[-1]

    try:
        yield _results(another, hired, inbox, workers, job, tasks)
    finally:
        for worker in hired:
            worker.end()


def _results(
    hire: Callable[[], Worker], hired: list[Worker], inbox: Inbox, workers: int, job: Job[T], tasks: Sequence[T]
) -> Done[T]:
    waiting, lost = deque(tasks), Counter[T]()
    at: dict[Worker, T] = {}
    idle: list[Worker] = []
    finished: list[tuple[T, Parcel | str]] = []
    while waiting or at:
        while waiting and len(at) < workers:
            task = waiting.popleft()
            order = ordered(job, task)
            if isinstance(order, str):
                finished.append((task, order))
                continue
            worker = idle.pop() if idle else hire()
            at[worker] = task
            worker.send(order)
        # Only now, so that idle workers are busy while the caller reads the results.
        yield from finished
        finished.clear()
        if not at:
            continue
        message = inbox.get()
        worker, parcel = message.worker, message.parcel
        if worker not in hired:  # its task has been given to another one
            continue
        if message.kind == "refused":
            raise fail("workers", parcel.facts["message"], "correct it and run the same command again")
        if message.kind == "progress":
            job.progress(at[worker], parcel)
        elif message.kind is not None:
            idle.append(worker)
            finished.append((at.pop(worker), parcel if message.kind == "done" else parcel.facts["message"]))
        else:
            hired.remove(worker)
            why = worker.end()
            if worker in idle:
                idle.remove(worker)
                continue
            task = at.pop(worker)
            lost[task] += 1
            if lost[task] < TRIES:
                waiting.appendleft(task)
            else:
                finished.append((task, f"{why} ({TRIES} times)"))
    yield from finished


@dataclass(frozen=True)
class Processes:
    """A scheduler with worker processes of `threads` threads each."""

    site: Site
    workers: int
    threads: int = 1

    def __call__(self, job: Job[T], tasks: Sequence[T]) -> AbstractContextManager[Done[T]]:
        """Do every task; leaving the `with` ends the processes."""
        return crew(lambda inbox: _Process(self.site, self.threads, inbox), self.workers, job, tasks)


class _Process:
    """One process, which reads orders from its input and writes messages to its output."""

    def __init__(self, site: Site, threads: int, inbox: Inbox) -> None:
        self.errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed when the worker ends
        # A session of its own: Ctrl-C reaches only the parent, which then ends its workers in order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil.runs.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self.thread.start()
        self.send(Parcel({"opener": site.opener, "setting": site.setting, "threads": threads}))

    def _read(self, inbox: Inbox) -> None:
        assert self.process.stdout is not None
        while (message := read(self.process.stdout)) is not None:
            inbox.put(Message(self, *message))
        inbox.put(Message(self, None, Parcel({})))

    def send(self, order: Parcel) -> None:
        """Send a task; a dead process shows when its output ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            write(self.process.stdin, "order", order)

    def end(self) -> str:
        """Stop the process; return its exit code and the last line of its errors."""
        self.process.kill()
        code = self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        self.errors.close()
        return f"the worker process ended with code {code}" + (f": {lines[-1]}" if lines else "")


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
