"""SARIF and JUnit XML of a run: their structure, what they escape, and that they agree with the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from gradveil.audit.gate import Gate
from gradveil.audit.run_directory import Run
from gradveil.audit.verdict import LEVELS
from gradveil.report.junit import as_junit
from gradveil.report.outcomes import outcome_of
from gradveil.report.sarif import as_sarif
from tests.audit.test_gate import RUNS, failed, held
from tests.report.trials import BARE, row

LIMIT = 0.1


def suite_of(run: Run, gate: Gate | None) -> Xml.Element:
    (suite,) = Xml.fromstring(as_junit([outcome_of(run, gate)]))
    return suite


def sarif_of(run: Run, gate: Gate | None, place: Path | None = None) -> dict[str, Any]:
    whole = json.loads(as_sarif([outcome_of(run, gate)], place))
    assert (whole["version"], whole["$schema"].rpartition("/")[2]) == ("2.1.0", "sarif-2.1.0.json")
    (found,) = whole["runs"]
    return found


def tags(suite: Xml.Element) -> dict[str, str]:
    """The outcome of each test case, by its name."""
    cases = {case.get("name", ""): [child.tag for child in case] for case in suite.iter("testcase")}
    return {name: "passed" if found == ["system-out"] else " ".join(found) for name, found in cases.items()}


@pytest.mark.parametrize("name", RUNS)
def test_both_files_agree_with_the_exit_code(name: str) -> None:
    make, exit_code, _ = RUNS[name]
    run, gate = make()
    suite, sarif = suite_of(run, gate), sarif_of(run, gate)
    found = list(tags(suite).values())
    assert {3: "failure", 1: "error", 0: "passed"}[exit_code] in found
    assert ("failure" in found) == (exit_code == 3)
    assert ("error" in found) <= (exit_code != 0)
    counts = {key: int(suite.get(key, "")) for key in ("tests", "failures", "errors", "skipped")}
    kinds = ("failure", "error", "skipped")
    assert counts == dict(zip(counts, (len(found), *map(found.count, kinds)), strict=True))
    (invocation,) = sarif["invocations"]
    levels = [result["level"] for result in sarif["results"]]
    assert invocation["exitCode"] == exit_code
    assert invocation["executionSuccessful"] == ("error" not in found)
    assert ("error" in levels) == (exit_code == 3)
    assert bool(levels or invocation["toolExecutionNotifications"]) == (exit_code != 0)


def test_every_result_is_of_a_rule_and_stands_at_a_file() -> None:
    run, gate = held(LIMIT, BARE, row(40, 64), row(0, 8, defence="prune(0.9)"), row(0, 64, defence="dp"))
    found = sarif_of(run, gate, Path("a study.toml"))
    rules = found["tool"]["driver"]["rules"]
    assert [rule["id"].replace("-", " ") for rule in rules] == list(LEVELS)
    assert {rule["defaultConfiguration"]["level"] for rule in rules} == {"error", "warning", "note", "none"}
    broken, few = found["results"]
    assert (broken["ruleId"], broken["level"], broken["properties"]["defence"]) == ("broken", "error", "dgp")
    assert (few["level"], few["properties"]["status"]) == ("warning", "error")
    assert "40 of 64 images recovered (62.5%" in broken["message"]["text"]
    assert "limit is 10%" in broken["message"]["text"]
    for result in found["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "a%20study.toml"
    assert [name.rpartition(": ")[2] for name in found["properties"]["passed"]] == ["dp"]
    assert [name.rpartition(": ")[2] for name in found["properties"]["skipped"]] == ["none"]


def test_a_fingerprint_is_of_the_setting_and_not_of_its_numbers() -> None:
    def prints(won: int) -> list[str]:
        rows = row(won, 64), row(won, 64, update="one gradient of 2 images"), row(won, 64, client="local(steps=2)")
        results = sarif_of(*held(LIMIT, BARE, *rows))["results"]
        return [result["partialFingerprints"]["gradveilSetting/v1"] for result in results]

    assert len(set(prints(40))) == 3
    assert sorted(prints(40)) == sorted(prints(64))


def test_the_undefended_client_is_skipped_next_to_defended_ones_only() -> None:
    assert tags(suite_of(*held(LIMIT, BARE, row(0, 64)))) == {"none": "skipped", "dgp": "passed"}
    assert tags(suite_of(*held(LIMIT, BARE))) == {"none": "failure"}
    run, _ = held(LIMIT, BARE)
    assert [result["level"] for result in sarif_of(run, None)["results"]] == ["error"]


def test_without_a_limit_only_failed_trials_are_errors() -> None:
    run, _ = held(LIMIT, BARE, row(40, 64), row(0, 64, defence="dp"), failed(defence="prune(0.9)"))
    assert tags(suite_of(run, None)) == {
        "none": "skipped", "dgp": "skipped", "dp": "passed", "prune(0.9)": "error"
    }  # fmt: skip
    found = sarif_of(run, None)
    assert found["invocations"][0]["exitCode"] == 1
    assert {result["ruleId"]: result["level"] for result in found["results"]} == {
        "broken": "error", "not-tested": "warning"
    }  # fmt: skip
    done, _ = held(LIMIT, BARE, row(40, 64))
    assert outcome_of(done).exit_code == 0


def test_trials_that_are_not_done_are_an_error_of_the_run() -> None:
    run, gate = held(LIMIT, BARE, row(0, 64), planned=4)
    assert tags(suite_of(run, gate)) == {"none": "skipped", "dgp": "passed", "every trial is done": "error"}
    (notification,) = sarif_of(run, gate)["invocations"][0]["toolExecutionNotifications"]
    assert "2 of 4 trials are not done" in notification["message"]["text"]


def test_texts_are_escaped() -> None:
    text = 'torch said: "<\x1b[31m&\x00>"'
    broken = failed()
    run, gate = held(LIMIT, BARE, type(broken)(0, type(broken.trial)({**broken.info, "failed": text}, [])))
    error = suite_of(run, gate).find(".//error")
    assert error is not None
    assert 'torch said: "<\ufffd[31m&\ufffd>"' in error.get("message", "")
    assert text in sarif_of(run, gate)["results"][0]["message"]["text"]
