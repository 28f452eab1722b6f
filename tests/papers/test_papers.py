"""Every paper's runs can be read, and every expected figure belongs to a cell of one of them."""

import csv
from pathlib import Path

import pytest

from gradveil.attacks.presets import make_attack
from gradveil.audit.reader import read, read_training
from gradveil.defences import parse

PAPERS = Path(__file__).parents[2] / "papers"
METRICS = {"asr", "ssim_mean", "psnr_mean", "mse_mean", "label_accuracy"}


def figures():
    for table in sorted(PAPERS.glob("*/expected.csv")):
        with table.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                yield pytest.param(table.parent, row, id=f"{table.parent.name}-{row['run']}-{row['metric']}")


@pytest.mark.parametrize("run", sorted(PAPERS.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_run_files_are_sound_and_explained(run):
    config = read_training(str(run)) if run.stem.startswith("train-") else read(str(run))
    assert config.defences
    assert f"`{run.name}`" in (run.parent / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("folder", "row"), list(figures()))
def test_expected_figures_belong_to_a_cell(folder, row):
    config = read(str(folder / f"{row['run']}.toml"))
    assert parse(row["defence"]).name in {parse(text).name for text in config.defences}
    assert make_attack(row["attack"]).name in {make_attack(text).name for text in config.attacks}
    assert row["metric"] in METRICS
    assert 0 <= float(row["tolerance"]) <= 1
