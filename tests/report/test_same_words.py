"""The verdict, in the same words, on every surface: terminal, exports, Python and the page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradveil.audit.api import Result
from gradveil.audit.attackers.stopped_searches import stopped
from gradveil.audit.findings import MORE, Findings, findings, print_outcome, sentence_of, trained_on
from gradveil.audit.gate import gate
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial, load_run
from gradveil.audit.verdict import LEVELS, Level
from gradveil.cli.app import run as command
from gradveil.cli.audit_output import show_gate
from gradveil.report import draw_figure, write_report
from tests.report.parsed_page import read
from tests.report.trials import BARE, HEALTHY, row

NAIVE: dict[str, Any] = {"simulated_client": "naive"}
ROWS = (
    BARE,
    row(20, defence="prune(0.9)"),
    row(3, defence="gaussian(0.1)"),
    row(0, defence="dp"),
    row(0, defence="dgp", **NAIVE),
    row(0, defence="clip(1.0)", health=HEALTHY | {"objective": 0.95}),
)
SENTENCE = (
    "1 of 5 defences is broken (prune(0.9)); 1 leaks (gaussian(0.1)); 1 is inconclusive (clip(1.0)); 1 is not "
    "tested (dgp); 1 is not broken (dp)."
)


def printed(findings: Findings, **options: bool) -> str:
    out = Console(file=io.StringIO(), width=160, color_system=None)
    print_outcome(out, findings, {}, **options)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def of(*rows: Row) -> Findings:
    return findings([each.trial for each in rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """These trials as a run directory."""
    return write(tmp_path / "run", ROWS)


def write(place: Path, rows: Sequence[Row]) -> Path:
    names = [f"trial-{number}" for number in range(len(rows))]
    info = {"format": 3, "share": 1, "name": "five", "config": {"images": False}, "trials": names}
    info |= {"command": "gradveil audit five"}
    for name, each in zip(names, rows, strict=True):
        (place / "trials" / name).mkdir(parents=True)
        facts = {**each.info, "trial": name, "threshold": 0.5, "attack_title": "an attack"}
        records = [
            {**record, "label_accuracy": 1.0, "per_image": [{"mse": 0.1, "psnr": 9.0, **image} for image in images]}
            for record in each.trial.records
            for images in [record["per_image"]]
        ]
        (place / "trials" / name / "trial.json").write_text(json.dumps(facts))
        (place / "trials" / name / "records.json").write_text(json.dumps(records))
    (place / "run.json").write_text(json.dumps(info))
    return place


def test_every_surface_shows_the_same_verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels: dict[str, Level] = {verdict.defence: verdict.level for verdict in of(*ROWS).verdicts}
    assert levels.pop("none") == "broken"
    assert sorted(levels.values()) == sorted(LEVELS)

    assert command(["summary", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(f"Verdict: {SENTENCE}")
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert all(LEVELS[level][0].upper() in lines[name] for name, level in levels.items())

    assert command(["summary", str(folder), "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)
    assert (printed_json["schema"], printed_json["verdict"]) == ("gradveil.summary/1", SENTENCE)
    assert {
        entry["defence"]: entry["verdict"] for entry in printed_json["settings"] if entry["defence"] != "none"
    } == levels
    assert {
        trial["defence"]: trial["verdict"] for trial in printed_json["trials"] if trial["defence"] != "none"
    } == levels

    assert command(["summary", str(folder), "--csv", "-"]) == 0
    table = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {line["defence"]: line["verdict"] for line in table if line["defence"] != "none"} == levels

    for form in ("--markdown", "--latex"):
        assert command(["summary", str(folder), form, "-"]) == 0
        sheet = [line for line in capsys.readouterr().out.splitlines() if "ig" not in line[:3]]
        for name, level in levels.items():
            assert any(name in line.replace("\\", "") and f" {level} " in line for line in sheet), (form, name)

    page = read(write_report(folder).read_text("utf-8")).text
    assert SENTENCE in page
    result = Result(load_run(folder).trials, folder, lambda _, out: out, draw_figure, {})
    assert result.verdict == SENTENCE
    assert {verdict.defence: verdict.level for verdict in result.verdicts} == {"none": "broken", **levels}
    assert str(result).startswith(f"Verdict: {SENTENCE[:60]}")


def test_the_headline_its_baseline_and_the_count_that_leaks_are_the_same_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 of 36 are recovered, which guessing reaches; 28 are identified, which is the leak; 12 are both."""
    chances = {"recovered": 0.75, "public": 100, "identified": 0.02, "gallery": 50, "identifiable": 0.0175}
    rows = [row(32, defence="none", simulated_client="naive", expected=chances), row(20, 36, expected=chances)]
    controls = rows[1].info["controls"]
    rows[1].trial.info["controls"] = controls | {"class_mean": controls["class_mean"] | {"asr": 0.8}}
    for place, record in enumerate(rows[1].trial.records):
        record["per_image"][0]["identified"] = not 12 <= place < 20
    folder, leaked = write(tmp_path / "run", rows), "28 of 36 identified"
    for options in ([], ["--markdown", "-"], ["--latex", "-"]):
        assert command(["summary", str(folder), *options]) == 0
        shown = " ".join(capsys.readouterr().out.replace("\\", "").split())
        assert "33.3%" in shown, options
        assert leaked in shown.replace("images ", ""), options
        assert "1.8%" in shown, options
        assert "75%" not in shown, options
        assert "80%" not in shown, options
    assert command(["summary", str(folder), "--json"]) == 0
    (entry,) = [each for each in json.loads(capsys.readouterr().out)["settings"] if each["defence"] == "dgp"]
    assert (entry["verdict"], entry["identifiable"]) == ("leaks", 12)
    assert entry["baselines"]["identifiable"] == entry["baseline"] == pytest.approx(0.0175)
    assert entry["baselines"]["recovered"] == pytest.approx(0.75, abs=0.01)
    assert (entry["leak"]["criterion"], entry["leak"]["observed"]) == ("identified", 28)
    show_gate(gate(load_run(folder), 0.1), folder / "report.html")
    shown = " ".join(capsys.readouterr().err.split())
    assert "28/36 77.8% identified" in shown
    assert " 2% identified" in shown, "the baseline of what the gate counts"
    assert leaked in read(write_report(folder).read_text("utf-8")).text


