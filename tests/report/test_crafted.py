"""Whatever a run directory holds, reading it ends in a result or in an error of ours, and imports nothing."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from gradveil.cli.app import run as command
from gradveil.core.errors import GradveilError
from gradveil.federated.training_setup import open_setting
from gradveil.report import write_report
from tests.audit.runs import config, execute
from tests.federated.test_run import config as training_config
from tests.federated.test_run import trained
from tests.report.hostile_json import crafted
from tests.report.runs import write_run


def read(folder: Path, out: Path) -> int:
    """Sum a folder up in every way; return how many of the ways refused it."""
    ways = [["summary", str(folder)], ["summary", str(folder), "--csv", str(out / "a.csv"), "--latex", str(out / "a")]]
    refused = sum(command(way) == 2 for way in ways)
    try:
        write_report(folder, out / "a.html")
    except GradveilError:
        refused += 1
    return refused


def test_no_crafted_audit_raises_anything_but_the_programs_own_errors(tmp_path, trials, capsys):
    folder = write_run(tmp_path / "run", trials[:2])
    refused = [read(folder, tmp_path) for _ in crafted(folder, 18, seed=7)]
    assert {0, 3} <= set(refused)


def test_no_crafted_training_raises_anything_but_the_programs_own_errors(tmp_path, runs, capsys):
    folder = tmp_path / "training"
    shutil.copytree(runs[0], folder)
    refused = [read(folder, tmp_path) for _ in crafted(folder, 15, seed=3)]
    assert {0, 3} <= set(refused)


@pytest.mark.parametrize("kind", ["audit", "training"])
def test_no_crafted_folder_is_resumed_with_anything_but_the_programs_own_errors(kind, tmp_path):
    folder = tmp_path / kind
    setting = open_setting(training_config(rounds=1))
    outcomes: list[str] = []
    resume = (lambda: execute(config(), folder)) if kind == "audit" else (lambda: trained(folder, setting))
    resume()
    for _ in crafted(folder, 5, seed=1):
        try:
            resume()
            outcomes.append("done")
        except GradveilError:
            outcomes.append("refused")
    assert set(outcomes) == {"done", "refused"}


@pytest.mark.parametrize("kind", ["audit", "training"])
def test_names_in_a_run_directory_are_not_imported_by_reading(kind, tmp_path, run, runs, monkeypatch):
    (tmp_path / "crafted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / kind
    shutil.copytree(run if kind == "audit" else runs[0], folder)
    for file in (folder / "run.json", folder / "train.json", *folder.rglob("trial.json")):
        if file.is_file():
            info = json.loads(file.read_text())
            for held in (info, info.get("config", {})):
                held |= {key: "crafted_module:make(1)" for key in ("defence", "attack") if key in held}
                held |= {key: ["crafted_module:make(1)", "none"] for key in ("defences", "attacks") if key in held}
            if "model" in info.get("config", {}):
                info["config"]["model"]["name"] = "crafted_module:make"
            file.write_text(json.dumps(info))
    assert read(folder, tmp_path) == 0
    assert "crafted_module" not in sys.modules
