"""The page of recorded updates: what came back, and that there is no score where nobody knows the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.report.audit_page import audit_page, context
from tests.audit.recording import UNSEEN, record, simulated, watching
from tests.audit.runs import execute


def test_a_page_without_scores_says_so_and_shows_what_came_back(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN), tmp_path / "run")
    told = context(run)
    assert told["verdicts"] == []
    assert told["rows"] == []
    assert [target_client["name"] for target_client in told["guesses"][0]["target_clients"]] == [
        "client 0, round 1",
        "client 1, round 1",
    ]
    assert told["cards"] == [{"label": "Attacks run", "value": "1", "detail": "none failed", "level": ""}]
    text = audit_page(run)
    assert "No score." in text
    assert told["guesses"][0]["picture"] in text
    assert "Assumed none: data.mean and data.std were not said" in text
    assert "images recovered</" not in text.split('<script type="application/json"')[0]
    assert 'id="verdicts"' not in text


def test_a_page_with_the_truth_judges_and_notes_what_does_not_fit(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen", truth=True, defence="prune(0.5)")
    run, _ = execute(watching(tmp_path / "seen", defences=["none"]), tmp_path / "run")
    told = context(run)
    assert told["guesses"] == []
    assert [row.attacker for row in told["rows"]] == ["naive"]
    text = audit_page(run)
    assert "Assumed none: recorded as sent with the defence &#39;prune(0.5)&#39;, attacked as if with" in text
    assert 'id="verdicts"' in text


@pytest.mark.parametrize("images", [True, False])
def test_pictures_are_shown_only_where_they_were_kept(tmp_path: Path, images: bool) -> None:
    record(simulated(), tmp_path / "seen")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN, images=images), tmp_path / "run")
    assert ("data:image/png" in audit_page(run)) is images


def test_a_stranger_s_names_do_no_harm(tmp_path: Path) -> None:
    record(simulated(), tmp_path / "seen", defence=None, run="<script>alert(1)</script>")
    run, _ = execute(watching(tmp_path / "seen", data=UNSEEN), tmp_path / "run")
    run.trials[0].info["observed"][0]["client"] = "<img src=x onerror=alert(1)>"
    assert "<img src=x" not in audit_page(run)
