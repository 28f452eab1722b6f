"""Outcomes of runs as JUnit XML: a suite per run, a test case per defence in a setting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from gradveil.core.release import __version__
from gradveil.report.outcomes import Outcome, RunOutcome

_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no form for, such as those that colour a terminal."""


def as_junit(runs: Sequence[RunOutcome]) -> str:
    """Write JUnit XML: failures are settings above the limit, errors those that do not show it."""
    suites = [_suite(run) for run in runs]
    root = Xml.Element("testsuites", {"name": "gradveil", **_sums(suites)})
    root.extend(suites)
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="unicode")}\n'


def _suite(run: RunOutcome) -> Xml.Element:
    cases = [*(_case(each) for each in run.settings), *([_of_run(run)] if run.problems else [])]
    counts = {
        "tests": len(cases),
        "failures": run.count("failed"),
        "errors": run.count("error") + bool(run.problems),
        "skipped": run.count("skipped"),
    }
    time = f"{sum(each.seconds for each in run.settings):.3f}"
    suite = Xml.Element("testsuite", {"name": _text(run.name), **{k: str(v) for k, v in counts.items()}, "time": time})
    properties = Xml.SubElement(suite, "properties")
    for name, value in (("version", __version__), ("command", run.command), ("exit_code", str(run.exit_code))):
        Xml.SubElement(properties, "property", {"name": name, "value": _text(value)})
    suite.extend(cases)
    return suite


def _case(each: Outcome) -> Xml.Element:
    names = {"classname": _text(each.setting), "name": _text(each.defence), "time": f"{each.seconds:.3f}"}
    case = Xml.Element("testcase", names)
    if each.status == "passed":
        Xml.SubElement(case, "system-out").text = _text("\n".join(each.messages))
        return case
    _add(case, _TAGS[each.status], each.level, each.messages)
    return case


def _of_run(run: RunOutcome) -> Xml.Element:
    case = Xml.Element("testcase", {"classname": _text(run.name), "name": "every trial is done", "time": "0.000"})
    _add(case, "error", "run", run.problems)
    return case


def _add(case: Xml.Element, tag: str, kind: str, messages: Sequence[str]) -> None:
    element = Xml.SubElement(case, tag, {"message": _text(messages[0])})
    if tag != "skipped":
        element.set("type", kind)
        element.text = _text("\n".join(messages))


def _sums(suites: Sequence[Xml.Element]) -> dict[str, str]:
    names = ("tests", "failures", "errors", "skipped")
    return {name: str(sum(int(suite.get(name, "0")) for suite in suites)) for name in names}


def _text(text: str) -> str:
    """Replace what XML cannot hold.

    >>> _text(f"a{chr(27)}[31mb") == f"a{chr(0xFFFD)}[31mb"
    True
    """
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
