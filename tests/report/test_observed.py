"""The page of recorded updates: what came back, and that there is no score where nobody knows the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.report.audit_page import audit_page, context
from tests.audit.recording import UNSEEN, record, simulated, watching
from tests.audit.runs import execute


def test_page_without_ground_truth_shows_reconstructions_and_no_verdict(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN), tmp_path / "run")
    shown = context(run)
    assert shown["verdicts"] == []
    assert shown["rows"] == []
    assert [target_client["name"] for target_client in shown["guesses"][0]["target_clients"]] == [
        "client 0, round 1",
        "client 1, round 1",
    ]
    assert shown["basis"].endswith("1 attack")
    text = audit_page(run)
    assert "No score." in text
    assert len(shown["guesses"][0]["pictures"]) == 2
    assert all(picture.uri in text for picture in shown["guesses"][0]["pictures"])
    assert "Assumed none: data.mean and data.std were not said" in text
    assert "identifiable</" not in text.split('<script type="application/json"')[0]
    assert 'id="defences"' not in text


def test_page_with_ground_truth_has_verdicts_and_notes_contradictions(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen", truth=True, defence="prune(0.5)")
    run, _ = execute(watching(tmp_path / "seen", defences=["none"]), tmp_path / "run")
    shown = context(run)
    assert shown["guesses"] == []
    assert [row.attacker for row in shown["rows"]] == ["naive"]
    text = audit_page(run)
    assert "Assumed none: recorded as sent with the defence &#39;prune(0.5)&#39;, attacked as if with" in text
    assert 'id="defences"' in text


@pytest.mark.parametrize("images", [True, False])
def test_pictures_are_shown_only_where_they_were_kept(tmp_path: Path, images: bool) -> None:
    record(simulated(), tmp_path / "seen")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN, images=images), tmp_path / "run")
    assert ("data:image/png" in audit_page(run)) is images


def test_names_in_records_are_escaped(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen", defence=None, run="<script>alert(1)</script>")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN), tmp_path / "run")
    run.trials[0].info["observed"][0]["client"] = "<img src=x onerror=alert(1)>"
    assert "<img src=x" not in audit_page(run)
