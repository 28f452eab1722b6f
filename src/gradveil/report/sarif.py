"""Outcomes of runs as SARIF 2.1.0: a rule per verdict, a result per defence that is a problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradveil.audit.verdict import LEVELS, Level
from gradveil.core.release import __version__
from gradveil.report.outcomes import Outcome, RunOutcome

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SEVERITY: Mapping[Level, str] = {
    "broken": "error",
    "leaks": "warning",
    "inconclusive": "note",
    "not tested": "note",
    "not broken": "none",
}
"""The level of a verdict where no limit is set."""
_RULES = list(LEVELS)


def as_sarif(runs: Sequence[RunOutcome], place: Path | None = None) -> str:
    """Write SARIF 2.1.0.

    Code scanning shows every result as an alert, also those of kind `pass`: defences that passed are named in the
    run's properties only. Every result needs a file to stand at: `place`, or the report of its run.
    """
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(each, place) for each in runs]}, indent=1)


def _run(run: RunOutcome, place: Path | None) -> dict[str, Any]:
    folder = run.path or Path(run.name)
    at = place or folder / "report.html"
    problems = [each for each in run.settings if _severity(each) != "none"]
    invocation: dict[str, Any] = {
        "executionSuccessful": not run.problems and not run.count("error"),
        "exitCode": run.exit_code,
        "toolExecutionNotifications": [{"level": "error", "message": {"text": text}} for text in run.problems],
    }
    return {
        "tool": {"driver": {"name": "Gradveil", "version": __version__, "rules": [_rule(level) for level in _RULES]}},
        "automationDetails": {"id": f"gradveil/{quote(folder.name)}/"},
        "invocations": [invocation | ({"commandLine": run.command} if run.command else {})],
        "results": [_result(each, at) for each in problems],
        "properties": {
            "passed": [_named(each) for each in run.settings if each.status == "passed"],
            "skipped": [_named(each) for each in run.settings if each.status == "skipped"],
        },
    }


def _rule(level: Level) -> dict[str, Any]:
    label, meaning = LEVELS[level]
    return {
        "id": _identifier(level),
        "name": "".join(word.capitalize() for word in level.split()),
        "shortDescription": {"text": label},
        "fullDescription": {"text": f"{meaning[0].upper()}{meaning[1:]}."},
        "help": {"text": f"{label}: {meaning}. `gradveil summary RUN --explain` defines all words."},
        "defaultConfiguration": {"level": _SEVERITY[level]},
    }


def _result(each: Outcome, place: Path) -> dict[str, Any]:
    name = _named(each)
    return {
        "ruleId": _identifier(each.level),
        "ruleIndex": _RULES.index(each.level),
        "kind": "fail",
        "level": _severity(each),
        "message": {"text": f"{each.defence}: {' '.join(each.messages)}"},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _uri(place)}, "region": {"startLine": 1}},
                "logicalLocations": [{"name": each.defence, "fullyQualifiedName": name}],
            }
        ],
        "partialFingerprints": {"gradveilSetting/v1": hashlib.sha256(name.encode()).hexdigest()[:32]},
        "properties": {**each.facts, "status": each.status},
    }


def _severity(each: Outcome) -> str:
    """Choose the level: the gate's, if there is one, otherwise the verdict's."""
    if each.status == "failed":
        return "error"
    if each.status == "error":
        return "warning"
    return "none" if each.status == "passed" or each.beside else _SEVERITY[each.level]


def _named(each: Outcome) -> str:
    return f"{each.setting}: {each.defence}"


def _identifier(level: Level) -> str:
    return level.replace(" ", "-")


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
