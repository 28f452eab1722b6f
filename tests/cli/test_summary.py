"""The health of every attack, for programs: in the summary of a run, and of an audit as it ends."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from gradveil.audit.attack_check import STATES
from gradveil.audit.findings import findings
from gradveil.audit.run_directory import load_run
from gradveil.cli.app import run
from gradveil.cli.run_results import summaries_as_csv
from tests.audit.runs import config, execute
from tests.cli.small_run import audit

LABELS = {*STATES}
_NOTHING = """{
 "schema": "gradveil.summary/1",
 "verdict": "There is no verdict: no trial has finished.",
 "recommendation": null,
 "settings": [],
 "trials": []
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    execute(config(), tmp_path / "run")
    return tmp_path / "run"


def test_every_trial_tells_its_health_and_its_attacker(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["summary", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    assert len(rows) == 2
    assert {row["attack_check"] for row in rows} <= LABELS
    assert [row["attacker"] for row in rows] == ["undefended", "naive"]
    assert run(["summary", str(folder), "--csv", "-"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["attack_check"] for line in table] == [row["attack_check"] for row in rows]


def test_attack_check_considers_the_other_trials(folder: Path) -> None:
    bare, noisy = load_run(folder).trials
    for image in (image for record in bare.records for image in record["per_image"]):
        image["success"], image["identified"] = 1, True
    for trial in (bare, noisy):
        trial.info["health"] = {"objective": 0.1, "objective_initial": 1.0, "objective_truth": 0.08, "diverged": 0.0}
    assert [row["attack_check"] for row in findings([bare, noisy]).trials] == ["effective", "converged"]
    assert [row["attack_check"] for row in findings([noisy]).trials] == ["suspect"]


def test_a_failed_trial_has_no_health(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (folder / "trials").glob("*/trial.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "failed": "broke"}))
        (file.parent / "records.json").write_text("[]")
    assert run(["summary", str(folder), "--json"]) == 1
    assert [row["attack_check"] for row in json.loads(capsys.readouterr().out)["trials"]] == [None, None]


def test_an_audit_that_ends_in_json_tells_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--target-clients",
        "1",
        "--attack",
        "ig(iterations=2)",
        "--defence",
        "none",
        "--workers",
        "1",
        "--no-images",
    ]
    assert run(["audit", "faces", "--set", "cost=", *words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["trials"]
    assert row["attack_check"] in LABELS


def test_summary(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit()
    capsys.readouterr()
    assert run(["summary", "runs/small", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    wanted = (
        "model data seed round client defence attack target_clients asr asr_low asr_high ssim_mean psnr_mean mse_mean"
    )
    assert len(rows) == 2
    assert set(f"{wanted} label_accuracy seconds statuses".split()) <= set(rows[0])
    assert rows[0]["statuses"] == {"budget": 2}
    assert run(["summary", "runs/small"]) == 0
    assert "prune(0.9)" in capsys.readouterr().out
    assert run(["summary", "runs/small", "--csv", "table.csv"]) == 0
    table = list(csv.DictReader(io.StringIO((small / "table.csv").read_text())))
    assert [row["defence"] for row in table] == ["none", "prune(0.9)"]
    assert float(table[0]["ssim_mean"]) == rows[0]["ssim_mean"]
    assert table[0]["status_budget"] == "2"


def test_summary_of_an_unfinished_run_prints_the_command_to_continue(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit("--defence", "none", "--defence", "prune(0.9)")
    one, two = sorted((small / "runs/small/trials").iterdir())
    shutil.rmtree(one)
    capsys.readouterr()
    assert run(["summary", "runs/small"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Verdict: The only defence is ")
    again = "To go on:\n  gradveil audit small.toml --defence none --defence 'prune(0.9)'"
    assert err == f"1 of 2 trials is finished: 1 not done yet. {again}\n"
    shutil.rmtree(two)
    (small / "runs/small").rename(small / "else where")
    for words, printed in (([], ""), (["--json"], _NOTHING), (["--csv", "-"], "trial,model,data,seed,round")):
        assert run(["summary", "else where", *words]) == 1
        out, err = capsys.readouterr()
        assert err == f"None of 2 trials are finished: 2 not done yet. {again} --out 'else where'\n"
        assert out.startswith(printed)
        assert len(out.splitlines()) <= max(1, printed.count("\n"))


def test_summary_of_failed_trials(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit()
    for file in (small / "runs/small/trials").glob("*/trial.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "failed": "broke"}))
        (file.parent / "records.json").write_text("[]")
    capsys.readouterr()
    assert run(["summary", "runs/small"]) == 1
    out, err = capsys.readouterr()
    assert "NOT TESTED" in out
    assert out.count("failed: broke.") == 1
    assert err.startswith("None of 2 trials are finished: 2 failed. To go on:\n  gradveil audit small.toml")


def test_summary_of_an_audit_from_python_names_its_folder(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit()
    info = json.loads((small / "runs/small/run.json").read_text())
    info |= {"command": "gradveil.audit(...)", "trials": [*info["trials"], "another"]}
    (small / "runs/small/run.json").write_text(json.dumps(info))
    capsys.readouterr()
    assert run(["summary", "runs/small"]) == 0
    command_to_continue = "call gradveil.audit again with the same arguments and out='runs/small'"
    assert command_to_continue in capsys.readouterr().err


def test_csv_disarms_formulas() -> None:
    assert summaries_as_csv([{"defence": "=1+1", "asr": None, "statuses": {}}]) == "defence,asr\n'=1+1,\n"
