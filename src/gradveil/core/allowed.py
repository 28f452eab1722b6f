"""What a setting may be: one description serves the check, the error message and the documentation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gradveil.core.errors import Problem


@dataclass(frozen=True)
class Range:
    """A number between two bounds; an open bound is excluded. NaN is never allowed.

    >>> str(Range(0, 1, high_open=True)), str(Range(0, low_open=True)), str(Range(1, integer=True))
    ('a number in [0, 1)', 'a number above 0', 'a whole number of at least 1')
    """

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    unlimited: bool = False
    """Infinity is allowed: no bound, no clipping."""
    odd: bool = False
    optional: bool = False
    """None is allowed: the model's own setting."""

    def __str__(self) -> str:
        """Say in words what is allowed."""
        kind = "an odd number" if self.odd else "a whole number" if self.integer else "a number"
        end = (" or inf" if self.unlimited else "") + (", or none" if self.optional else "")
        if self.high < math.inf:
            left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
            return f"{kind} in {left}{self.low:g}, {self.high:g}{right}{end}"
        return f"{kind} {'above' if self.low_open else 'of at least'} {self.low:g}{end}"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return what is wrong with a value, if anything."""
        return [] if self._holds(value) else [Problem(where, f"is {value!r}", f"give {self}")]

    def _holds(self, value: object) -> bool:
        if value is None and self.optional:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            value = float(value)
        except OverflowError:  # a whole number beyond all floats
            return False
        if self.integer and not (math.isfinite(value) and value == int(value)):
            return False
        if self.odd and value % 2 == 0:
            return False
        if math.isinf(value):
            return self.unlimited and value > 0
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)


@dataclass(frozen=True)
class Choice:
    """One of a few names."""

    names: tuple[str | None, ...]

    def __str__(self) -> str:
        """Say in words what is allowed."""
        return f"one of: {', '.join(name or 'none' for name in self.names)}"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return what is wrong with a value, if anything."""
        return [] if value in self.names else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class Flag:
    """True or false."""

    optional: bool = False

    def __str__(self) -> str:
        """Say in words what is allowed."""
        return "true or false" + (", or none" if self.optional else "")

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return what is wrong with a value, if anything."""
        good = isinstance(value, bool) or (value is None and self.optional)
        return [] if good else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class Text:
    """A text, or none for the default place."""

    meaning: str

    def __str__(self) -> str:
        """Say in words what is allowed."""
        return f"{self.meaning}, or none"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return what is wrong with a value, if anything."""
        good = value is None or (isinstance(value, str) and value != "")
        return [] if good else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class Anything:
    """Whatever can be written: what a user's own code takes, it checks itself."""

    def __str__(self) -> str:
        """Say in words what is allowed."""
        return "a number, a word or a text"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return nothing."""
        return []


Allowed = Range | Choice | Flag | Text | Anything
"""What an argument may be: it checks a value, and says in words what it allows."""

BOUND = Range(0, low_open=True, unlimited=True)
"""A norm to clip to."""
STRENGTH = Range(0)
"""A standard deviation, a scale, a weight of the loss."""
SHARE = Range(0, 1, high_open=True)
"""A share to remove: something is always kept."""
KEPT = Range(1e-15, 1)
"""A share to keep: something is always kept, since one minus it is still below one in double precision."""
COUNT = Range(1, integer=True)
"""A number of channels or features."""


def collect(owner: str, checks: Iterable[tuple[str, Allowed, object]]) -> list[Problem]:
    """Check (name, what is allowed, value) triples and return every problem, located at `owner.name`."""
    return [problem for name, allowed, value in checks for problem in allowed.problems(f"{owner}.{name}", value)]


def unused(owner: str, settings: object, names: Iterable[str], why: str) -> list[Problem]:
    """Return a problem for each named setting that differs from its class's default, though it changes nothing."""
    given = (name for name in names if getattr(settings, name) != getattr(type(settings), name))
    return [Problem(f"{owner}.{name}", f"changes nothing: {why}", "leave it out") for name in given]
