"""A worker pool finishes every task, whatever happens to its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradveil.core.errors import GradveilError
from gradveil.runs.pool import TRIES, Inbox, Message, Worker, crew
from gradveil.runs.task import Job, Parcel

Script = Callable[[int, int], str]
"""(task, number of earlier workers that got it) -> what the worker does with it."""


class Crew:
    """Workers that follow a script, with counts of their starts and ends."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.hired = self.ended = 0
        self.orders: list[int] = []
        self.progress: list[tuple[int, Any]] = []

    def hire(self, inbox: Inbox) -> Worker:
        self.hired += 1
        return Scripted(self, inbox)

    def run(self, workers: int, tasks: list[int]) -> dict[int, Parcel | str]:
        job: Job[int] = Job(
            lambda order, report: order,
            lambda task: Parcel({"number": task}),
            lambda task, parcel: self.progress.append((task, parcel.data)),
        )
        with crew(self.hire, workers, job, tasks) as done:
            results = list(done)
        assert len(results) == len(tasks), "each task comes back once"
        return dict(results)


class Scripted:
    """One worker."""

    def __init__(self, crew: Crew, inbox: Inbox) -> None:
        self.crew, self.inbox = crew, inbox

    def send(self, order: Parcel) -> None:
        task = order.facts["number"]
        action = self.crew.script(task, self.crew.orders.count(task))
        self.crew.orders.append(task)
        self.inbox.put(Message(self, "progress", Parcel({}, b"news")))
        if action in ("dies", "dies twice"):
            self.inbox.put(Message(self, None, Parcel({})))
        if action == "dies twice":
            self.inbox.put(Message(self, None, Parcel({})))
        if action in ("dies", "dies twice"):
            return
        if action in ("failed", "refused"):
            self.inbox.put(Message(self, action, Parcel({"message": f"{action} {task}"})))  # pyright: ignore
        else:
            self.inbox.put(Message(self, "done", Parcel({"did": task})))
        if action == "dies after":
            self.inbox.put(Message(self, None, Parcel({})))

    def end(self) -> str:
        self.crew.ended += 1
        return "the worker is gone"


def test_pool_returns_every_task_once_and_ends_its_workers() -> None:
    team = Crew(lambda task, before: "failed" if task == 3 else "does")
    results = team.run(2, [1, 2, 3, 4, 5])
    assert results == {**{n: Parcel({"did": n}) for n in (1, 2, 4, 5)}, 3: "failed 3"}
    assert (team.hired, team.ended) == (2, 2)
    assert sorted(team.progress) == [(n, b"news") for n in (1, 2, 3, 4, 5)]
    assert Crew(lambda task, before: "does").run(4, []) == {}


def test_pool_has_at_most_one_worker_per_task() -> None:
    team = Crew(lambda task, before: "does")
    team.run(8, [1, 2])
    assert team.hired == 2


def test_pool_repeats_the_task_of_a_lost_worker() -> None:
    team = Crew(lambda task, before: "dies" if task == 2 and before < TRIES - 1 else "does")
    assert team.run(2, [1, 2, 3]) == {n: Parcel({"did": n}) for n in (1, 2, 3)}
    assert team.orders.count(2) == TRIES
    assert team.hired == team.ended == 1 + TRIES - 1


def test_pool_worker_whose_end_is_reported_twice_is_replaced_once() -> None:
    team = Crew(lambda task, before: "dies twice" if before == 0 else "does")
    assert team.run(2, [1, 2, 3]) == {n: Parcel({"did": n}) for n in (1, 2, 3)}
    assert [team.orders.count(n) for n in (1, 2, 3)] == [2, 2, 2]


def test_pool_task_that_loses_too_many_workers_fails_alone() -> None:
    team = Crew(lambda task, before: "dies" if task == 2 else "does")
    results = team.run(1, [1, 2, 3])
    assert results == {1: Parcel({"did": 1}), 2: "the worker is gone (3 times)", 3: Parcel({"did": 3})}
    assert team.orders.count(2) == TRIES == 3


def test_pool_ignores_the_end_of_an_idle_worker() -> None:
    team = Crew(lambda task, before: "dies after" if task == 1 else "does")
    assert len(team.run(2, [1, 2])) == 2
    assert team.ended == team.hired


def test_pool_site_that_cannot_be_opened_raises() -> None:
    team = Crew(lambda task, before: "refused" if task == 2 else "does")
    with pytest.raises(GradveilError, match="refused 2"):
        team.run(1, [1, 2, 3])
    assert (team.hired, team.ended) == (1, 1)


def test_pool_idle_worker_gets_a_task_before_the_result_is_read() -> None:
    team = Crew(lambda task, before: "does")
    job: Job[int] = Job(lambda order, report: order, lambda task: Parcel({"number": task}), lambda task, parcel: None)
    with crew(team.hire, 1, job, [1, 2]) as done:
        next(done)
        assert team.orders == [1, 2]
    assert team.ended == 1
