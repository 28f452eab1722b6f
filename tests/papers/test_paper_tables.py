"""The papers' tables: each printed number has a run or a reason, runs are resumed, and numbers are compared."""

from __future__ import annotations

import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError
from gradveil.papers import (
    ComparedCell,
    Record,
    Study,
    best,
    compare,
    find_study,
    row_runs,
    run_row,
    studies,
)
from gradveil.papers.records import read, write
from gradveil.papers.study import Cell, _Tables

TABLES = """
title = "A paper"
authors = "Nobody"
year = "2024"
[metrics]
SSIM = { ours = "ssim", tolerance = 0.05 }
ASR = { ours = "recovered", tolerance = 5 }
accuracy = { ours = "accuracy", tolerance = 1 }
[scales.quick]
audit = { target_clients = 2, iterations = 3 }
train = { rounds = 1 }
[scales.standard]
audit = { target_clients = 8, iterations = 300 }
[runs.digits.settings]
data = { name = "digits", size = 16 }
model = { name = "lenet-zhu" }
[runs.training]
kind = "train"
settings = { clients = 2, rounds = 5, data = { name = "digits", size = 16 }, model = { name = "lenet-zhu" } }
[[tables]]
name = "T1"
shows = "Two defences"
[[tables.parts]]
settings = { "digits" = "digits" }
rows = { "none" = "none", "GP" = "prune(0.9)" }
columns = { "IG" = "ig", "GPIA" = "gpia" }
[[tables.parts]]
settings = { "digits" = "training" }
rows = { "none" = "none" }
columns = { "IG" = "" }
[[tables]]
name = "setup"
shows = "Settings"
without_run = "They are settings."
[[deviations]]
table = "T1"
row = "GP"
reason = "another network"
"""


def cell(row: str, column: str, metric: str, printed: str, spread: float | None = None) -> Cell:
    return Cell("T1", row, column, "digits", metric, printed, spread, "" if metric == "SSIM" else "%", "")


STUDY = Study(
    "a-paper",
    _Tables.model_validate(tomllib.loads(TABLES)),
    (
        cell("none", "IG", "SSIM", "0.9", 0.1),
        cell("none", "IG", "ASR", "75"),
        cell("GP", "IG", "ASR", "10"),
        cell("GP", "GPIA", "ASR", "80"),
        cell("none", "IG", "accuracy", "91"),
        cell("none", "IG", "SSIM", "-"),
        Cell("setup", "lr", "", "digits", "lr", "1", None, "", ""),
    ),
)


def measured(defence: str = "none", attack: str = "ig", hits: int = 9, of: int = 10, **changed: object) -> Record:
    scores = tuple({"recovered": int(i < hits), "ssim": 0.85 + 0.01 * (i % 2)} for i in range(of))
    facts = ("complete", 3, 1.0, 0.0, "0", "2026-01-01", "2 cores", "2.13", "0.1+abc", "gradveil paper run")
    return replace(Record("digits", defence, attack, "quick", *facts, scores), **changed)  # type: ignore[arg-type]


def compared(*records: Record) -> tuple[ComparedCell, ...]:
    return compare(STUDY, "t1", best(records)).cells


@pytest.mark.parametrize("key", list(studies()))
def test_study_every_number_of_a_measured_table_has_a_run(key: str) -> None:
    study = find_study(key)
    assert {one.table for one in study.cells} <= set(study.tables)
    for table in study.tables.values():
        runs, cells = row_runs(study, table.name, "quick"), study.cells_of(table.name)
        assert bool(runs) == bool(table.parts), table.name
        for run in runs:
            run.config()
        reasons = {spelled(cell): study.unmeasured(cell) for cell in cells if not study.measurement(cell)}
        assert "nothing of ours measures this" not in reasons.values(), (table.name, reasons)
        named = {(cell.setting, cell.row, cell.column) for cell in cells}
        mapped = {one for part in table.parts for one in product(part.settings, part.rows, part.columns)}
        assert mapped <= named, (table.name, mapped - named)


def spelled(cell: Cell) -> tuple[str, str, str, str]:
    return cell.setting, cell.row, cell.column, cell.metric


def test_compare_rate_within_its_interval_agrees_and_mean_within_the_spread_agrees() -> None:
    ssim, rate, *_ = compared(measured())
    assert (ssim.status, rate.status) == ("agrees", "agrees")
    assert rate.ours == 90
    assert rate.low < 75 < rate.high


@pytest.mark.parametrize(
    ("record", "index", "status"),
    [
        (measured("prune(0.9)", hits=9), 2, "differs"),
        (measured("prune(0.9)", "gpia", hits=0), 3, "differs"),
        (measured(hits=0), 1, "differs"),
        (measured(hits=2, of=2), 1, "not run"),
        (measured(status="it diverged", scores=()), 1, "not run"),
    ],
)
def test_compare_status_follows_numbers_and_known_deviations(record: Record, index: int, status: str) -> None:
    result = compared(record)[index]
    assert result.status == status
    if status == "differs":
        assert ("supposed" if record.defence == "prune(0.9)" else "unexplained; tried") in result.reason


