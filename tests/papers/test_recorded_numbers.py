"""The recorded numbers follow from the images, and are judged within the stated tolerances and known deviations."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError
from gradveil.papers import Record, compare, find_study, recorded_tables, studies
from gradveil.papers.claims import claims_of
from gradveil.papers.comparison import AGREES, DIFFERS, DRAWN, NOT_RUN
from gradveil.papers.records import INDEX, RECORDS, read, write

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / RECORDS / key for key in studies() if (ROOT / RECORDS / key / INDEX).is_file()]
KEYS = list(studies())
TARGETS = 128


def with_rate(run: str, defence: str, attack: str, rate: float) -> Record:
    hits = round(TARGETS * rate / 100)
    facts = ("paper", "complete", 1, 1.0, 0.0, "0", "2026-01-01", "2 cores", "2.13", "0.1", "gradveil paper run")
    return Record(run, defence, attack, *facts, tuple({"recovered": int(i < hits)} for i in range(TARGETS)))


def rates(key: str, shift: float) -> list[str]:
    """Compare every printed rate with a measured one that is shifted by some points, towards the middle."""
    study, statuses = find_study(key), []
    for cell in study.cells:
        wanted = study.measurement(cell)
        if wanted and wanted.metric == "recovered" and cell.number is not None:
            towards = shift if cell.number < 50 else -shift
            record = with_rate(wanted.run, wanted.defence, wanted.attack, cell.number + towards)
            compared = compare(study, cell.table, {record.place: record}).cells
            statuses += [one.status for one in compared if one.cell == cell]
    return statuses


def test_every_printed_rate_agrees_with_itself_and_not_with_one_ten_points_off():
    key = "combining-stochastic-defenses"
    assert set(rates(key, 0)) == {AGREES}
    assert set(rates(key, 10)) == {DIFFERS}


@pytest.mark.parametrize("key", KEYS)
def test_tolerances_are_those_that_are_stated(key: str):
    content = find_study(key).content
    orders = {"dual-gradient-pruning", "aligned-dual-gradient-pruning"}
    assert content.compare == ("orders" if key in orders else "numbers")
    assert {metric.tolerance for metric in content.metrics.values() if metric.ours == "recovered"} <= {5}
    assert {metric.tolerance for metric in content.metrics.values() if metric.ours == "ssim"} <= {0.05}


def changed(file: Path, name: str, points: float) -> None:
    """Change a score of every tenth image, so that its rate or mean differs by ten points."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows[::10]:
        row[name] = str(points - float(row[name] or 0))
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_recorded_rate_that_changes_by_ten_points_is_refused(tmp_path: Path):
    *_, run, _ = write([with_rate("mnist-cnn", "none", "ig", 97)], tmp_path / "synthetic")
    assert read(run.parent)
    changed(run, "recovered", 1)
    with pytest.raises(GradveilError, match="recovered=0"):
        read(run.parent)
    for folder in FOLDERS:
        for file in folder.glob("*.csv"):
            names = file.read_text("utf-8").partition("\n")[0].split(",")
            name = next((each for each in ("recovered", "accuracy") if each in names), None)
            if file.name != INDEX and name:
                copy = Path(shutil.copytree(folder, tmp_path / folder.name / file.stem))
                changed(copy / file.name, name, 1)
                with pytest.raises(GradveilError):
                    read(copy)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_record_can_be_measured_again_and_belongs_to_a_table(folder: Path):
    study = find_study(folder.name)
    wanted = {(one.run, one.defence) for cell in cells_of(study.key) if (one := study.measurement(cell))}
    with (folder / INDEX).open(encoding="utf-8", newline="") as lines:
        stale = [line["run"] for line in csv.DictReader(lines) if not line.get("count") or not line.get("result")]
    assert not stale, f"write their results into the index: gradveil paper record {study.key}"
    for record in read(folder):
        assert (record.run, record.defence) in wanted, record.place
        assert record.command.startswith(f"gradveil paper run {study.key} "), record.place
        assert all((record.seed, record.date, record.machine, record.torch, record.code)), record.place


def cells_of(key: str):
    study = find_study(key)
    return [cell for name in study.tables for cell in study.cells_of(name)]


def test_every_number_has_a_status_and_every_difference_a_reason():
    for key in KEYS:
        study = find_study(key)
        for deviation in study.content.deviations:
            assert any(deviation.covers(cell) for cell in cells_of(key)), (key, deviation)
    for table in recorded_tables():
        for one in table.cells:
            place = (table.study.key, one.cell)
            assert one.status in (AGREES, DIFFERS, DRAWN, NOT_RUN), place
            assert one.reason or one.status in (AGREES, DRAWN), place
            if one.status == DIFFERS:
                known = ("(tested: ", "(supposed)", "unexplained; tried: ")
                assert any(part in one.reason for part in known), (place, one.reason)
                assert "nothing yet" not in one.reason, f"no deviation in tables.toml: {place}"


@pytest.mark.parametrize("key", KEYS)
def test_every_claim_rests_on_numbers_that_can_be_measured(key: str):
    study = find_study(key)
    for claim in claims_of(key):
        for pattern in claim.cells:
            assert any(pattern.covers(cell) and study.measurement(cell) for cell in study.cells), pattern
        rows = {(cell.table, cell.metric, cell.row) for cell in cells_of(key)}
        for order in claim.orders:
            assert {(order.table, order.metric, row) for row in (order.more, order.less)} <= rows, order
