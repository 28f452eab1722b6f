"""An audit of a model that shows what goes into it says so, unless it attacks it so: then every image comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradveil.audit.reader import resolve
from gradveil.audit.scene import open_scene
from gradveil.audit.showing import with_closed_forms
from gradveil.cli.app import run

WORDS = ["audit", "faces", "--set", "model.name=vit", "--set", "data.size=16", "--victims", "2", "--workers", "1"]
MODEL = ["--defence", "dropout(0.25)", "--defence", "precode", "--defence", "cvb"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_user_is_told_of_the_attack(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "--defence", "none", "--attack", "ig(iterations=1)", "--json"]) == 0
    err = capsys.readouterr().err
    assert "warning: client: one image comes back in closed form" in err
    assert "--attack analytic" in err


def test_the_attack_recovers_behind_every_model_defence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, *MODEL, "--attack", "analytic", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "closed form" not in err
    rows = json.loads(out)
    assert [row["asr"] for row in rows] == [1.0] * 3
    assert min(row["ssim_mean"] for row in rows) > 0.99


def added(**settings: object) -> list[str]:
    """What comes to the attacks of a run of this model."""
    raw = {"name": "r", "data": {"name": "faces", "size": 16}, "model": {"name": "vit"}, "victims": 1}
    attacks = ["ig"]
    scene = open_scene(resolve(raw | {"attacks": attacks} | settings), checked=False)
    return list(with_closed_forms(scene).config.attacks)[len(attacks) :]


def test_adaptive_attacks_in_closed_form_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--defence", "prune(0.5)", "--attack", "adaptive", "--iterations", "1", "--budget", "64", "--json"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "adaptive: analytic and analytic(prior=public) too" in err
    assert "warning: client" not in err
    attacks = [row["attack"] for row in json.loads(out)]
    assert attacks[-2:] == ["analytic", "analytic(prior=public)"]
    assert len(attacks) > 2, "the attackers of the table are still there"


def test_only_what_each_client_shows_is_attacked_so() -> None:
    assert added() == ["analytic"]
    assert added(defences=["none", "gaussian(0.1)"]) == ["analytic", "analytic(prior=public)"]
    assert added(defences=["dropout(0.25)"]) == ["analytic"]
    assert added(client=[{"batch": 2}]) == []
    assert added(client=[{"batch": 1}, {"batch": 2}]) == []
    assert added(model={"name": "lenet-zhu"}) == []
