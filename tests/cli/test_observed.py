"""`gradveil audit --observed`: from a training's record to an answer, and errors without tracebacks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gradveil.cli.app import run
from gradveil.runs.pool import Processes
from gradveil.runs.task import arrive, in_process

TRAINING = """
name = "little"
clients = 3
rounds = 1
batch = 1
data = { name = "digits", size = 16, public = 60, gallery = 20 }
model = { name = "lenet-zhu" }
"""
AUDIT = """
name = "mine"
attacks = ["ig(labels=restore, iterations=4)"]
data = { name = "digits", size = 16 }
model = { name = "lenet-zhu" }
"""
SAID = ["--set", "model.name=lenet-zhu", "--set", "data.classes=10", "--set", "data.channels=1"]
UNNAMED = ["audit", "--observed", "seen", *SAID, "--set", "data.size=16", "--iterations", "4"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients of a training, recorded without the truth, and one with it."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "mine.toml").write_text(AUDIT)
    file = folder / "little.toml"
    file.write_text(TRAINING)
    words = ["train", str(file), "--threads", "1", "--fresh", "--out", str(folder / "training")]
    assert run([*words, "--record", str(folder / "seen"), "--record-client", "1", "--record-client", "2"]) == 0
    assert run([*words, "--record", str(folder / "told"), "--record-client", "1", "--record-truth"]) == 0
    return folder


@pytest.fixture
def seen(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the records, where the commands run."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_record_alone_is_enough(
    seen: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process for each target client opens the run and reads the record by itself: so is it here, but for the process.
    opened = []

    def by_the_site(processes, job, tasks):
        opened.append(arrive(processes.site, 1))
        return in_process(replace(job, work=opened[0]), tasks)

    monkeypatch.setattr(Processes, "__call__", by_the_site)
    assert run([*UNNAMED, "--workers", "2"]) == 0
    assert len(opened) == 1
    out = capsys.readouterr().out
    assert "No score: the private examples were not recorded" in out
    assert "data.mean and data.std were not said" in out
    assert (seen / "runs/observed/report.html").is_file()
    whole = json.loads((seen / "runs/observed/run.json").read_text())
    assert whole["config"]["client"][0]["batch"] == 1
    assert whole["config"]["target_clients"] == 2
    assert "--set 'observed.folder=\"seen\"'" in whole["command"]
    assert run([*UNNAMED, "--json", "--workers", "1"]) == 0
    trials_shown = json.loads(capsys.readouterr().out)["trials"]
    assert trials_shown[0]["asr"] is None
    assert trials_shown[0]["unscored"].startswith("no score")


def test_a_run_file_and_the_truth_give_scores(seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = ["--fail-above", "0.99"]
    assert run(["audit", "mine.toml", "--observed", "told", "--workers", "1", *gate]) == 1
    assert "none (gradient) is inconclusive." in capsys.readouterr().err
    gate += [f"--accept={what}" for what in ("few-images", "inconclusive", "not-tested")]
    assert run(["audit", "mine.toml", "--observed", "told", "--json", "--workers", "1", *gate]) == 0
    trials_shown = json.loads(capsys.readouterr().out)["trials"]
    assert trials_shown[0]["unscored"] is None
    assert trials_shown[0]["images"] == 1
    assert trials_shown[0]["ssim_mean"] is not None


def test_wrong_use_is_reported_without_a_traceback(seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "RUN: is missing": ["audit"],
        "nowhere: is no record of updates": ["audit", "mine.toml", "--observed", "nowhere"],
        "model.name: is missing": ["audit", "--observed", "seen"],
        "--fail-above: has nothing to compare": [*UNNAMED, "--fail-above", "0.5"],
        "'unseen' are no data": ["audit", "mine.toml", "--set", "data.name=unseen"],
        "has none of the requested updates": [*UNNAMED, "--set", "observed.rounds=[7]"],
    }
    for message, words in wrong.items():
        assert run(words) == 2
        assert message in capsys.readouterr().err


def test_contradiction_with_every_defence_is_reported_once(seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "mine.toml", "--observed", "seen", "--set", "model.name=cnn6"]
    assert run([*words, "--defence", "none", "--defence", "gaussian(0.1)", "--defence", "prune(0.5)"]) == 2
    trials_shown = [line for line in capsys.readouterr().err.splitlines() if "recorded model" in line]
    assert len(trials_shown) > 1
    assert len(trials_shown) == len(set(trials_shown))


def test_adaptive_infers_labels_and_skips_attacks_that_need_images(
    seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels were not recorded, and there are no public images to learn from."""
    words = [
        *UNNAMED,
        "--workers",
        "1",
        "--iterations",
        "2",
        "--attack",
        "adaptive",
        "--json",
        "--set",
        "target_clients=1",
    ]
    assert run([*words, "--defence", "none", "--defence", "gaussian(1e-3)"]) == 0
    trials_shown = {(row["defence"], row["attack"]): row for row in json.loads(capsys.readouterr().out)["trials"]}
    assert trials_shown["gaussian(1e-3)", "learned"]["statuses"] == {"does not apply": 1}
    assert trials_shown["gaussian(1e-3)", "portfolio"]["failed"] is None
    assert trials_shown["none", "portfolio"]["failed"] is None
    (trial,) = (seen / "runs/observed/trials").glob("*--none--portfolio--*/trial.json")
    assert json.loads(trial.read_text())["knowledge"]["targets"] == "infer"
    assert run([*words, "--defence", "none", "--attack", "ig", "--fresh"]) == 2
    assert "labels=restore" in capsys.readouterr().err