def test_compare_what_is_not_measured_says_why() -> None:
    assert [one.status for one in compared()] == ["not run"] * 6
    (setting,) = compare(STUDY, "setup", {}).cells
    assert setting.reason == "They are settings."


def test_best_prefers_complete_measurements_of_a_larger_scale() -> None:
    quick, paper, broken = measured(), measured(scale="paper"), measured(scale="paper", status="failed")
    assert best([paper, quick])[quick.place] is paper
    assert best([quick, broken])[quick.place] is quick


def test_records_are_read_as_written_and_replaced_one_place_at_a_time(tmp_path: Path) -> None:
    first, second = measured(), measured("prune(0.9)", "gpia", hits=3)
    write([first, second], tmp_path)
    write([measured(hits=1)], tmp_path)
    known = {record.place: record for record in read(tmp_path)}
    assert sum(known[first.place].values("recovered")) == 1
    assert known[second.place].values("ssim") == second.values("ssim")
    assert known[second.place] == second


def test_records_of_a_larger_scale_are_not_replaced_by_those_of_a_smaller_one(tmp_path: Path) -> None:
    assert write([measured(scale="paper")], tmp_path)
    assert not write([measured(scale="quick", hits=0)], tmp_path)
    assert sum(read(tmp_path)[0].values("recovered")) == 9


@pytest.mark.parametrize(("old", "new"), [("recovered=0.9000", "recovered=0.8000"), (",10,", ",9,")])
def test_records_whose_result_does_not_follow_from_the_images_are_refused(tmp_path: Path, old: str, new: str) -> None:
    *_, index = write([measured()], tmp_path)
    index.write_text(index.read_text("utf-8").replace(old, new), "utf-8")
    with pytest.raises(GradveilError, match="digits: none, ig"):
        read(tmp_path)


def test_records_of_processes_that_write_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    defences = [f"prune(0.{digit})" for digit in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda defence: write([measured(defence)], tmp_path), defences))
    assert [record.defence for record in read(tmp_path)] == defences
    assert all(len(record.scores) == 10 for record in read(tmp_path))


def test_run_row_measures_an_audit_and_a_training_and_resumes_them(tmp_path: Path) -> None:
    rows = row_runs(STUDY, "T1", "quick")
    assert [(row.run, row.defence, row.attack) for row in rows] == [
        ("digits", "none", "ig"),
        ("digits", "prune(0.9)", "ig"),
        ("digits", "prune(0.9)", "gpia"),
        ("training", "none", ""),
    ]
    first = [run_row(row, tmp_path, workers=1) for row in rows]
    assert [[record.status for record in records] for records in first] == [["complete"]] * 4
    assert len(first[1][0].scores) == 2
    assert 0 <= first[3][0].values("accuracy")[0] <= 1
    assert all(record.command == row.command for row, (record,) in zip(rows, first, strict=True))
    assert first[1][0].command == "gradveil paper run a-paper T1 --scale quick --settings digits --rows GP --columns IG"
    assert [run_row(row, tmp_path, workers=1) for row in rows] == first


def test_a_row_that_was_interrupted_between_two_trials_is_not_finished(tmp_path: Path) -> None:
    (row,) = row_runs(STUDY, "T1", "quick", ["GP"], ["IG"], changes=["seeds=[0, 1]"])
    whole = run_row(row, tmp_path, workers=1)
    assert row.finished(tmp_path) == whole
    shutil.rmtree(next((tmp_path / row.folder / "trials").glob("*s1*")))
    assert [record.status for record in row.measured(tmp_path)] == ["unfinished"]
    assert row.finished(tmp_path) == []
    (again,) = run_row(row, tmp_path, workers=1)
    assert (again.status, again.count) == ("complete", whole[0].count)


def test_only_leaves_trainings_or_attacks_out_and_other_settings_have_a_folder_of_their_own() -> None:
    both, attacks, trainings = (row_runs(STUDY, "T1", "quick", only=only) for only in (None, "attacks", "trainings"))
    assert [row.place for row in attacks] == [row.place for row in both if not row.trains]
    assert [row.place for row in trainings] == [row.place for row in both if row.trains]
    assert trainings[0].command.endswith("--only trainings")
    assert trainings[0].folder == both[-1].folder
    changed = row_runs(STUDY, "T1", "quick", changes=["seeds=[0, 1]"])
    assert not {row.folder for row in changed} & {row.folder for row in both}
    assert len({row.folder for row in changed}) == len(changed)


def test_row_runs_names_every_unknown_row_and_column() -> None:
    with pytest.raises(GradveilError) as error:
        row_runs(STUDY, "T1", "quick", ["CVB"], ["DLG"])
    assert [problem.where for problem in error.value.problems] == ["--rows 'CVB'", "--columns 'DLG'"]
    with pytest.raises(GradveilError, match="did you mean 'T1'"):
        STUDY.table("T11")
