"""Trainings that are not done: what is there is summed up, and how to go on is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradveil.cli.app import run as command
from gradveil.federated.training_run import load_training
from gradveil.report.training_paper_table import training_tables
from tests.report.trainings import DP, FEW, TOPK, changed

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")


def test_what_is_not_done_yet_is_told_with_the_command(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    half = shutil.copytree(runs[0], tmp_path / "half")
    first, *rest = sorted((half / "trials").glob("*.json"))
    first.unlink()
    assert command(["summary", str(half)]) == 0
    out, err = capsys.readouterr()
    assert "not finished" in out
    assert err.splitlines() == [
        "1 of 2 trials is finished: 1 not done yet. To go on:",
        f"  gradveil train digits --out {half}",
    ]
    for file in rest:
        file.unlink()
    assert command(["summary", str(half)]) == 1
    assert capsys.readouterr().out == ""


def test_what_goes_on_never_removes_what_is_there(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    half = shutil.copytree(runs[0], tmp_path / "half")
    sorted((half / "trials").glob("*.json"))[0].unlink()
    changed(half / "train.json", command="gradveil train digits --fresh --seed 0")
    assert command(["summary", str(half)]) == 0
    assert f"\n  gradveil train digits --seed 0 --out {half}\n" in capsys.readouterr().err
    few = [part for setting in FEW for part in ("--set", setting)]
    words = ["train", "digits", "--defence", "none", "--rounds", "1", *few, "--out", str(tmp_path / "new"), "--fresh"]
    monkeypatch.setattr("sys.argv", ["gradveil", *words])
    assert command(words) == 0
    assert "--fresh" not in load_training(tmp_path / "new").info["command"]


def test_the_training_of_an_audit_goes_on_with_the_audit(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    half = shutil.copytree(runs[0], tmp_path / "audit" / "training")
    sorted((half / "trials").glob("*.json"))[0].unlink()
    changed(half / "train.json", command="gradveil audit digits --train")
    command(["summary", str(half)])
    assert f"\n  gradveil audit digits --train --out {tmp_path / 'audit'}\n" in capsys.readouterr().err


def test_a_training_that_was_asked_for_more_rounds_is_not_finished_before_it_has_them(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Any
):
    longer = shutil.copytree(runs[0], tmp_path / "longer")
    config = json.loads((longer / "train.json").read_text())["config"]
    changed(longer / "train.json", config={**config, "rounds": 3})
    assert command(["summary", str(longer)]) == 1
    assert "None of 2 trials are finished: 2 not done yet" in capsys.readouterr().err


def test_rows_stand_as_in_the_run_whatever_is_not_done_yet(runs: tuple[Path, Path], tmp_path: Path):
    half = shutil.copytree(runs[1], tmp_path / "half")
    next((half / "trials").glob("dp*.json")).unlink()
    (table,) = training_tables([load_training(half)])
    assert [kind.name for kind in table.groups] == ["none", DP, TOPK], "as it was written"


def test_a_table_of_rounds_without_a_round_names_its_columns(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    half = shutil.copytree(runs[0], tmp_path / "half")
    for file in (half / "trials").glob("*.json"):
        file.unlink()
    assert command(["summary", str(half), "--curves", "-"]) == 1
    head = capsys.readouterr().out
    assert command(["summary", str(runs[0]), "--curves", "-"]) == 0
    assert head == capsys.readouterr().out.splitlines(keepends=True)[0]
