"""The search for a policy of ATS: resumed to the bit, refused elsewhere, and of use in an audit."""

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
from gradveil.tune import ats_policies as tune_kept
from gradveil.tune.ats_policies import (
    FILE,
    Again,
    PolicyScorer,
    best,
    least_utility,
    lower,
    model_problems,
    open_judge,
    read_kept,
    score_controls,
)

SMALL = ["digits", "--set", "model.name=lenet-zhu", "--images", "8", "--keep", "2"]


def found(capsys: pytest.CaptureFixture[str], out: Path, *words: str, code: int | None = None) -> dict[str, Any]:
    """Search with few images; a search that finds nothing better than no transform is one, too."""
    got = run(["search", "ats", *SMALL, "--out", str(out), "--json", *words])
    assert got in ((0, 1) if code is None else (code,))
    return json.loads(capsys.readouterr().out)


def kept(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / FILE).read_text("utf-8"))
    return {key: raw[key] for key in ("settings", "scores", "again")}


def judged(images: int = 16, *settings: str) -> PolicyScorer:
    config = read("digits", {"target_clients": 1, "defences": ["none"], "attacks": ["ig"]}, settings)
    return open_judge(open_experiment(config), images, 0)


def test_resumed_equals_uninterrupted(tmp_path: Path, capsys, monkeypatch) -> None:
    whole = found(capsys, tmp_path / "whole", "--candidates", "4")
    cut, utility = tmp_path / "cut", PolicyScorer.utility

    def stopped(judge: PolicyScorer, policy: str) -> float:
        """Score until something is on disk of which a kill would leave nothing if it were written at the end."""
        if (cut / FILE).is_file() and len(kept(cut)["scores"]) == 6:
            raise KeyboardInterrupt
        return utility(judge, policy)

    monkeypatch.setattr(tune_kept, "CHUNK", 0.0)
    monkeypatch.setattr(PolicyScorer, "utility", stopped)
    assert run(["search", "ats", *SMALL, "--out", str(cut), "--candidates", "4"]) == 130
    assert "To go on" in capsys.readouterr().err
    assert len(kept(cut)["scores"]) == 6  # four controls and two candidates
    monkeypatch.undo()
    assert found(capsys, cut, "--candidates", "4") == whole
    assert kept(cut) == kept(tmp_path / "whole")
    for method in ("privacy", "utility", "again"):
        monkeypatch.setattr(PolicyScorer, method, interrupted)  # nothing is left to score
    assert found(capsys, cut, "--candidates", "4") == whole


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_other_settings_are_refused_and_fresh_starts_again(tmp_path: Path, capsys) -> None:
    found(capsys, tmp_path / "s", "--candidates", "2")
    assert run(["search", "ats", *SMALL, "--out", str(tmp_path / "s"), "--candidates", "2", "--seed", "1"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "seed (0 there, 1 now): differs from the search that is there" in told
    assert "--fresh" in told
    assert found(capsys, tmp_path / "s", "--candidates", "2", "--seed", "1", "--fresh")["settings"]["seed"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ('{"format": 2}', "has format 2"), ('{"format": 1}', "Field required")],
)
def test_damaged_file_raises(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(GradveilError, match=said):
        read_kept(tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert run(["search", "ats", *SMALL, "--out", str(tmp_path), "--candidates", "2"]) == 2
    assert "is no search" in capsys.readouterr().err
    assert [child.name for child in tmp_path.iterdir()] == ["thesis.tex"]


def test_all_wrong_options_are_reported(capsys) -> None:
    words = ["search", "ats", "digits", "--candidates", "999999", "--least", "-3", "--set", "model.name=resnet-9000"]
    assert run(words) == 2
    told = capsys.readouterr().err
    assert "3 problems" in told
    assert all(name in told for name in ("--candidates", "--least", "model.name"))


def test_too_few_public_images_raise_with_their_count() -> None:
    with pytest.raises(GradveilError, match=r"takes 4000 public images.*--images \d+ or fewer"):
        judged(2000)


def test_what_hides_is_ranked_above_images_as_they_are() -> None:
    judge, scores = judged(), {}
    score_controls(judge, scores, lambda: None)
    assert scores["3-1-7"].privacy < scores["none"].privacy - 0.03
    assert lower(judge.again("3-1-7"), judge.again("none"))
    assert not lower(judge.again("28-39-28"), judge.again("none"))  # it changes nothing
    assert [one.policy for one in best(scores, ["none", "3-1-7"], -math.inf)] == ["3-1-7", "none"]
    least = least_utility(scores["none"])
    assert least < scores["none"].utility
    assert best(scores, ["none"], least)


def test_the_policy_runs_in_an_audit(tmp_path: Path, capsys) -> None:
    rows = found(capsys, tmp_path / "s", "--candidates", "4", "--least", "-1e9")["best"]
    assert len(rows) == 3  # two of four, and their hybrid
    judge = judged(8)
    batch, attacks = judge.images, ["ig(iterations=2)"]
    for text in (rows[0]["defence"], rows[-1]["defence"]):
        sent = parse(text)(judge.trained)
        assert sent.batch
        inputs = (batch.inputs[:2], batch.targets[:2])
        run = gradveil.audit(judge.trained.model, inputs, defences=[text], attacks=attacks, control=False)
        trials = run.summary()
        assert [trial["failed"] for trial in trials] == [None]
        assert trials[0]["distance"] > 0.01


def test_privacy_is_by_the_runs_weights_and_utility_by_initial_ones(tmp_path: Path) -> None:
    plain = judged(8)
    weights = {name: 0.5 * value for name, value in plain.trained.params().items()}
    save_file(weights, tmp_path / "half.safetensors")
    judge = judged(8, f"model.weights={tmp_path / 'half.safetensors'}", "client.local.lr=0.1", "client.local.steps=2")
    assert judge.utility("3") == plain.utility("3")
    assert judge.privacy("3") != pytest.approx(plain.privacy("3"), abs=1e-3)
    assert judge.trained.local is None  # gradients are compared, whatever the run's clients send


def test_a_linear_model_is_refused() -> None:
    judge = judged(8)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))
    linear = judge.untrained.__class__(flat, domain=judge.untrained.domain)
    bad = PolicyScorer(linear, linear, judge.images, judge.others, judge.key)
    with pytest.raises(GradveilError, match="no usable Jacobian"):
        score_controls(bad, {}, lambda: None)
    with torch.no_grad():
        flat[1].weight.zero_()
    assert bad.utility("none") == -math.inf
    assert len(model_problems(Judged("none", math.nan, -math.inf), 8)) == 2
    assert not model_problems(Judged("none", 0.5, -8 / JITTER / 4), 8)


def test_lower_asks_for_two_standard_errors() -> None:
    other = Again([0.5] * 4, -4.0)
    assert lower(Again([0.4, 0.41, 0.39, 0.4], -4.0), other)
    assert not lower(Again([0.2, 0.7, 0.4, 0.6], -4.0), other)


def test_words_for_a_search_that_found_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ats_search, "lower", lambda one, other: False)
    out = ["--out", str(tmp_path / "s"), "--candidates", "2"]
    assert run(["search", "ats", *SMALL, *out, "--least", "-1e9"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "not two standard errors below no transform" in told
    assert "As a defence" not in told
    assert "Both are proxies" in told
    assert run(["search", "ats", *SMALL, *out, "--least", "-8"]) == 1
    assert "No policy passes" in capsys.readouterr().out
    monkeypatch.undo()
    code = run(["search", "ats", *SMALL, *out, "--least", "-1e9"])
    assert ("As a defence: ats(policy=" in capsys.readouterr().out) is (code == 0)
    monkeypatch.setattr(ats_search, "lower", lambda one, other: True)
    assert run(["search", "ats", *SMALL, *out, "--least", "-1e9"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "gradveil audit digits --set model.name=lenet-zhu --attack ig" in told  # of the model that was judged
