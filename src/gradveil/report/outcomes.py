"""Outcome of each defence of a run, for tools that read test results: passed, failed, error or skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradveil.audit.findings import Findings, Gap, findings
from gradveil.audit.gate import NOT_SHOWN, SHOWN, CountedSetting, Gate, called, failure
from gradveil.audit.run_directory import Run
from gradveil.audit.verdict import LEVELS, Level, Verdict
from gradveil.core.formatting import interval, percent

Status = Literal["passed", "failed", "error", "skipped"]
_UNCOUNTED = "The undefended client does not count next to defended ones."


@dataclass(frozen=True)
class Outcome:
    """Outcome of one defence in one setting."""

    setting: str
    defence: str
    level: Level
    status: Status
    """failed: above the limit; error: a trial failed, or the limit is not shown; skipped: nothing depends on it."""
    messages: tuple[str, ...]
    beside: bool
    """Whether it is an undefended client next to defended ones: it shows that the attacks work, and is no finding."""
    seconds: float
    """Working time of its attacks."""
    facts: Mapping[str, Any]
    """Its object in `gradveil summary --json`."""


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run: its exit code, and what that follows from."""

    name: str
    command: str
    settings: tuple[Outcome, ...]
    problems: tuple[str, ...]
    """Errors of the whole run, such as trials that are not done."""
    exit_code: int
    """0: nothing failed; 3: a setting is `failed`; 1: no setting is, but there is an error."""
    path: Path | None

    def count(self, status: Status) -> int:
        """Count the settings with a status."""
        return sum(each.status == status for each in self.settings)


def outcome_of(run: Run, gate: Gate | None = None) -> RunOutcome:
    """Decide for each defence of a run whether it passes the gate.

    Without a gate there is no limit to exceed: only trials that failed are errors, and what is not "not broken" is
    skipped.
    """
    found = findings(run.trials)
    settings = tuple(
        _outcome(each, facts, found, gate) for each, facts in zip(found.entries, found.settings, strict=True)
    )
    there = {(each.setting, each.defence) for each in found.entries}
    problems = tuple(_of_run(found, gate, there))
    broken = NOT_SHOWN if found.broken else SHOWN
    name, command = str(run.info.get("name", "audit")), str(run.info.get("command", ""))
    return RunOutcome(name, command, settings, problems, gate.exit_code if gate else broken, run.path)


def _outcome(each: Verdict | Gap, facts: Mapping[str, Any], found: Findings, gate: Gate | None) -> Outcome:
    beside = each.undefended and not all(other.undefended for other in found.entries)
    status, messages = _against(gate, each) if gate else _without_limit(each, found, beside)
    rows = [row for row in found.rows if (row.setting, row.defence) == (each.setting, each.defence)]
    seconds = sum(float(row.info.get("seconds") or 0) for row in rows)
    clients = {other.setting.client for other in found.entries if other.setting.title() == each.setting.title()}
    setting = each.setting.title() if len(clients) == 1 else f"{each.setting.title()} ({each.setting.client})"
    return Outcome(setting, each.defence, each.level, status, messages, beside, seconds, facts)


def _against(gate: Gate, each: Verdict | Gap) -> tuple[Status, tuple[str, ...]]:
    """Compare a setting with the limit."""
    above = tuple(
        _above(one, gate.limit)
        for one in gate.above
        if (one.row.setting, one.row.defence) == (each.setting, each.defence)
    )
    obstacles = tuple(one.text for one in gate.open if (one.setting, one.defence) == (each.setting, each.defence))
    if above or obstacles:
        return "failed" if above else "error", above + obstacles
    if any((one.row.setting, one.row.defence) == (each.setting, each.defence) for one in gate.counted):
        return "passed", (_level(each),)
    return "skipped", (f"{_level(each)} {_UNCOUNTED}",)


def _above(one: CountedSetting, limit: float) -> str:
    rate = f"{percent(one.rate)}, 95% CI {interval(*one.ends)}"
    return f"{called(one.row)}: {one.count} ({rate}); the limit is {percent(limit)}."


def _without_limit(each: Verdict | Gap, found: Findings, beside: bool) -> tuple[Status, tuple[str, ...]]:
    failed = [failure(row) for row in found.broken if (row.setting, row.defence) == (each.setting, each.defence)]
    if failed:
        return "error", tuple(dict.fromkeys(failed))
    if beside:
        return "skipped", (f"{_level(each)} {_UNCOUNTED}",)
    if each.level == "not broken":
        return "passed", (_level(each),)
    return "skipped", (f"{_level(each)} There is no limit: --fail-above RATE sets one.",)


def _level(each: Verdict | Gap) -> str:
    return f"{LEVELS[each.level][0]}. {' '.join(each.reasons)}"


def _of_run(found: Findings, gate: Gate | None, there: set[tuple[Any, str]]) -> Iterator[str]:
    """Give the errors that belong to no setting."""
    if gate is None:
        yield from dict.fromkeys(failure(row) for row in found.broken if (row.setting, row.defence) not in there)
        return
    yield from dict.fromkeys(one.text for one in gate.open if (one.setting, one.defence) not in there)
    if not gate.counted and not gate.open:
        yield "No setting counts: the run has no trial with a score."
