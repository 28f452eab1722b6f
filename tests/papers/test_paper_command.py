"""The face of the papers: choices of rows, times, time limits, bundled images in place of missing data, and forms."""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradveil.audit import preflight
from gradveil.audit.experiment import Experiment
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.papers import FORMATS, PaperStudy, compare, find_study, row_runs, run_row, table_run
from gradveil.papers.cost_estimate import estimate
from gradveil.papers.records import write
from gradveil.papers.study import Cell, _Tables
from tests.papers.test_paper_tables import TABLES, measured

CELLS = tuple(
    Cell("T1", row, "IG", "digits", metric, "75", None, "%" if metric == "ASR" else "", "")
    for row in ("none", "GP")
    for metric in ("ASR", "SSIM")
)


def a_paper(data: str = "digits") -> PaperStudy:
    text = TABLES.replace('data = { name = "digits", size = 16 }', f'data = {{ name = "{data}", size = 16 }}', 1)
    return PaperStudy("a-paper", _Tables.model_validate(tomllib.loads(text)), CELLS)


def test_several_values_follow_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--rows", "none", "CVBs", "--columns", "IGs"]
    assert run(["paper", "run", "combining-stochastic-defenses", "T1", *names]) == 2
    shown = capsys.readouterr().err
    assert "--rows 'CVBs'" in shown
    assert "--columns 'IGs'" in shown
    assert "'none'" not in shown


