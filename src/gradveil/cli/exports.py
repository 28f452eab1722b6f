"""Files that commands write for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from gradveil.audit.gate import Accepted
from gradveil.core.errors import Problem, fail, refuse
from gradveil.report.junit import as_junit
from gradveil.report.outcomes import RunOutcome
from gradveil.report.sarif import as_sarif


@dataclass(frozen=True)
class Exports:
    """The files of `--sarif` and `--junit`."""

    sarif: Path | None = None
    junit: Path | None = None
    place: Path | None = None
    """The file that SARIF results stand at: the run file. None for the report of each run."""

    @property
    def asked(self) -> bool:
        """Whether there is any."""
        return self.sarif is not None or self.junit is not None

    def check(self) -> None:
        """Reject files that cannot be written, before anything is computed."""
        named = (("--sarif", self.sarif), ("--junit", self.junit))
        problems = [
            Problem(option, f"'{file.parent}' is not a folder", "create it, or choose another file")
            for option, file in named
            if file is not None and not file.parent.is_dir()
        ]
        refuse(problems)

    def write(self, outcomes: Sequence[RunOutcome]) -> None:
        """Write those that were asked for."""
        if self.sarif is not None:
            write(self.sarif, as_sarif(outcomes, self.place))
        if self.junit is not None:
            write(self.junit, as_junit(outcomes))


def check_accepted(fail_above: float | None, accepted: Sequence[Accepted]) -> None:
    """Reject --accept without a gate."""
    if accepted and fail_above is None:
        raise fail("--accept", "weakens a gate, and there is none", "add --fail-above RATE, or leave it out")


def write(file: Path, text: str) -> None:
    """Write a file, or `-` for standard output."""
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", "choose another file") from error
