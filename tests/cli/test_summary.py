"""The health of every attack, for programs: in the summary of a run, and of an audit as it ends."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from gradveil.audit.health import STATES, summaries
from gradveil.audit.store import load_run
from gradveil.cli.app import run
from tests.audit.runs import config, execute

LABELS = {label for label, _ in STATES.values()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    execute(config(), tmp_path / "run")
    return tmp_path / "run"


def test_every_cell_tells_its_health_and_its_attacker(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["summary", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2
    assert {row["health"] for row in rows} <= LABELS
    assert [row["attacker"] for row in rows] == ["undefended", "naive"]
    assert run(["summary", str(folder), "--csv", "-"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["health"] for line in table] == [row["health"] for row in rows]


def test_health_is_judged_beside_the_other_cells(folder: Path) -> None:
    bare, noisy = load_run(folder).cells
    for image in (image for record in bare.records for image in record["per_image"]):
        image["success"], image["identified"] = 1, True
    for cell in (bare, noisy):
        cell.info["health"] = {"objective": 0.1, "objective_initial": 1.0, "objective_truth": 0.08, "diverged": 0.0}
    assert [row["health"] for row in summaries([bare, noisy])] == ["works", "sound"]
    assert [row["health"] for row in summaries([noisy])] == ["doubtful"]


def test_a_failed_cell_has_no_health(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (folder / "cells").glob("*/cell.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "failed": "broke"}))
        (file.parent / "records.json").write_text("[]")
    assert run(["summary", str(folder), "--json"]) == 1
    assert [row["health"] for row in json.loads(capsys.readouterr().out)] == [None, None]


def test_an_audit_that_ends_in_json_tells_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--victims", "1", "--attack", "ig(iterations=2)", "--defence", "none", "--workers", "1", "--no-images"]
    assert run(["audit", "faces", *words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["health"] in LABELS
