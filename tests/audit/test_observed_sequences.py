"""Recorded updates of texts and rows are attacked as those of images are."""

from html import escape
from pathlib import Path
from typing import Any

import pytest

from gradveil.report import audit_page
from tests.audit.recording import record, simulated, watching
from tests.audit.runs import execute

TEXTS: dict[str, Any] = {
    "data": {"name": "reviews", "tokens": 8, "public": 40, "gallery": 8},
    "model": {"name": "small-encoder", "options": {"width": 32, "depth": 1}},
}
ROWS: dict[str, Any] = {
    "data": {"name": "census", "public": 60, "gallery": 8},
    "model": {"name": "tabular-mlp", "options": {"width": 16}},
}


@pytest.mark.parametrize(
    ("kind", "attack", "made"),
    [
        (TEXTS, "span", ["span"]),
        (TEXTS, "adaptive", ["span-rank", "span"]),
        (ROWS, "adaptive", ["tableak"]),
    ],
)
@pytest.mark.parametrize("scored", [True, False])
def test_recorded_texts_and_rows_are_attacked_and_shown(
    kind: dict[str, Any], attack: str, made: list[str], scored: bool, tmp_path: Path
):
    named = made[0] if attack == "adaptive" else attack
    record(simulated(**kind, attacks=[named], target_clients=2), tmp_path / "seen", truth=scored)
    run, _ = execute(watching(tmp_path / "seen", **kind, attacks=[attack], iterations=4), tmp_path / "run")
    assert [trial.failed for trial in run.trials] == [None] * len(run.trials)
    assert set(made) <= {trial.info["attack"].split("(")[0] for trial in run.trials}
    notes = [note for trial in run.trials for note in trial.info["notes"]]
    assert not any("random images" in note for note in notes)
    page = audit_page(run)
    assert "Recorded updates" in page
    if scored and kind is TEXTS:
        assert all(len(trial.info["sentences"]) == 2 for trial in run.trials)
    if not scored:
        (first,) = run.trials[0].records[0]["reconstructions"]
        assert first
        assert escape(first) in page
