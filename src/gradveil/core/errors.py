"""Errors that say what is wrong, where, why, and what to do: all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INTERRUPTED = 130
"""Exit code of the command line for Ctrl-C."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    `where` is a module path, a key of a run file, a file or an argument; `what` says what is wrong and why it matters;
    `remedy` says what to do about it.
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
    """Every error that a user can cause. Carries one or more problems; `str(error)` shows them all.

    >>> print(GradveilError(Problem("attack", "unknown name 'idg'", "choose one of: idlg, ig")))
    attack: unknown name 'idg' -> choose one of: idlg, ig
    """

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        """Take one problem or many."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


FOREIGN = (Exception,)
"""What the code of others (a model, its factory, a loss, an attack) may raise: anything that does not end the process.

The only broad `except` there is, for the few places that call such code and then say where it failed.
"""


UNFIT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""What torch raises of a model that it cannot run or differentiate, and of examples that do not fit a model."""


def fail(where: str, what: str, remedy: str) -> GradveilError:
    """Build the error for a single problem, to be raised by the caller."""
    return GradveilError(Problem(where, what, remedy))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise once, with every problem of severity `"error"` in the list; return if there is none."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise GradveilError(errors)
