"""The numbers of the page on guarantees and bounds."""

import json
import re
from pathlib import Path

import pytest

from gradveil.cli.app import run
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.theory.accounting import Participation, epsilon

PAGE = (Path(__file__).parents[2] / "docs" / "explanation/guarantees.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| (\d+)% \|$", PAGE, re.MULTILINE)


def test_bounds_of_the_table(capsys):
    words = [
        "bound",
        "faces",
        "--target-clients",
        "8",
        "--set",
        "model.name=lenet-zhu",
        "--set",
        "model.options={}",
        "--json",
    ]
    for sigma, _, _ in ROWS:
        words += ["--defence", f"dp(clip=1, sigma={sigma})"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(ROWS) == 4
    shares = [100 * row["mse_bound"] / row["mse_prior"] for row in found]
    assert shares == pytest.approx([float(share) for _, _, share in ROWS], abs=0.6)


def test_epsilons_of_the_page():
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    for sigma, told, _ in ROWS:
        assert epsilon(float(sigma), Participation(1)) == pytest.approx(float(told), rel=0.02)
    assert f"# epsilon {epsilon(1.0, Participation(1000, 0.01)):.4g}" in PAGE
    assert f"epsilon is above {MEANINGLESS:g}" in PAGE
