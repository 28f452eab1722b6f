"""Settings of named things: allowed values, defaults, canonical texts, and differences between two sets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gradveil.core.errors import Problem, refuse


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
class TextValue:
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


Allowed = Range | Choice | Flag | TextValue | Anything
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


class _Required:
    """The default of an argument that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
"""The default of an argument that has none: it has to be given."""


@dataclass(frozen=True)
class Argument:
    """One argument: its name, what it may be, and its default."""

    name: str
    allowed: Allowed
    default: Any = REQUIRED

    def __str__(self) -> str:
        """Describe the argument in words."""
        default = "required" if self.default is REQUIRED else f"default {literal(self.default)}"
        return f"{self.name} ({self.allowed}; {default})"

    def read(self, value: Any) -> Any:
        """Return an allowed value as it is meant: a whole number as one, however it was written.

        >>> from gradveil.core.settings import BOUND, COUNT
        >>> Argument("probes", COUNT).read(1e1), Argument("clip", BOUND).read(1e1)
        (10, 10.0)
        """
        whole = isinstance(self.allowed, Range) and self.allowed.integer
        return int(value) if whole and isinstance(value, float) else value

    def plain(self) -> dict[str, Any]:
        """Describe the argument for machines; what JSON cannot hold is written as the grammar reads it.

        >>> from gradveil.core.settings import BOUND
        >>> Argument("clip", BOUND, math.inf).plain()
        {'name': 'clip', 'allowed': 'a number above 0 or inf', 'required': False, 'default': 'inf'}
        """
        required = self.default is REQUIRED
        endless = isinstance(self.default, float) and not math.isfinite(self.default)
        default = None if required else literal(self.default) if endless else self.default
        described = {"name": self.name, "allowed": str(self.allowed), "required": required, "default": default}
        return described | ({"choices": list(self.allowed.names)} if isinstance(self.allowed, Choice) else {})


@dataclass(frozen=True)
class NamedEntry:
    """One named thing of a table. `filled` checks its arguments, `text` writes it canonically."""

    name: str
    factory: Callable[..., Any]
    description: str
    citation: str
    arguments: tuple[Argument, ...] = ()

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults; every unknown, missing or impossible argument is refused at once."""
        known = {argument.name: argument for argument in self.arguments}
        problems = [
            Problem(f"{self.name}.{name}", f"is not an argument of {self.name}", f"{self.name} takes {self.usage()}")
            for name in values
            if name not in known
        ]
        for name, argument in known.items():
            if name in values:
                problems += argument.allowed.problems(f"{self.name}.{name}", values[name])
            elif argument.default is REQUIRED:
                problems.append(Problem(f"{self.name}.{name}", "is missing", f"give {argument.allowed}"))
        refuse(problems)
        return {
            name: argument.read(values[name]) if name in values else argument.default
            for name, argument in known.items()
        }

    def text(self, values: Mapping[str, Any]) -> str:
        """Write it canonically: arguments in order by keyword, those at their default left out."""
        given = [
            f"{argument.name}={literal(values[argument.name])}"
            for argument in self.arguments
            if argument.name in values and values[argument.name] != argument.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def usage(self) -> str:
        """List the arguments in words."""
        return ", ".join(str(argument) for argument in self.arguments) or "no arguments"

    def signature(self) -> str:
        """Show how it is written, with the defaults and a gap for what has none: `prune(ratio=…, scope=layer)`."""
        given = [
            f"{argument.name}={'…' if argument.default is REQUIRED else literal(argument.default)}"
            for argument in self.arguments
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


def literal(value: Any) -> str:
    """Write a value as the grammar reads it.

    >>> literal(20.0), literal(1e-5), literal(True), literal(None), literal("sum"), literal("block.*")
    ('20', '1e-05', 'true', 'none', 'sum', '"block.*"')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isfinite(value) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str):
        bare = value.isidentifier() and value.isascii() and value.lower() not in ("none", "true", "false", "inf")
        quote = "'" if '"' in value else '"'
        return value if bare else f"{quote}{value}{quote}"
    return repr(value)


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Name the settings that are not the same, each with what it is there and now.

    >>> list(differences({"data": {"size": 32}}, {"data": {"size": 16}}))
    ['data.size (32 there, 16 now)']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        before, now = cast(dict[str, Any], old), cast(dict[str, Any], new)
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield f"{where} ({json.dumps(old)} there, {json.dumps(new)} now)"


def left_out(old: Mapping[str, Any], new: Mapping[str, Any], growing: Iterable[str]) -> Iterator[str]:
    """Name what lists that may only grow had and have no more; a switch may only be turned on.

    >>> list(left_out({"seeds": [0, 1], "central": True}, {"seeds": [2, 0], "central": False}, ["seeds", "central"]))
    ['seeds (without 1)', 'central (true there, false now)']
    """
    for name in growing:
        before, now = old.get(name), new[name]
        if not isinstance(before, list):
            yield from differences(before, now, name) if before is not False else ()
        elif gone := [str(value) for value in cast(list[Any], before) if value not in now]:
            yield f"{name} (without {', '.join(gone)})"


_FILES = {
    "weights": "what model.weights or the records hold",
    "images": "the images or labels that data.name stands for",
}


def _contents(there: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Iterator[str]:
    """Say that files hold something else under the name they had, where it is known what they held."""
    old, new = there.get(name), now.get(name)
    if None not in (old, new) and old != new:
        yield _FILES[name]


def refuse_others(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise if the run in a folder, as its file says, is another one than comes now, or has more in a `growing` list.

    Settings that are `free` may be anything.
    """
    growing: Sequence[str] = now["growing"]
    own = {*growing, *free}
    old, new = ({key: value for key, value in said["config"].items() if key not in own} for said in (there, now))
    same = there.get("config_hash") == now["config_hash"]
    found = [] if same else [*differences(old, new), *_contents(there, now, "weights")] or ["config_hash"]
    found += _contents(there, now, "images")
    found += left_out(there["config"], now["config"], growing)
    remedy = (
        f"give all it has, and more {', '.join(growing)} if you like, start again with --fresh (removes the old "
        "results), or choose another --out"
    )
    refuse([Problem(f"{folder}, {what}", "differs from the run that is there", remedy) for what in found])
