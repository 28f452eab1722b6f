"""The table of the page, as columns and as CSV."""

import copy
import csv
import io
import urllib.request
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest

from gradveil.audit.run_directory import load_run
from gradveil.report import audit_page
from gradveil.report.trial_table import COLUMNS
from tests.report.parsed_page import read
from tests.report.runs import write_run


def test_csv_holds_the_table(run: Path, trials: list[dict[str, Any]]) -> None:
    html = audit_page(load_run(run))
    (address,) = [a for a in read(html).addresses if a.startswith("data:text/csv")]
    with urllib.request.urlopen(address) as answer:
        rows = list(csv.DictReader(io.StringIO(answer.read().decode("utf-8"))))
    assert len(rows) == len(trials)
    for row, entry in zip(rows, trials, strict=True):
        images = [image for record in entry["records"] for image in record["per_image"]]
        assert float(row["asr"]) == sum(image["ssim"] > 0.5 for image in images) / len(images)
        assert float(row["ssim"]) == pytest.approx(sum(image["ssim"] for image in images) / len(images))
        assert float(row["ssim_std"]) == pytest.approx(pstdev(image["ssim"] for image in images))
        assert row["defence"] == entry["info"]["defence"]
        assert float(row["mean_image"]) == entry["info"]["controls"]["mean_image"]["asr"]


def test_csv_disarms_formulas(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    armed = copy.deepcopy(trials[4])
    armed["info"]["defence"] = "=1+1"
    (address,) = [a for a in read(audit_page(load_run(write_run(tmp_path / "run", [armed])))).addresses if "csv" in a]
    with urllib.request.urlopen(address) as answer:
        assert answer.read().decode("utf-8").splitlines()[1].startswith("'=1+1,")


def test_lpips_is_a_column_or_a_reason(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    with_score, with_reason = copy.deepcopy(trials[0]), copy.deepcopy(trials[0])
    for record in with_score["records"]:
        record["lpips"] = 0.25
    with_reason["info"]["missing"] = {"lpips": "the package lpips is not installed"}
    first = audit_page(load_run(write_run(tmp_path / "a", [with_score])))
    second = audit_page(load_run(write_run(tmp_path / "b", [with_reason])))
    assert 'data-key="lpips"' in first
    assert 'data-key="lpips"' not in second
    assert "No LPIPS column: the package lpips is not installed." in read(second).text


def test_legacy_readings_are_not_columns(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    legacy = copy.deepcopy(trials[0])
    for record in legacy["records"]:
        record["ssim_rescaled"] = record["mse_adadefense"] = 77.25
    html = audit_page(load_run(write_run(tmp_path / "run", [legacy])))
    assert "77.25" not in html
    assert not any("adadefense" in column.key or "rescaled" in column.key for column in COLUMNS)
