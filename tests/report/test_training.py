"""The page of a training: costs and curves of real small trainings, with what failed, diverged or is missing."""

from __future__ import annotations

import csv
import io
import json
import re
import stat
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gradveil.cli.app import run as command
from gradveil.core.errors import GradveilError
from gradveil.federated.training_groups import group_trainings
from gradveil.federated.training_run import failure, load_training
from gradveil.federated.training_setup import TrainingTrial, trials
from gradveil.report import write_report
from gradveil.report.training_page import context, headline, training_page
from tests.report.parsed_page import EVIL, read
from tests.report.trainings import DP, LOST, TOPK, trained

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three defences that train and one that diverges, with two seeds."""
    return trained(tmp_path_factory.mktemp("whole") / "run", defences=["none", DP, TOPK, LOST], seeds=[0, 1])


def copied(whole: Path, folder: Path) -> Path:
    (folder / "trials").mkdir(parents=True)
    for file in whole.rglob("*.json"):
        (folder / file.relative_to(whole)).write_bytes(file.read_bytes())
    return folder


def summaries(folder: Path) -> list[dict[str, Any]]:
    return [dict(summary) for _, summary in load_training(folder).trials if summary is not None]


def test_costs_are_means_over_the_seeds_and_differences_within_them(whole: Path) -> None:
    bare, private, sparse, lost = group_trainings(load_training(whole).trials)
    rows = summaries(whole)
    private_accuracy = {row["seed"]: row["accuracy"] for row in rows if row["defence"] == DP}
    undefended_accuracy = {row["seed"]: row["accuracy"] for row in rows if row["defence"] == "none"}
    assert private.differences == [private_accuracy[seed] - undefended_accuracy[seed] for seed in (0, 1)]
    assert private.mean("accuracy") == pytest.approx(sum(private_accuracy.values()) / 2)
    assert bare.differences == []
    points = [point for row in rows if row["defence"] == TOPK for point in row["curve"]]
    assert sparse.total("bytes_up") == pytest.approx(sum(point["bytes_up"] for point in points) / 2)
    assert (sparse.mean("bytes_up") or 0) < 0.3 * (bare.mean("bytes_up") or 0)
    assert lost.statuses == [("broken", "2 diverged")]
    assert bare.statuses == [("not broken", "2 finished")]


def test_diverged_training_is_never_the_best(whole: Path) -> None:
    """It sent no bytes at all, since nothing of it was finite."""
    shown = context(load_training(whole))
    assert shown["cheapest"].startswith(f"Fewest bytes per round: {TOPK}")


def test_headline_compares_the_most_accurate_defence_with_none() -> None:
    def group(name: str, *accuracies: float, status: str = "finished") -> list[Any]:
        facts = {"status": status, "tested": 100, "constant": 0.1}
        return [
            (TrainingTrial(name, seed), {**facts, "seed": seed, "accuracy": each})
            for seed, each in enumerate(accuracies)
        ]

    trained = [*group("none", 0.9, 0.94), *group("dp", 0.8, 0.84), *group("lost", 0.99, status="diverged")]
    assert headline(group_trainings(trained)) == "dp: 82% ± 2.8, against 92% ± 2.8 without a defence."
    both = group_trainings([*trained, *group("clip", 0.9, 0.9)])
    assert headline(both).startswith("Of 2 defences, clip is the most accurate: 90% ± 0")
    assert headline(group_trainings(group("none", 0.9))) == "Accuracy: 90% (83–94%) without a defence."
    assert headline(group_trainings([*group("none", 0.1), *group("dp", 0.1)])).startswith(
        "none and dp classified no more"
    )
    assert headline([]) == "No training has a result yet."


def test_page_holds_every_required_text(whole: Path) -> None:
    html = training_page(whole)
    text = read(html).text
    for expected in (
        "Federated training · train-digits",
        "lenet-zhu on digits: 3 clients, 1 local epoch of adam, 16 images per step",
        "6 of 8 trainings finished",
        "mean and standard deviation over 2 seeds",
        "✓ 2 finished",
        "✕ 2 diverged",
        f"none, {TOPK} and {LOST} no formal guarantee",
        "at delta 1e-05 of each example",
        "gradveil train digits",
        "those with the lowest validation loss",
    ):
        assert expected in text, expected
    assert re.search(r"epsilon [\d.]+ of each example", text)
    assert "images kept apart for validation" not in text


def test_page_identifies_the_training_by_its_hash(whole: Path) -> None:
    page = training_page(whole)
    assert load_training(whole).info["config_hash"] in page
    assert "<code>train.json</code>" in page


def test_only_a_mechanism_has_an_epsilon(whole: Path) -> None:
    proofs = context(load_training(whole))["proofs"]
    assert [("epsilon" in text, names) for names, text, _ in proofs] == [
        (True, DP),
        (False, f"none, {TOPK} and {LOST}"),
    ]
    for row in csv_of(whole, 0):
        assert bool(row["epsilon_example"]) == (row["defence"] == DP)


def csv_of(folder: Path, place: int) -> list[dict[str, str]]:
    addresses = [a for a in read(training_page(folder)).addresses if a.startswith("data:text/csv")]
    with urllib.request.urlopen(addresses[place]) as answer:
        return list(csv.DictReader(io.StringIO(answer.read().decode("utf-8"))))


def test_curves_are_those_of_the_records(whole: Path) -> None:
    lines = context(load_training(whole))["data"]["lines"]
    assert [line["name"] for line in lines] == ["none", DP, TOPK, LOST]
    for line in lines[:3]:
        curves = [row["curve"] for row in summaries(whole) if row["defence"] == line["name"]]
        assert [point["round"] for point in line["points"]] == [0, 1, 2]
        for place, point in enumerate(line["points"][1:]):
            shares = [curve[place]["accuracy"] for curve in curves]
            losses = [curve[place]["validation_loss"] for curve in curves]
            assert point["accuracy"] == pytest.approx(sum(shares) / 2)
            assert (point["accuracy_low"], point["accuracy_high"]) == (min(shares), max(shares))
            assert (point["loss_low"], point["loss_high"]) == (min(losses), max(losses))
            sent = [sum(earlier["bytes_up"] for earlier in curve[: place + 1]) for curve in curves]
            assert point["sent"] == pytest.approx(sum(sent) / 2)
        assert [mark["loss"] for mark in line["best"]] == [min(p["validation_loss"] for p in curve) for curve in curves]
    # No update was finite, so the model stayed as it was drawn, and with it the loss.
    first, last = lines[3]["points"]
    assert first["accuracy"] == pytest.approx(last["accuracy"])


def test_both_csvs_agree_with_the_files(whole: Path) -> None:
    rows, rounds = csv_of(whole, 0), csv_of(whole, 1)
    assert [(row["defence"], row["seed"]) for row in rows] == [
        (defence, seed) for seed in ("0", "1") for defence in ("none", DP, TOPK, LOST)
    ]
    for row, summary in zip(rows, summaries(whole), strict=True):
        assert float(row["accuracy"]) == summary["accuracy"]
        assert int(row["total_bytes_up"]) == sum(point["bytes_up"] for point in summary["curve"])
        points = [
            point_row
            for point_row in rounds
            if (point_row["defence"], point_row["seed"]) == (row["defence"], row["seed"])
        ]
        assert [float(point_row["accuracy"]) for point_row in points] == [
            point["accuracy"] for point in summary["curve"]
        ]
        # What is lost came to no number, and was left out.
        assert {(point_row["answered"], point_row["refused"]) for point_row in points} == {
            ("0", "3") if row["defence"] == LOST else ("3", "0")
        }


def test_failed_and_missing_trainings_are_statuses_and_no_gaps(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "run")
    by_name = {(trial.title, trial.seed): trial for trial in trials(load_training(folder).config)}
    broken, gone, other = by_name[DP, 0], by_name[TOPK, 0], by_name[TOPK, 1]
    (folder / "trials" / f"{broken.id}.json").write_text(json.dumps(failure(broken, "RuntimeError: out of memory")))
    for trial in (gone, other):
        (folder / "trials" / f"{trial.id}.json").unlink()
    text = read(training_page(folder)).text
    assert "1 of 8 trainings failed" in text
    assert f"{DP} , seed 0: RuntimeError: out of memory" in text
    assert "2 of 8 trainings are not done yet" in text
    assert "✕ 1 failed ✓ 1 finished" in text
    assert "~ 2 not finished" in text
    statuses = [(row["defence"], row["status"]) for row in csv_of(folder, 0)]
    assert len(statuses) == 8
    assert statuses[1:3] == [(DP, "failed"), (TOPK, "not finished")]
    assert (
        group_trainings(load_training(folder).trials)[1].differences
        == group_trainings(load_training(whole).trials)[1].differences[1:]
    )


def test_a_training_in_which_nothing_is_done_still_gives_a_page(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "run")
    for file in (folder / "trials").iterdir():
        file.unlink()
    html = training_page(folder)
    assert "8 of 8 trainings are not done yet" in read(html).text
    assert 'id="curves"' not in html


def test_without_validation_images_no_loss_is_drawn(tmp_path: Path) -> None:
    html = training_page(trained(tmp_path / "run", "validation=0", defences=["none"], rounds=1))
    assert 'data-curve="accuracy"' in html
    assert 'data-curve="loss"' not in html
    assert "no images were kept apart for validation" in read(html).text


def test_one_file_that_loads_nothing_for_its_owner_only(whole: Path, tmp_path: Path) -> None:
    out = write_report(copied(whole, tmp_path / "run"))
    assert out == tmp_path / "run" / "report.html"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    html = out.read_text("utf-8")
    assert [a for a in read(html).addresses if not a.startswith(("data:", "#"))] == []
    assert "default-src 'none'" in html
    assert "http" + "s://" not in html


def test_command_writes_the_page_and_training_continues(tmp_path: Path, capsys: Any) -> None:
    folder = trained(tmp_path / "run", defences=["none"], rounds=1)
    assert command(["report", str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    created = json.loads((folder / "train.json").read_text())["created"]
    trained(folder, defences=["none"], rounds=2)
    assert load_training(folder).info["created"] == created
    assert [summary["rounds"] for summary in summaries(folder)] == [2]


def test_every_foreign_text_is_escaped(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "run")
    info = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(info | {"command": EVIL, "gradveil": EVIL, "created": EVIL}))
    file = next((folder / "trials").glob("none-*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": EVIL, "guarantee": EVIL}))
    html = training_page(folder)
    assert "<script>alert" not in html
    assert "alert(1)" in read(html).text


@pytest.mark.parametrize(
    ("file", "change", "key"),
    [
        ("train.json", {"config": {}}, "config.rounds"),
        ("trials/none-*.json", {"curve": [{}]}, "curve[0].number"),
        ("trials/none-*.json", {"accuracy": "high"}, "accuracy"),
    ],
)
def test_damaged_files_are_named(whole: Path, tmp_path: Path, file: str, change: dict[str, Any], key: str) -> None:
    folder = copied(whole, tmp_path / "run")
    damaged = next(folder.glob(file))
    damaged.write_text(json.dumps(json.loads(damaged.read_text()) | change))
    with pytest.raises(GradveilError, match=re.escape(key)) as caught:
        write_report(folder)
    assert damaged.name in str(caught.value)
