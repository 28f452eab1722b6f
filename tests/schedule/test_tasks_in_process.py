"""Tasks done in this process, and what a worker makes of a site."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import pytest

from gradveil.core.errors import fail
from gradveil.runs.messages import read, write
from gradveil.runs.task import Job, Parcel, Site, Tell, Work, arrive, in_process


def doubling(setting: Mapping[str, Any]) -> Work:
    """Work that doubles a number and repeats bytes; odd ones are refused, 7 breaks."""

    def work(order: Parcel, tell: Tell) -> Parcel:
        number = order.facts["number"]
        tell(Parcel({"begun": number}))
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


def test_tasks_are_done_in_order_and_news_is_heard() -> None:
    heard: list[tuple[int, Any]] = []

    def order(task: int) -> Parcel:
        if task == 4:
            raise fail("4.json", "is damaged", "remove it")
        return Parcel({"number": task}, b"ab")

    job = Job(doubling({"times": 2}), order, lambda task, news: heard.append((task, news.facts["begun"])))
    with in_process(job, [2, 3, 4, 7, 6]) as done:
        found = dict(done)
    assert found[2] == Parcel({"twice": 4}, b"abab")
    assert [found[task] for task in (3, 4)] == ["number: is 3 -> give an even one", "4.json: is damaged -> remove it"]
    assert re.fullmatch(r"ZeroDivisionError: seven \(test_tasks_in_process\.py, line \d+\)", str(found[7]))
    assert isinstance(found[6], Parcel)
    assert heard == [(2, 2), (3, 3), (7, 7), (6, 6)]


def test_a_site_is_opened_by_its_name() -> None:
    work = arrive(Site(f"{__name__}:doubling", {"times": 3}), 1)
    assert not isinstance(work, str)
    assert work(Parcel({"number": 2}), lambda _: None).facts == {"twice": 6}


@pytest.mark.parametrize(
    ("opener", "told"),
    [
        (f"{__name__}:refusing", "data: are not here -> bring them"),
        (f"{__name__}:breaking", "OSError: no disk"),
        ("tests.schedule.nowhere:work", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
    ],
)
def test_a_site_that_cannot_be_opened_says_why(opener: str, told: str) -> None:
    found = arrive(Site(opener, {}), 1)
    assert isinstance(found, str)
    assert told in found


def test_parcels_cross_a_pipe_and_one_cut_off_is_none() -> None:
    pipe = io.BytesIO()
    write(pipe, "told", Parcel({"loss": float("inf"), "name": "ü\n"}, b"\n\x00x"))
    write(pipe, "done", Parcel({}))
    whole = pipe.getvalue()
    reader = io.BytesIO(whole)
    assert read(reader) == ("told", Parcel({"loss": float("inf"), "name": "ü\n"}, b"\n\x00x"))
    assert read(reader) == ("done", Parcel({}))
    assert read(reader) is None
    first = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for end in range(first):
        assert read(io.BytesIO(whole[:end])) is None
