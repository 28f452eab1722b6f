"""Settings of named things: allowed values, defaults, canonical texts, and differences between two sets.

A setting is declared once, as an annotated function parameter or dataclass field: its type, its allowed values, one
line of help, and its default. Checks, error messages, the text form and `gradveil list` follow from the declaration:

    clip: Annotated[Bound, "Largest norm of an example's gradient."] = 20.0
    scope: Annotated[Literal["layer", "global"], "Where entries compete."] = "layer"
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

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
    """None is allowed: the model's default."""

    def __str__(self) -> str:
        """Describe the allowed values."""
        kind = "an odd number" if self.odd else "a whole number" if self.integer else "a number"
        end = (" or inf" if self.unlimited else "") + (", or none" if self.optional else "")
        if self.high < math.inf:
            left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
            return f"{kind} in {left}{self.low:g}, {self.high:g}{right}{end}"
        return f"{kind} {'above' if self.low_open else 'of at least'} {self.low:g}{end}"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return the problems of a value."""
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
        """Describe the allowed values."""
        return f"one of: {', '.join(name or 'none' for name in self.names)}"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return the problems of a value."""
        return [] if value in self.names else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class Flag:
    """True or false."""

    optional: bool = False

    def __str__(self) -> str:
        """Describe the allowed values."""
        return "true or false" + (", or none" if self.optional else "")

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return the problems of a value."""
        good = isinstance(value, bool) or (value is None and self.optional)
        return [] if good else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class TextValue:
    """A text, or none for the default."""

    meaning: str

    def __str__(self) -> str:
        """Describe the allowed values."""
        return f"{self.meaning}, or none"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return the problems of a value."""
        good = value is None or (isinstance(value, str) and value != "")
        return [] if good else [Problem(where, f"is {value!r}", f"give {self}")]


@dataclass(frozen=True)
class Anything:
    """Any value: custom code checks its own arguments."""

    def __str__(self) -> str:
        """Describe the allowed values."""
        return "a number, a word or a text"

    def problems(self, where: str, value: object) -> list[Problem]:
        """Return nothing."""
        return []


Allowed = Range | Choice | Flag | TextValue | Anything
"""The allowed values of an argument: checks a value, and describes in words what is allowed."""

Bound = Annotated[float, Range(0, low_open=True, unlimited=True)]
"""A norm to clip to."""
Strength = Annotated[float, Range(0)]
"""A standard deviation, a scale, a weight of the loss."""
Positive = Annotated[float, Range(0, low_open=True)]
"""A step size, or a constant that keeps a quotient finite."""
Share = Annotated[float, Range(0, 1, high_open=True)]
"""A share to remove; it cannot be 1."""
Kept = Annotated[float, Range(1e-15, 1)]
"""A share to keep; it cannot be 0, and one minus it is below 1 in double precision."""
Count = Annotated[int, Range(1, integer=True)]
"""A number of rounds, features or directions."""


def collect(owner: str, checks: Iterable[tuple[str, Allowed, object]]) -> list[Problem]:
    """Return every problem of (name, allowed, value) triples, located at `owner.name`."""
    return [problem for name, allowed, value in checks for problem in allowed.problems(f"{owner}.{name}", value)]


def unused(owner: str, settings: object, names: Iterable[str], why: str) -> list[Problem]:
    """Return a problem for each named setting that has no effect but differs from its class's default."""
    given = (name for name in names if getattr(settings, name) != getattr(type(settings), name))
    return [Problem(f"{owner}.{name}", f"changes nothing: {why}", "leave it out") for name in given]


