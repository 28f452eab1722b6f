"""A setting is declared once: checks, messages, the text form and lists follow from its annotation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest

from gradveil.attacks import Adam, Descent, Inversion, Trap
from gradveil.core import Bound, Count, GradveilError, Range
from gradveil.core.settings import Argument, Checked, Choice, Flag, NamedEntry, or_none, settings_of
from gradveil.core.text_form import read
from gradveil.core.user_code import own_entry


@dataclass(frozen=True)
class Noisy(Checked):
    std: Annotated[float, Range(0), "Standard deviation."]
    clip: Bound = math.inf
    on: Annotated[Literal["mean", "sum"], "What it is added to."] = "mean"
    often: Annotated[bool, "In every step."] = False
    inner: object = None
    label: ClassVar[str] = "noisy"


@dataclass(frozen=True)
class Fading(Noisy):
    rounds: Count = 3


def test_settings_are_the_annotated_fields():
    assert settings_of(Noisy)[0] == Argument("std", Range(0), help="Standard deviation.")
    assert [str(setting) for setting in settings_of(Fading)] == [
        "std (a number of at least 0; required)",
        "clip (a number above 0 or inf; default inf)",
        "on (one of: mean, sum; default mean)",
        "often (true or false; default false)",
        "rounds (a whole number of at least 1; default 3)",
    ]


def test_all_impossible_settings_are_reported():
    with pytest.raises(GradveilError) as caught:
        Fading(-1, 0, "both", 1, rounds=1.5)  # pyright: ignore[reportArgumentType]
    assert [str(problem) for problem in caught.value.problems] == [
        "noisy.std: is -1 -> give a number of at least 0",
        "noisy.clip: is 0 -> give a number above 0 or inf",
        "noisy.on: is 'both' -> give one of: mean, sum",
        "noisy.often: is 1 -> give true or false",
        "noisy.rounds: is 1.5 -> give a whole number of at least 1",
    ]


def quiet(std: Annotated[float, Range(0, 1), "Standard deviation."] = 0.5, name: str = "", more: float = 1) -> Noisy:
    return Noisy(std)


def test_annotated_arguments_of_custom_code_are_checked():
    entry = own_entry("tests.core.test_settings:quiet", "noise", lambda found: False, lambda made, name: made)
    assert entry.usage() == "std (a number in [0, 1]; default 0.5), more (a number, a word or a text; default 1)"
    with pytest.raises(GradveilError, match=r"quiet\.std: is 2 -> give a number in \[0, 1\]"):
        entry(std=2)


def test_the_text_form_follows_from_a_function_or_a_class():
    table = {"noisy": NamedEntry("noisy", Fading, "", ""), "quiet": NamedEntry("quiet", quiet, "", "")}
    assert table["noisy"].signature() == "noisy(std=…, clip=inf, on=mean, often=false, rounds=3)"
    table = {name: _Built(name, entry.factory, "", "") for name, entry in table.items()}
    assert [made for _, made in read("noisy(1, on=sum) + quiet", table, "noise")] == [Fading(1, on="sum"), Noisy(0.5)]
    with pytest.raises(GradveilError, match=r"std is 2\n.*\n.*\n.* -> give a number in \[0, 1\]"):
        read("quiet(2)", table, "noise")


class _Built(NamedEntry):
    def __call__(self, **values: object) -> object:
        return self.factory(**self.filled(values))


@pytest.mark.parametrize("allowed", [Range(0), Choice(("a",)), Flag()])
def test_or_none_allows_none(allowed: Range | Choice | Flag):
    free = or_none(Argument("x", allowed, 1))
    assert free.default is None
    assert not free.allowed.problems("x", None)
    assert allowed.problems("x", None)


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda: Inversion("mine", tv=-1.0, restarts=0), ["mine.tv", "mine.restarts"]),
        (lambda: Descent(Adam(), report=0, keep="first"), ["attack.keep", "attack.report"]),  # pyright: ignore
        (lambda: Adam(lr=0, sign="bold"), ["attack.lr", "attack.sign"]),  # pyright: ignore
        (lambda: Trap(rows=0, share=1.0), ["curious.rows", "curious.share"]),
    ],
)
def test_python_and_text_attacks_have_the_same_checks(build: Callable[[], object], where: list[str]):
    with pytest.raises(GradveilError) as caught:
        build()
    assert [problem.where for problem in caught.value.problems] == where
