"""Tasks in this process, and the sites of workers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import pytest

from gradveil.core.errors import fail
from gradveil.runs.messages import read, write
from gradveil.runs.task import Job, Parcel, Report, Site, Work, arrive, in_process


def doubling(setting: Mapping[str, Any]) -> Work:
    """Work that doubles a number and repeats bytes; odd ones are refused, 7 breaks."""

    def work(order: Parcel, report: Report) -> Parcel:
        number = order.facts["number"]
        report(Parcel({"begun": number}))
        if number == 7:
            raise ZeroDivisionError("seven")
        if number % 2:
            raise fail("number", f"is {number}", "give an even one")
        return Parcel({"twice": setting["times"] * number}, order.data * 2)

    return work


def refusing(_: Mapping[str, Any]) -> Work:
    raise fail("data", "are not here", "bring them")


def breaking(_: Mapping[str, Any]) -> Work:
    raise OSError("no disk")


def test_in_process_does_every_task_and_reports_progress() -> None:
    progress: list[tuple[int, Any]] = []

    def order(task: int) -> Parcel:
        if task == 4:
            raise fail("4.json", "is damaged", "remove it")
        return Parcel({"number": task}, b"ab")

    job = Job(doubling({"times": 2}), order, lambda task, parcel: progress.append((task, parcel.facts["begun"])))
    with in_process(job, [2, 3, 4, 7, 6]) as done:
        results = dict(done)
    assert results[2] == Parcel({"twice": 4}, b"abab")
    assert [results[task] for task in (3, 4)] == ["number: is 3 -> give an even one", "4.json: is damaged -> remove it"]
    assert re.fullmatch(r"ZeroDivisionError: seven \(test_tasks_in_process\.py, line \d+\)", str(results[7]))
    assert isinstance(results[6], Parcel)
    assert progress == [(2, 2), (3, 3), (7, 7), (6, 6)]


def test_a_site_is_opened_by_its_name() -> None:
    work = arrive(Site(f"{__name__}:doubling", {"times": 3}), 1)
    assert not isinstance(work, str)
    assert work(Parcel({"number": 2}), lambda _: None).facts == {"twice": 6}


@pytest.mark.parametrize(
    ("opener", "problem"),
    [
        (f"{__name__}:refusing", "data: are not here -> bring them"),
        (f"{__name__}:breaking", "OSError: no disk"),
        ("tests.schedule.nowhere:work", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
    ],
)
def test_arrive_site_that_cannot_be_opened_returns_the_reason(opener: str, problem: str) -> None:
    reason = arrive(Site(opener, {}), 1)
    assert isinstance(reason, str)
    assert problem in reason


def test_messages_round_trip_and_truncated_ones_are_none() -> None:
    pipe = io.BytesIO()
    write(pipe, "progress", Parcel({"loss": float("inf"), "name": "ü\n"}, b"\n\x00x"))
    write(pipe, "done", Parcel({}))
    whole = pipe.getvalue()
    reader = io.BytesIO(whole)
    assert read(reader) == ("progress", Parcel({"loss": float("inf"), "name": "ü\n"}, b"\n\x00x"))
    assert read(reader) == ("done", Parcel({}))
    assert read(reader) is None
    first = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for end in range(first):
        assert read(io.BytesIO(whole[:end])) is None