def test_settings_hold_the_numbers_of_the_table() -> None:
    (entry,) = [each for each in of(*ROWS).settings if each["defence"] == "gaussian(0.1)"]
    wanted = "defence verdict recovered identified identifiable images ci baseline risk attack attacker attack_check"
    assert set(wanted.split()) | {"reasons", "setting"} <= set(entry)
    assert (entry["recovered"], entry["identifiable"], entry["images"]) == (3, 3, 32)
    low, high = entry["ci"]
    assert low < 3 / 32 < high
    assert 0 < entry["risk"]["value"] < entry["risk"]["high"]
    assert "3/32" in printed(of(*ROWS))
    assert json.loads(json.dumps(entry)) == entry


def test_the_table_has_a_row_per_defence_and_all_trials_on_demand() -> None:
    findings = of(BARE, row(3), row(20, attack="cdia"))
    short, every = printed(findings), printed(findings, every=True)
    assert sum(line.startswith("dgp ") for line in short.splitlines()) == 1
    assert "cdia, adaptive" in short
    assert sum(line.startswith("dgp ") for line in every.splitlines()) == 3
    assert "Baseline:" not in short
    assert "Baseline: the share of identifiable images" in printed(findings, explain=True)
    assert short.splitlines()[-1] == MORE


def test_reasons_are_printed_where_the_table_does_not_show_them_and_once() -> None:
    stopped = HEALTHY | {"objective": 0.95}
    some = of(
        BARE, row(0, defence="dgp", health=stopped), row(0, defence="dp", health=stopped), row(30, defence="clip")
    )
    lines = printed(some).splitlines()
    (line,) = [line for line in lines if "its objective did not fall" in line]
    assert line.startswith("dgp and dp: inconclusive. ")
    assert not any(line.startswith(("none: ", "clip: ")) for line in lines)
    assert any(line.startswith("clip: broken. ") for line in printed(some, explain=True).splitlines())


def test_attacks_keep_what_tells_them_apart_at_every_width() -> None:
    start = "cdia(iterations=9, start=solved)"
    some = of(BARE, row(20, defence="dgp", attack=start), row(20, defence="dp", attack="cdia(iterations=9)"))
    for width in (80, 100, 140):
        out = Console(file=io.StringIO(), width=width, color_system=None)
        print_outcome(out, some, {})
        assert isinstance(out.file, io.StringIO)
        table = out.file.getvalue().split("\n\n")[1].splitlines()
        assert max(map(len, table)) <= width
        assert [line.split()[0] for line in table] == ["defence", "none", "dgp", "dp"]
        assert "cdia(start=solved), adaptive" in table[2]
        assert "cdia, adaptive" in table[3]
        assert ("bytes" in table[0]) == (width > 80)