def test_every_table_of_the_list_has_a_command_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["paper", "list", "dual-gradient-pruning"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for overview in find_study("dual-gradient-pruning").list():
        assert bool(overview.command) != bool(overview.entry.reason)
        listed = [number for number, line in enumerate(lines) if line.startswith(f"  {overview.entry.name}: ")]
        assert bool(listed) != overview.entry.in_text
    assert all(len(line) <= 80 for line in lines[2:-2])


def test_numbers_without_a_record_say_how_long_they_take(tmp_path: Path) -> None:
    shown = a_paper().compare("T1", tmp_path)
    (reason,) = {cell.reason for cell in shown.cells if cell.reason.startswith("no record")}
    assert re.search(r"about [\d.]+ (s|min|h) on \d+ core", reason)


def test_estimate_takes_recorded_seconds_before_the_cost_model() -> None:
    rows = row_runs(a_paper(), "T1", "quick")
    known = {row.place: replace(measured(row.defence, row.attack), run=row.run, seconds=100.0) for row in rows}
    recorded, modelled = estimate(rows, known, 1), estimate(rows, {}, 1)
    assert (recorded.recorded, modelled.recorded) == (2, 0)
    assert 200 <= recorded.seconds < 210
    assert (recorded.text[0], modelled.text[0]) == ("3", "~")
    half = dict([next(iter(known.items()))])
    (one,) = half
    of_one = estimate([row for row in rows if row.place == one], {}, 1).seconds
    assert abs(estimate(rows, half, 1).seconds / (101 * modelled.seconds / of_one) - 1) < 0.01, (
        "corrected by the record"
    )
    more = row_runs(a_paper(), "T1", "quick", changes=["target_clients=200"])
    assert estimate(more, {}, 1).seconds > modelled.seconds


def test_missing_data_are_replaced_at_quick_scale_and_never_recorded(
    tmp_path: Path,
) -> None:
    paper, told = a_paper("mnist"), list[str]()
    done = paper.run("T1", runs=tmp_path, record=True, records=tmp_path / "records", seconds=0, tell=told.append)
    assert [record.defence for record in done] == ["none"], "the first row runs, then the time is over"
    assert told[0].startswith("NO DATA: mnist")
    assert "1 of 2 rows are left" in told[-1]
    assert not (tmp_path / "records").exists()
    assert paper.local(tmp_path) == []
    assert len(paper.run("T1", runs=tmp_path)) == 2


def test_a_row_of_an_older_table_is_recomputed_at_quick_scale(tmp_path: Path) -> None:
    paper, changes = a_paper(), ["iterations=2", "target_clients=1"]
    (old,) = row_runs(paper, "T1", "quick", ["GP"], ["IG"], changes=["iterations=1", "target_clients=1"])
    (row,) = row_runs(paper, "T1", "quick", ["GP"], ["IG"], changes=changes)
    run_row(old, tmp_path, workers=1)
    (tmp_path / old.folder).rename(tmp_path / row.folder)
    with pytest.raises(GradveilError, match="differs from the run that is there"):
        run_row(row, tmp_path, workers=1)
    (record,) = paper.run("T1", rows=["GP"], columns=["IG"], changes=changes, runs=tmp_path, workers=1)
    assert record.iterations == 2


@pytest.mark.parametrize(("column", "opener"), [("IG", "open_experiment"), ("Final Model Acc.", "open_setting")])
def test_rows_beside_each_other_do_not_fight_for_the_cores(
    column: str, opener: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def stop(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise fail("row", "stopped here", "go on")

    monkeypatch.setattr(table_run, opener, stop)
    (row,) = row_runs(find_study("dual-gradient-pruning"), "Table 1", "quick", ["Baseline"], [column])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(GradveilError, match="stopped here"):
            run_row(row, tmp_path, workers=1)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_an_attack_that_knows_the_defence_fills_its_column() -> None:
    paper = a_paper()
    rows = row_runs(paper, "T1", "quick", attack="adaptive")
    assert {row.attack for row in rows} == {"adaptive"}
    assert rows[0].command.endswith("--attack adaptive")
    found = {record.place: record for record in (measured(hits=5), measured(attack="adaptive", hits=8))}
    assert compare(paper, "T1", found).cells[0].adaptive == 80


def test_a_refused_row_does_not_stop_the_others_and_is_named_after_them(tmp_path: Path) -> None:
    told = list[str]()
    small = ["target_clients=1", "iterations=2", "client.batch=2"]  # r-gap wants one image
    text = tomllib.loads(TABLES.replace('"IG" = "ig"', '"IG" = "r-gap"').replace('"GPIA" = "gpia"', '"GPIA" = "ig"'))
    paper = PaperStudy("a-paper", _Tables.model_validate(text), (*CELLS, *(replace(c, column="GPIA") for c in CELLS)))
    with pytest.raises(GradveilError) as refusal:
        paper.run("T1", changes=small, runs=tmp_path, seconds=1000, tell=told.append)
    assert all("against r-gap" in problem.where for problem in refusal.value.problems)
    assert len(list(tmp_path.rglob("run.json"))) == 2
    assert sum(line.startswith("REFUSED") for line in told) == 2


def test_the_model_of_a_run_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[str]()

    def count(experiment: Experiment) -> list[Problem]:
        checked.append(experiment.config.name)
        return []

    monkeypatch.setattr(preflight, "model_problems", count)
    small = ["target_clients=1", "iterations=2"]
    records = a_paper().run("T1", changes=small, runs=tmp_path, seconds=1000, progress=False)
    assert len(records) > 1
    assert len(checked) == len({record.run for record in records}) == 1


def test_measurements_of_adaptive_attacks_are_filed_as_such(tmp_path: Path) -> None:
    small = ["target_clients=1", "iterations=2"]
    done = a_paper().run("T1", rows=["none"], changes=small, attack="adaptive", runs=tmp_path)
    assert {record.attack.partition(":")[0] for record in done} == {"adaptive"}
    two = a_paper().run("T1", rows=["none"], changes=[*small, "seeds=[0,1]"], runs=tmp_path / "two")
    assert [(record.seed, record.count) for record in two] == [("0 1", 2)]
    assert a_paper().local(tmp_path) == [], "other settings than the table's are not its measurements"


@pytest.mark.parametrize("form", list(FORMATS))
def test_every_form_shows_both_numbers_and_the_share_that_agrees(form: str) -> None:
    table = compare(a_paper(), "T1", {measured().place: measured()})
    text = FORMATS[form](table)
    assert "75" in text
    assert "90" in text
    if form == "json":
        assert json.loads(text)["cells"][0]["command"] == "gradveil paper run"
    elif form != "csv":
        assert "compared agree" in text
        assert "pending" in text


def test_runs_of_ones_own_are_announced_where_records_hide_them_and_shown_alone(tmp_path: Path) -> None:
    paper, kept = a_paper(), tmp_path / "records"
    paper.run("T1", rows=["none"], runs=tmp_path)
    write([replace(paper.local(tmp_path)[0], scale="standard")], kept / paper.key)
    shown = paper.compare("T1", tmp_path, kept)
    assert shown.scales == {"standard": 2}
    assert shown.hidden == {"quick": 2}
    assert "--own" in paper.show("T1", runs=tmp_path, records=kept)
    mine = paper.compare("T1", tmp_path, kept, own=True)
    assert mine.scales == {"quick": 2}
    assert not mine.notice
    write(paper.local(tmp_path), tmp_path / "same" / paper.key)
    assert not paper.compare("T1", tmp_path, tmp_path / "same").hidden, "a recorded run is no other one"


def test_some_rows_of_a_table_are_shown_and_unknown_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["paper", "show", "combining-stochastic-defenses", "T1", "--format", "csv", "--runs", str(tmp_path)]
    assert run([*command, "--rows", "none", "CVBs"]) == 2
    assert "--rows 'CVBs'" in capsys.readouterr().err
    assert run([*command, "--rows", "none", "--columns", "IG", "--settings", "MNIST; CNN"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(line["row"], line["column"], line["setting"]) for line in lines} == {("none", "IG", "MNIST; CNN")}


def test_latex_says_how_many_images_and_which_scale_and_has_no_symbol_that_pdflatex_lacks() -> None:
    few = replace(measured(scale="quick"), scores=measured().scores[:2])
    other = measured("prune(0.9)", scale="standard")
    text = FORMATS["latex"](compare(a_paper(), "T1", {few.place: few}))
    assert "n = 2 at quick scale." in text
    assert "not comparable" in text
    assert text.isascii()
    both = FORMATS["latex"](compare(a_paper(), "T1", {few.place: few, other.place: other}))
    assert "unless noted" in both
    assert f", n = {other.count} at standard scale" in both


def test_a_figure_is_drawn_from_what_was_measured() -> None:
    paper = a_paper()
    figure = paper.tables["T1"].model_copy(update={"name": "Figure 1"})
    table = replace(compare(paper, "T1", {measured().place: measured()}), entry=figure)
    page = FORMATS["html"](table)
    assert page.count("<svg") == 2
    assert "<svg" not in FORMATS["html"](replace(table, entry=paper.tables["T1"]))
    with pytest.raises(GradveilError, match="format"):
        paper.show("T1", format="pdf")


def test_recording_says_when_there_is_nothing_to_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["paper", "record", "optimal-defenses", "--runs", str(tmp_path)]) == 0
    assert "repeat it with --record" in capsys.readouterr().err
