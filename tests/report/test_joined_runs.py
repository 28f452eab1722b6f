"""An audit and a training of the same data and model, as one: tables, recommendation and chart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradveil.cli.app import run
from tests.report.trainings import DP, TOPK, trained

AUDIT = ("audit", "digits", "--workers", "1", "--target-clients", "2", "--attack", "ig(iterations=2)", "--no-images")
SAME = ("--set", "data.size=16", "--set", "model.name=lenet-zhu", "--defence", "none", "--defence", DP)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("joined")
    assert run([*AUDIT, *SAME, "--out", str(folder / "audit")]) == 0
    return folder / "audit", trained(folder / "train", "validation=0.0", defences=["none", DP], seeds=[0])


def test_a_summary_of_both_has_accuracies_whatever_their_order(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    audit, training = map(str, both)
    for words in ([audit, training], [training, audit]):
        assert run(["summary", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [each["cost"]["rounds"] for each in told["settings"]] == [2, 2]
        assert told["recommendation"]["defence"] is None
    assert run(["summary", audit, "--json"]) == 0
    assert [each["cost"] for each in json.loads(capsys.readouterr().out)["settings"]] == [None, None]
    assert run(["summary", audit, training]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert run(["summary", audit, training, "--markdown", "-"]) == 0
    out = capsys.readouterr().out
    assert "| defence | verdict | accuracy |" in out
    assert "**Recommendation.** No defence can be recommended yet." in out


def test_a_report_of_both_plots_leak_against_accuracy(both: tuple[Path, Path], tmp_path: Path) -> None:
    audit, training = map(str, both)
    alone, together = tmp_path / "alone.html", tmp_path / "together.html"
    assert run(["report", audit, "--out", str(alone)]) == 0
    assert run(["report", training, audit, "--out", str(together)]) == 0
    assert 'data-cost="accuracy"' not in alone.read_text("utf-8")
    assert 'data-cost="accuracy"' in together.read_text("utf-8")
    assert "of each example" in together.read_text("utf-8")


@pytest.mark.parametrize(
    ("settings", "defences", "reason"),
    [
        (["data.size=32"], ["none", DP], "data.size is 32, and 16 in the audit"),
        (["model.options.width=2"], ["none", DP], "model.options is {'width': 2}, and {} in the audit"),
        ([], [TOPK], "no defence is in both: it trains with topk(keep=0.1)"),
    ],
)
def test_a_training_of_something_else_is_refused_with_the_reason(
    both: tuple[Path, Path],
    settings: list[str],
    defences: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    if "model.options.width=2" in settings:  # what a folder records decides, not what could be trained
        trained(other, defences=defences, seeds=[0])
        file = other / "train.json"
        told = json.loads(file.read_text())
        told["config"]["model"]["options"] = {"width": 2}
        file.write_text(json.dumps(told))
    else:
        trained(other, *settings, defences=defences, seeds=[0])
    for command in ("summary", "report"):
        assert run([command, str(both[0]), str(other)]) == 2
        assert f"does not fit the audit {both[0]}: {reason}" in capsys.readouterr().err


def test_trainings_that_do_not_compare_are_refused(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trained(tmp_path / "other", "validation=0.2", defences=["none", DP], seeds=[0])
    assert run(["summary", *map(str, (*both, other))]) == 2
    assert "is trained in another way than" in capsys.readouterr().err
    assert run(["summary", *map(str, (*both, both[1]))]) == 2
    assert f"has '{DP}' with seed 0 and 'none' with seed 0, and so has" in capsys.readouterr().err
    assert run(["report", str(both[0]), str(both[0])]) == 2
    assert "is a second report next to" in capsys.readouterr().err
