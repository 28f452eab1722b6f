"""Other images under the name that they had: a run that is there is not gone on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil.audit import audit_run as audit_work
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import read, read_training
from gradveil.cli.app import run
from gradveil.federated import training_run as train_work
from gradveil.federated.training_setup import open_setting
from gradveil.runs.task import arrive

STUDY = """
name = "study"
target_clients = 1
iterations = 1
attacks = ["dlg"]
defences = ["none"]
data = { name = "folder:scans", size = 16, gallery = 4 }
model = { name = "lenet-zhu" }
client = { batch = 1 }
"""
TRAIN = """
name = "little"
clients = 2
rounds = 1
data = { name = "folder:scans", size = 16 }
model = { name = "lenet-zhu" }
local = { batch = 4, lr = 0.01, epochs = 1, optimiser = "adam" }
validation = 0.0
"""


def draw(place: Path, seed: int) -> None:
    """Write an image of noise."""
    place.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (16, 16), dtype=np.uint8)
    Image.fromarray(noise).save(place)


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of noise in two classes, where the commands run."""
    for number in range(24):
        split = "test" if number < 6 else "train"
        draw(tmp_path / "scans" / split / "ab"[number % 2] / f"{number:02}.png", number)
    (tmp_path / "little.toml").write_text(TRAIN)
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "scans"


def test_an_audit_is_of_the_images_that_it_began_with(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "study.toml", "--workers", "1", "--out", "runs/study"]
    assert run(words) == 0, capsys.readouterr().err
    words += ["--defence", "none", "--defence", "prune(0.5)"]
    assert run(words) == 0
    draw(scans / "test/b/05.png", 99)  # the sixth, beyond those that are looked at
    words += ["--seed", "0", "--seed", "1"]
    assert run(words) == 0
    draw(scans / "test/b/03.png", 100)
    capsys.readouterr()
    assert run(words) == 2
    errors = capsys.readouterr().err
    assert "the images or labels that data.name stands for: differs from the run that is there" in errors
    assert "--fresh" in errors
    assert run([*words, "--fresh"]) == 0


def test_an_audit_of_a_training_is_of_the_images_that_were_trained_on(
    scans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", "study.toml", "--workers", "1", "--out", "runs/study", "--train", "--set", "train.rounds=1"]
    words += ["--set", "train.clients=2", "--set", "train.images=18", "--set", "train.local={lr=0.01,batch=4,epochs=1}"]
    assert run(words) == 0, capsys.readouterr().err
    words += ["--seed", "0", "--seed", "1"]
    assert run(words) == 0
    draw(scans / "train/b/23.png", 99)
    capsys.readouterr()
    before = (scans.parent / "runs/study/run.json").read_text()
    assert run([*words, "--seed", "2"]) == 2
    assert "study, the images or labels that data.name stands for: differs" in capsys.readouterr().err
    assert (scans.parent / "runs/study/run.json").read_text() == before


@pytest.mark.parametrize("place", ["train/b/23.png", "test/a/00.png"])
def test_a_training_is_on_the_images_that_it_began_with(
    scans: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "little.toml", "--threads", "1", "--workers", "1", "--out", "runs/little"]
    assert run(words) == 0, capsys.readouterr().err
    assert run([*words, "--rounds", "2"]) == 0
    draw(scans / place, 99)
    capsys.readouterr()
    assert run([*words, "--rounds", "3"]) == 2
    assert "the images or labels that data.name stands for: differs from the run" in capsys.readouterr().err
    assert run([*words, "--rounds", "3", "--fresh"]) == 0


@pytest.mark.parametrize("command", ["audit", "train"])
def test_a_worker_elsewhere_has_to_have_the_same_images(scans: Path, command: str) -> None:
    if command == "audit":
        work_site = audit_work.site(open_experiment(read("study.toml")), None)
    else:
        work_site = train_work.site(open_setting(read_training("little.toml")), None)
    assert not isinstance(arrive(work_site, 1), str)
    draw(scans / "test/a/00.png", 99)
    assert "data.name: has other images or labels" in str(arrive(work_site, 1))


def test_a_small_table_is_audited_with_as_many_target_clients_as_it_has_rows_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{20 + number},{number % 3 * 1.5},{'yes' if number % 2 else 'no'}" for number in range(24)]
    (tmp_path / "small.csv").write_text("\n".join(["age,income,label", *rows]))
    monkeypatch.chdir(tmp_path)
    words = ["audit", "small.csv", "--model", "tabular-mlp", "--attack", "analytic", "--workers", "1"]
    assert run(words) == 0
    told = capsys.readouterr()
    assert "6 target clients instead of 32: 'small.csv' has no more rows" in told.err
    assert "6/6" in told.out
    assert run([*words, "--fail-above", "0.5", "--accept", "few-images"]) == 3
    assert "Resuming the run" in capsys.readouterr().err
    assert run([*words, "--target-clients", "32"]) == 2
    assert "--target-clients 6" in capsys.readouterr().err