def test_the_control_is_a_line_and_no_row_and_never_judged() -> None:
    control = row(8, 8, defence="none", simulated_client="naive", control=True)
    shown = printed(of(row(0), control))
    assert "Control: ig recovers 8 of 8 without a defence." in printed(of(row(0), control), explain=True)
    assert not any(line.startswith("none") for line in shown.splitlines())
    findings = of(row(0), control)
    assert [(verdict.defence, verdict.level) for verdict in findings.verdicts] == [("dgp", "not broken")]
    assert [trial["verdict"] for trial in findings.trials] == ["not broken", None]
    assert of(row(0)).verdicts[0].level == "inconclusive"
    failed = Row(0, Trial({**control.info, "failed": "broke"}, []))
    assert "Control: ig failed without a defence." in printed(of(row(0), failed), explain=True)


def test_defence_without_scores_is_in_the_table_with_its_reason() -> None:
    failed = Row(0, Trial({**row(0, defence="dp").info, "failed": "out of memory"}, []))
    findings = of(BARE, row(0), failed)
    assert "dp: not tested. Ig failed: out of memory." in printed(findings)
    assert findings.settings[-1]["verdict"] == "not tested"
    assert findings.settings[-1]["images"] is None
    unfit = Row(0, Trial({**failed.info, "unfit": True}, []))
    assert "No attack of this run applies to it: add --attack adaptive." in printed(of(BARE, unfit))


def test_scope_names_untested_settings() -> None:
    shown = printed(of(BARE, row(0, **NAIVE)), explain=True)
    assert any(line.startswith("Scope: reconstruction of images, no other data") for line in shown.splitlines())
    text = " ".join(printed(of(row(0, **NAIVE))).split())
    for missing in ("adaptive attacks", "a malicious server", "batches", "local training", "trained weights"):
        assert missing in text
    wide: dict[str, Any] = {"batch": 4, "client": "local T=4", "trained": 3, "round": 1, "rounds_used": [0, 1]}
    assert "Not tested" not in printed(of(row(0, **wide), row(0, **wide, planted="a block")))


def test_sentences_of_runs_without_a_defence_or_a_result() -> None:
    assert of(BARE).sentence == "No defence was tested. Without a defence: broken."
    assert of().sentence == "There is no verdict: no trial has finished."
    assert sentence_of([of(BARE, row(0)), of(BARE, row(0, trained=3), row(32, defence="none", trained=3))]) == (
        "2 of 2 defended settings are not broken (dgp)."
    )


def test_what_holds_within_a_budget_only_says_so_and_what_more_takes() -> None:
    fits_as_well = HEALTHY | {"objective_truth": 0.01}
    some = of(BARE, row(0, health=fits_as_well, budget_share=0.1, seconds=60.0), row(32, defence="dp"))
    assert some.sentence == "1 of 2 defences is broken (dp); 1 is not broken within the budget (dgp)."
    assert [each["budget_share"] for each in some.settings] == [None, None, 0.1]
    (line,) = [line for line in printed(some).splitlines() if line.startswith("Budget: ")]
    assert "ig at 10% of their own iterations" in line
    assert "about 9 min 0 s of computing" in line
    assert "So far ig recovers 0 of 32" in " ".join(printed(some).split())


def test_an_hour_is_offered_in_two_digits_where_the_rest_takes_long() -> None:
    def told(share: float) -> str:
        cut = row(0, attack="ig", budget_share=share, seconds=7.0, target_iterations=1000)
        return " ".join(stopped([cut], {}))

    assert "does about 510,000 iterations of ig instead of 31 " in told(0.01)
    assert "Budget: it stopped ig at 50%" in told(0.5)
    assert "An hour" not in told(0.5)


def test_transformed_images_count_on_every_surface() -> None:
    mixed = row(0, defence="ats")
    for record in mixed.trial.records[:30]:
        record["per_image"][0] |= {"success_transformed": 1, "identified_transformed": True}
    for record in mixed.trial.records[30:]:
        record["per_image"][0] |= {"success_transformed": 0, "identified_transformed": False}
    for record in mixed.trial.records:
        record["per_image"][0]["expected_transformed"] = {"recovered": 0.01, "identified": 0.01}
    findings = of(BARE, mixed)
    (line,) = trained_on(findings)
    assert line.startswith("ats: 30 of 32 images recovered as the client trained on them (ig)")
    assert line in printed(findings)
    entry = findings.settings[-1]
    assert (entry["verdict"], entry["recovered"], entry["recovered_as_trained_on"]) == ("broken", 0, 30)
    assert findings.trials[-1]["identified_as_trained_on"] == 30
    assert findings.settings[0]["recovered_as_trained_on"] is None
