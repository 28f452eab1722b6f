"""An audit of a model that shows what goes into it says so, unless it attacks it so: then every image comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
