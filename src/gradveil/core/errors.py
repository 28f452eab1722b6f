"""Errors that list every problem with its place, its cause and a fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

INTERRUPTED = 130
"""Exit code of the command line for Ctrl-C."""


@dataclass(frozen=True)
class Problem:
    """A single problem.

    `where` is a module path, a key of a run file, a file or an argument; `what` is the problem and why it matters;
    `remedy` is the fix.
    """

    where: str
    what: str
    remedy: str
    severity: str = "error"
    """`"error"` stops the work, `"warning"` is only shown."""

    def __str__(self) -> str:
        """Render as one line."""
        return f"{self.where}: {self.what} -> {self.remedy}"


class GradveilError(Exception):
    """Base of all errors that a user can cause. Holds one or more problems; `str(error)` shows each, equal ones once.

    >>> print(GradveilError(Problem("attack", "unknown name 'idg'", "choose one of: idlg, ig")))
    attack: unknown name 'idg' -> choose one of: idlg, ig
    """

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        """Take one problem or many."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in grouped(self.problems)))


_NAMED = 3
"""Places of equal problems that are named; so many are shown one by one."""


def grouped(problems: Iterable[Problem]) -> list[Problem]:
    """Put many problems of modules that differ in nothing but their place into one, which names the first places.

    Other places, such as settings, are all named: each may need its own fix.

    >>> [str(each) for each in grouped(Problem(f"module 'a{i}'", "changes in every pass", "fix it") for i in range(5))]
    ["module 'a0', module 'a1', module 'a2' and 2 more: changes in every pass -> fix it"]
    """
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.what, problem.remedy, problem.severity), []).append(problem)
    return [each for group in groups.values() for each in ([_as_one(group)] if _is_long(group) else group)]


def _is_long(group: Sequence[Problem]) -> bool:
    return len(group) > _NAMED and all(map(_module, group))


def _module(problem: Problem) -> str:
    """Return the module in the place of a problem, which may stand behind `model: `; empty if it is none."""
    place = problem.where.removeprefix("model: ")
    return place if place.startswith("module ") else ""


def _as_one(group: Sequence[Problem]) -> Problem:
    places = [group[0].where, *map(_module, group[1:])]
    return replace(group[0], where=f"{', '.join(places[:_NAMED])} and {len(places) - _NAMED} more")


FOREIGN = (Exception,)
"""Exceptions that custom code (a model, its factory, a loss, an attack) may raise.

The only broad `except`, for the few places that call custom code and report where it failed.
"""

UNFIT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Exceptions that torch raises for a model that it cannot run or differentiate, and for inputs that do not fit."""


def fail(where: str, what: str, remedy: str) -> GradveilError:
    """Return an error with a single problem, for the caller to raise."""
    return GradveilError(Problem(where, what, remedy))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one error with all problems of severity `"error"`, if there are any."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise GradveilError(errors)