class _Required:
    """Type of `REQUIRED`."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
"""Default of an argument that must be given."""


@dataclass(frozen=True)
class Argument:
    """One argument: its name, allowed values, default, and one line of help."""

    name: str
    allowed: Allowed
    default: Any = REQUIRED
    help: str = ""

    def __str__(self) -> str:
        """Describe the argument in words."""
        default = "required" if self.default is REQUIRED else f"default {literal(self.default)}"
        return f"{self.name} ({self.allowed}; {default})"

    def read(self, value: Any) -> Any:
        """Convert an allowed value: a whole number becomes an int, however it was written.

        >>> Argument("probes", Range(1, integer=True)).read(1e1), Argument("clip", Range(0)).read(1e1)
        (10, 10.0)
        """
        whole = isinstance(self.allowed, Range) and self.allowed.integer
        return int(value) if whole and isinstance(value, float) else value

    def plain(self) -> dict[str, Any]:
        """Describe the argument as JSON values; infinity is written as in the text form.

        >>> Argument("clip", Range(0, unlimited=True), math.inf).plain()
        {'name': 'clip', 'allowed': 'a number of at least 0 or inf', 'required': False, 'default': 'inf'}
        """
        required = self.default is REQUIRED
        endless = isinstance(self.default, float) and not math.isfinite(self.default)
        default = None if required else literal(self.default) if endless else self.default
        described = {"name": self.name, "allowed": str(self.allowed), "required": required, "default": default}
        described |= {"help": self.help} if self.help else {}
        return described | ({"choices": list(self.allowed.names)} if isinstance(self.allowed, Choice) else {})


def settings_of(thing: Callable[..., Any]) -> tuple[Argument, ...]:
    """Return the settings of a function or dataclass: its `Annotated` parameters or fields.

    The annotation holds the allowed values, unless the type implies them, and a line of help.

    >>> def noisy(std: Strength, on: Annotated[Literal["mean", "sum"], "What the noise is added to."] = "mean"): ...
    >>> [str(setting) for setting in settings_of(noisy)]
    ['std (a number of at least 0; required)', 'on (one of: mean, sum; default mean)']
    """
    return tuple(argument for argument, declared in parameters_of(thing) if declared)


def parameters_of(thing: Callable[..., Any]) -> Iterator[tuple[Argument, bool]]:
    """Yield each parameter that can be given by name, and whether it is declared as a setting.

    Undeclared parameters allow any value. Annotations that cannot be evaluated (names imported under `TYPE_CHECKING`)
    declare nothing.
    """
    try:
        hints = get_type_hints(thing, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = dict[str, Any]()
    for name, given in inspect.signature(thing).parameters.items():
        if given.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            default = REQUIRED if given.default is inspect.Parameter.empty else given.default
            declared = get_origin(hints.get(name)) is Annotated
            kind, *about = get_args(hints[name]) if declared else (None,)
            allowed = next((each for each in about if isinstance(each, Allowed)), None)
            help = next((each for each in about if isinstance(each, str)), "")
            yield Argument(name, allowed or _implied(kind), default, help), declared


def _implied(kind: Any) -> Allowed:
    """Return the allowed values that a type implies."""
    if get_origin(kind) is Literal:
        return Choice(get_args(kind))
    return Flag() if kind is bool else Anything()


def or_none(argument: Argument) -> Argument:
    """Return the argument with none as an allowed value and default: a setting made elsewhere then stays.

    >>> str(or_none(Argument("on", Choice(("mean", "sum")), "mean")))
    'on (one of: mean, sum, none; default none)'
    """
    allowed = argument.allowed
    if isinstance(allowed, Choice):
        allowed = Choice((*allowed.names, None))
    elif isinstance(allowed, Range | Flag):
        allowed = replace(allowed, optional=True)
    return replace(argument, allowed=allowed, default=None)


_settings_of = lru_cache(maxsize=None)(settings_of)


class Checked:
    """Base of frozen dataclasses with settings. Raises one error with every value out of range."""

    label: ClassVar[str] = ""
    """Name in messages; by default its `name`."""

    def __post_init__(self) -> None:
        """Check ranges and conflicts of the settings."""
        owner = self.label or str(getattr(self, "name", type(self).__name__))
        problems = collect(owner, ((s.name, s.allowed, getattr(self, s.name)) for s in _settings_of(type(self))))
        refuse([*problems, *self.conflicts(sound=not problems)])

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Yield contradictions among settings; `sound` if each setting is in range."""
        yield from ()


@dataclass(frozen=True)
class NamedEntry:
    """One entry of a table. `filled` checks its arguments, `text` writes it canonically."""

    name: str
    factory: Callable[..., Any]
    """A function or class. Its annotated parameters are the arguments, unless `arguments` is given."""
    description: str
    citation: str
    arguments: tuple[Argument, ...] = ()

    def __post_init__(self) -> None:
        """Read the arguments from the factory's signature."""
        if not self.arguments:
            object.__setattr__(self, "arguments", settings_of(self.factory))

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with defaults added; raise with every unknown, missing or impossible argument."""
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
        """Return the canonical text: keyword arguments in order, without those at their default."""
        given = [
            f"{argument.name}={literal(values[argument.name])}"
            for argument in self.arguments
            if argument.name in values and values[argument.name] != argument.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def usage(self) -> str:
        """Describe all arguments."""
        return ", ".join(str(argument) for argument in self.arguments) or "no arguments"

    def signature(self) -> str:
        """Return the text form with defaults, and `…` for required arguments: `prune(ratio=…, scope=layer)`."""
        given = [
            f"{argument.name}={'…' if argument.default is REQUIRED else literal(argument.default)}"
            for argument in self.arguments
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


def literal(value: Any) -> str:
    """Write a value in the grammar of the text form.

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
    """Yield the settings that differ, each with its old and new value.

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
    """Yield items that are missing from lists that may only grow, and switches that were turned off.

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
    """Yield a description if a file's recorded hash differs from the current one."""
    old, new = there.get(name), now.get(name)
    if None not in (old, new) and old != new:
        yield _FILES[name]


def refuse_others(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise if the run recorded in a folder differs from the current one, or has more in a `growing` list.

    `free` settings may differ.
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
