"""A worker pool finishes every task, whatever happens to its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradveil.core.errors import GradveilError
from gradveil.runs.pool import TRIES, Inbox, Message, Worker, crew
from gradveil.runs.task import Job, Parcel

Script = Callable[[int, int], str]
"""(task, how often it was given out before) -> what a worker does with it."""


class Crew:
    """Workers that follow a script, and what became of them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.hired = self.ended = 0
        self.given: list[int] = []
        self.heard: list[tuple[int, Any]] = []

    def hire(self, inbox: Inbox) -> Worker:
        self.hired += 1
        return Scripted(self, inbox)

    def run(self, workers: int, tasks: list[int]) -> dict[int, Parcel | str]:
        def heard(task: int, news: Parcel) -> None:
            self.heard.append((task, news.data))

        job = Job(lambda order, tell: order, lambda task: Parcel({"number": task}), heard)
        with crew(self.hire, workers, job, tasks) as done:
            found = list(done)
        assert len(found) == len(tasks), "each task comes back once"
        return dict(found)


class Scripted:
    """One worker."""

    def __init__(self, crew: Crew, inbox: Inbox) -> None:
        self.crew, self.inbox = crew, inbox

    def send(self, order: Parcel) -> None:
        task = order.facts["number"]
        deed = self.crew.script(task, self.crew.given.count(task))
        self.crew.given.append(task)
        self.inbox.put(Message(self, "told", Parcel({}, b"news")))
        if deed in ("dies", "dies twice"):
            self.inbox.put(Message(self, None, Parcel({})))
        if deed == "dies twice":
            self.inbox.put(Message(self, None, Parcel({})))
        if deed in ("dies", "dies twice"):
            return
        if deed in ("failed", "refused"):
            self.inbox.put(Message(self, deed, Parcel({"message": f"{deed} {task}"})))  # pyright: ignore
        else:
            self.inbox.put(Message(self, "done", Parcel({"did": task})))
        if deed == "dies after":
            self.inbox.put(Message(self, None, Parcel({})))

    def end(self) -> str:
        self.crew.ended += 1
        return "the worker is gone"


def test_all_tasks_come_back_once_and_the_workers_go() -> None:
    team = Crew(lambda task, before: "failed" if task == 3 else "does")
    found = team.run(2, [1, 2, 3, 4, 5])
    assert found == {**{n: Parcel({"did": n}) for n in (1, 2, 4, 5)}, 3: "failed 3"}
    assert (team.hired, team.ended) == (2, 2)
    assert sorted(team.heard) == [(n, b"news") for n in (1, 2, 3, 4, 5)]
    assert Crew(lambda task, before: "does").run(4, []) == {}


def test_there_are_no_more_workers_than_tasks() -> None:
    team = Crew(lambda task, before: "does")
    team.run(8, [1, 2])
    assert team.hired == 2


def test_a_task_whose_worker_dies_is_done_by_another() -> None:
    team = Crew(lambda task, before: "dies" if task == 2 and before < TRIES - 1 else "does")
    assert team.run(2, [1, 2, 3]) == {n: Parcel({"did": n}) for n in (1, 2, 3)}
    assert team.given.count(2) == TRIES
    assert team.hired == team.ended == 1 + TRIES - 1


def test_a_worker_whose_end_is_reported_twice_is_replaced_once() -> None:
    team = Crew(lambda task, before: "dies twice" if before == 0 else "does")
    assert team.run(2, [1, 2, 3]) == {n: Parcel({"did": n}) for n in (1, 2, 3)}
    assert [team.given.count(n) for n in (1, 2, 3)] == [2, 2, 2]


def test_a_task_that_costs_too_many_workers_fails_and_the_others_are_done() -> None:
    team = Crew(lambda task, before: "dies" if task == 2 else "does")
    found = team.run(1, [1, 2, 3])
    assert found == {1: Parcel({"did": 1}), 2: "the worker is gone (3 times)", 3: Parcel({"did": 3})}
    assert team.given.count(2) == TRIES == 3


def test_a_worker_that_dies_with_nothing_to_do_is_not_missed() -> None:
    team = Crew(lambda task, before: "dies after" if task == 1 else "does")
    assert len(team.run(2, [1, 2])) == 2
    assert team.ended == team.hired


def test_a_site_that_cannot_be_opened_ends_everything() -> None:
    team = Crew(lambda task, before: "refused" if task == 2 else "does")
    with pytest.raises(GradveilError, match="refused 2"):
        team.run(1, [1, 2, 3])
    assert (team.hired, team.ended) == (1, 1)


def test_whoever_is_free_works_while_a_result_is_looked_at() -> None:
    team = Crew(lambda task, before: "does")
    job: Job[int] = Job(lambda order, tell: order, lambda task: Parcel({"number": task}), lambda task, news: None)
    with crew(team.hire, 1, job, [1, 2]) as done:
        next(done)
        assert team.given == [1, 2]
    assert team.ended == 1
