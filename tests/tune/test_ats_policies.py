"""The search for an ATS policy: resumption, refusals, ranking, and its result in an audit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gradveil
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import read
from gradveil.cli import ats_search
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.defences import parse
from gradveil.defences.ats_scores import JITTER, Judged
from gradveil.tune import ats_policies
from gradveil.tune.ats_policies import (
    FILE,
    Again,
    PolicyScorer,
    best,
    least_utility,
    lower,
    model_problems,
    open_scorer,
    read_scores,
    score_controls,
)

SMALL = ["digits", "--set", "model.name=lenet-zhu", "--set", "data.size=16", "--images", "8", "--keep", "2"]


def searched(capsys: pytest.CaptureFixture[str], out: Path, *words: str, code: int | None = None) -> dict[str, Any]:
    """Search with few images; exit code 1 means that no policy beats no transform."""
    exit_code = run(["search", "ats", *SMALL, "--out", str(out), "--json", *words])
    assert exit_code in ((0, 1) if code is None else (code,))
    return json.loads(capsys.readouterr().out)


def stored(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / FILE).read_text("utf-8"))
    return {key: raw[key] for key in ("settings", "scores", "again")}


def scorer_of(images: int = 16, *settings: str) -> PolicyScorer:
    config = read("digits", {"target_clients": 1, "defences": ["none"], "attacks": ["ig"]}, settings)
    return open_scorer(open_experiment(config), images, 0)


def test_search_resumed_equals_uninterrupted(tmp_path: Path, capsys, monkeypatch) -> None:
    whole = searched(capsys, tmp_path / "whole", "--candidates", "4")
    cut, utility = tmp_path / "cut", PolicyScorer.utility

    def stopped(scorer: PolicyScorer, policy: str) -> float:
        """Score until some scores, but not all, are on disk."""
        if (cut / FILE).is_file() and len(stored(cut)["scores"]) == 6:
            raise KeyboardInterrupt
        return utility(scorer, policy)

    monkeypatch.setattr(ats_policies, "CHUNK", 0.0)
    monkeypatch.setattr(PolicyScorer, "utility", stopped)
    assert run(["search", "ats", *SMALL, "--out", str(cut), "--candidates", "4"]) == 130
    assert "To go on" in capsys.readouterr().err
    assert len(stored(cut)["scores"]) == 6  # four controls and two candidates
    monkeypatch.undo()
    assert searched(capsys, cut, "--candidates", "4") == whole
    assert stored(cut) == stored(tmp_path / "whole")
    for method in ("privacy", "utility", "again"):
        monkeypatch.setattr(PolicyScorer, method, interrupted)  # nothing is left to score
    assert searched(capsys, cut, "--candidates", "4") == whole


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_search_with_other_settings_raises_and_fresh_starts_again(tmp_path: Path, capsys) -> None:
    searched(capsys, tmp_path / "s", "--candidates", "2")
    assert run(["search", "ats", *SMALL, "--out", str(tmp_path / "s"), "--candidates", "2", "--seed", "1"]) == 2
    assert "seed (0 there, 1 now)" in " ".join(capsys.readouterr().err.split())
    assert searched(capsys, tmp_path / "s", "--candidates", "2", "--seed", "1", "--fresh")["settings"]["seed"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "not valid JSON"), ('{"format": 2}', "has format 2"), ('{"format": 1}', "Field required")],
)
def test_read_scores_damaged_file_raises(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(GradveilError, match=problem):
        read_scores(tmp_path)


def test_search_in_a_folder_of_other_files_raises(tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert run(["search", "ats", *SMALL, "--out", str(tmp_path), "--candidates", "2"]) == 2
    assert "is no search" in capsys.readouterr().err
    assert [child.name for child in tmp_path.iterdir()] == ["thesis.tex"]


def test_search_reports_every_invalid_option(capsys) -> None:
    words = ["search", "ats", "digits", "--candidates", "999999", "--least", "-3", "--set", "model.name=resnet-9000"]
    assert run(words) == 2
    output = capsys.readouterr().err
    assert "3 problems" in output
    assert all(name in output for name in ("--candidates", "--least", "model.name"))


def test_open_scorer_with_too_few_public_images_raises_with_their_count() -> None:
    with pytest.raises(GradveilError, match=r"takes 4000 public images.*--images \d+ or fewer"):
        scorer_of(2000)


def test_best_ranks_a_hiding_policy_above_no_transform() -> None:
    scorer, scores = scorer_of(), {}
    score_controls(scorer, scores, lambda: None)
    assert scores["3-1-7"].privacy < scores["none"].privacy - 0.03
    assert lower(scorer.again("3-1-7"), scorer.again("none"))
    assert not lower(scorer.again("28-39-28"), scorer.again("none"))  # it changes nothing
    assert [one.policy for one in best(scores, ["none", "3-1-7"], -math.inf)] == ["3-1-7", "none"]
    least = least_utility(scores["none"])
    assert least < scores["none"].utility
    assert best(scores, ["none"], least)


def test_search_result_runs_in_an_audit(tmp_path: Path, capsys) -> None:
    rows = searched(capsys, tmp_path / "s", "--candidates", "4", "--least", "-1e9")["best"]
    assert len(rows) == 3  # two of four, and their hybrid
    scorer = scorer_of(8)
    batch, attacks = scorer.images, ["ig(iterations=2)"]
    for text in (rows[0]["defence"], rows[-1]["defence"]):
        sent = parse(text)(scorer.trained)
        assert sent.batch
        inputs = (batch.inputs[:2], batch.targets[:2])
        run = gradveil.audit(scorer.trained.model, inputs, defences=[text], attacks=attacks, control=False)
        trials = run.summary()
        assert [trial["failed"] for trial in trials] == [None]
        assert trials[0]["distance"] > 0.01


def test_scorer_uses_run_weights_for_privacy_and_initial_ones_for_utility(tmp_path: Path) -> None:
    plain = scorer_of(8)
    weights = {name: 0.5 * value for name, value in plain.trained.params().items()}
    save_file(weights, tmp_path / "half.safetensors")
    scorer = scorer_of(
        8, f"model.weights={tmp_path / 'half.safetensors'}", "client.local.lr=0.1", "client.local.steps=2"
    )
    assert scorer.utility("3") == plain.utility("3")
    assert scorer.privacy("3") != pytest.approx(plain.privacy("3"), abs=1e-3)
    assert scorer.trained.local is None  # gradients are compared, whatever the run's clients send


def test_score_controls_of_a_linear_model_raises() -> None:
    scorer = scorer_of(8)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))
    linear = scorer.untrained.__class__(flat, domain=scorer.untrained.domain)
    bad = PolicyScorer(linear, linear, scorer.images, scorer.held_out, scorer.key)
    with pytest.raises(GradveilError, match="no usable Jacobian"):
        score_controls(bad, {}, lambda: None)
    with torch.no_grad():
        flat[1].weight.zero_()
    assert bad.utility("none") == -math.inf
    assert len(model_problems(Judged("none", math.nan, -math.inf), 8)) == 2
    assert not model_problems(Judged("none", 0.5, -8 / JITTER / 4), 8)


def test_lower_needs_two_standard_errors() -> None:
    other = Again([0.5] * 4, -4.0)
    assert lower(Again([0.4, 0.41, 0.39, 0.4], -4.0), other)
    assert not lower(Again([0.2, 0.7, 0.4, 0.6], -4.0), other)


def test_search_without_a_better_policy_exits_with_1_and_the_reason(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ats_search, "lower", lambda policy, control: False)
    out = ["--out", str(tmp_path / "s"), "--candidates", "2"]
    assert run(["search", "ats", *SMALL, *out, "--least", "-1e9"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "not two standard errors below no transform" in output
    assert "As a defence" not in output
    assert run(["search", "ats", *SMALL, *out, "--least", "-8"]) == 1
    assert "No policy passes" in capsys.readouterr().out
    monkeypatch.undo()
    code = run(["search", "ats", *SMALL, *out, "--least", "-1e9"])
    assert ("As a defence: ats(policy=" in capsys.readouterr().out) is (code == 0)
    monkeypatch.setattr(ats_search, "lower", lambda policy, control: True)
    assert run(["search", "ats", *SMALL, *out, "--least", "-1e9"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"gradveil audit {' '.join(SMALL[:5])} --attack ig" in output  # of the model that was judged
