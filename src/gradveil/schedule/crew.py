"""A crew of workers: whoever is free gets the next task, and a task whose worker is lost is given out again."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from gradveil.core.errors import fail
from gradveil.schedule.work import Done, Job, Parcel, T, ordered

TRIES = 3
"""How many workers a task may cost before it counts as failed."""
Kind = Literal["told", "done", "failed", "refused"]
"""What a worker says: news of its task, its result, why the task failed, why the worker cannot open its site."""


@dataclass(frozen=True)
class Message:
    """What came from a worker."""

    worker: Worker
    kind: Kind | None
    """None: nothing more will come, the worker is gone."""
    parcel: Parcel


class Worker(Protocol):
    """Somebody who does one task at a time, elsewhere, and puts what he says into the inbox he was hired with."""

    def send(self, order: Parcel) -> None:
        """Give out a task; that the worker is gone is noticed by what he says."""
        ...

    def end(self) -> str:
        """Stop the worker; say why he is gone, if he is."""
        ...


Inbox = queue.Queue[Message]
"""Where the messages of all workers arrive."""


@contextmanager
def crew(hire: Callable[[Inbox], Worker], workers: int, job: Job[T], tasks: Sequence[T]) -> Generator[Done[T]]:
    """Do the tasks with so many hired workers, whatever happens to them."""
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
        # Only now: whoever was free works while the results are looked at.
        yield from finished
        finished.clear()
        if not at:
            continue
        message = inbox.get()
        worker, parcel = message.worker, message.parcel
        if worker not in hired:  # it has been given up already
            continue
        if message.kind == "refused":
            raise fail("workers", parcel.facts["message"], "correct it and run the same command again")
        if message.kind == "told":
            job.heard(at[worker], parcel)
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
