"""Trainings summed up: seeds put together over runs, differences within them, never made of two answers."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from rich.console import Console

from gradveil.cli.app import run as command
from gradveil.cli.training_output import table, wide
from gradveil.core.errors import GradveilError
from gradveil.federated.training_groups import TrainingSummary, Trials, group_trainings, no_progress
from gradveil.federated.training_run import load_training
from gradveil.federated.training_setup import TrainingTrial
from gradveil.report.paper_table import PaperTable, PlacedText, as_latex, as_markdown
from gradveil.report.training_page import training_page
from gradveil.report.training_paper_table import (
    TrainingTable,
    compared_seeds_text,
    difference_text,
    training_tables,
)
from tests.audit.runs import config, execute
from tests.report.trainings import DP, TOPK, changed, trained

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")


def of(*folders: Path) -> list[TrainingTable]:
    return training_tables([load_training(folder) for folder in folders])


def accuracies(*folders: Path) -> dict[tuple[str, int], float]:
    summaries = [summary for folder in folders for _, summary in load_training(folder).trials if summary is not None]
    return {(summary["defence"], summary["seed"]): summary["accuracy"] for summary in summaries}


def test_runs_with_other_seeds_make_one_table(runs: tuple[Path, Path]):
    (table,) = of(*runs)
    known = accuracies(*runs)
    gaps = [100 * (known[DP, seed] - known["none", seed]) for seed in (0, 1)]
    caption, _, head, _, none, private, sparse = as_markdown([table.sheet()]).splitlines()
    assert caption.startswith(
        "lenet-zhu on digits: 3 clients, 1 local epoch of adam, 16 images per step: test accuracy"
    )
    assert "mean and standard deviation over 2 seeds unless noted" in caption
    assert (
        head == "| defence | accuracy | to none | best round | rounds | sent per round | received per round | proven |"
    )
    mean = 50 * (known["none", 0] + known["none", 1])
    assert none.startswith(f"| `none` | {mean:.0f}% ± {stdev(100 * known['none', seed] for seed in (0, 1)):.1f} |  | ")
    assert f"| {sum(gaps) / 2:+z.0f} ± {stdev(gaps):.1f} |".replace("-", "−") in private
    assert "| 2–3 |" in private
    assert private.rpartition("| ")[2].startswith("epsilon ")
    only = 100 * (known[TOPK, 1] - known["none", 1])
    assert f"%), 1 seed | {only:+z.0f} |".replace("-", "−") in sparse
    assert as_latex([table.sheet()]).count("$\\pm$") == 3


def test_two_answers_to_one_question_are_refused(runs: tuple[Path, Path], tmp_path: Path):
    one = runs[0]
    twin = shutil.copytree(one, tmp_path / "twin")
    with pytest.raises(GradveilError, match=f"twin: has 'none' with seed 0, and so has {one}"):
        of(one, twin)
    for file in (twin / "trials").glob("*.json"):
        file.unlink()
    (table,) = of(one, twin)
    assert [len(kind.trials) for kind in table.groups] == [1, 1], "what one run left undone, the other did"


def test_other_settings_make_another_table_with_a_distinct_title(runs: tuple[Path, Path], tmp_path: Path):
    slow = trained(tmp_path / "slow", "local.lr=0.0001")
    differences = [table.title.partition(" (")[2] for table in of(runs[0], slow)]
    assert differences == ["local.lr = 0.001)", "local.lr = 0.0001)"]
    other = trained(tmp_path / "other", "clients=2")
    assert [table.title.partition(": ")[2][:9] for table in of(runs[0], other)] == ["3 clients", "2 clients"]


def test_the_command_sums_trainings_up(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folders = [str(folder) for folder in runs]
    assert command(["summary", *folders]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("lenet-zhu on digits: 3 clients")
    assert f"Proven of {DP}: epsilon" in shown.replace("\n", " ")
    assert command(["summary", *folders, "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["run"], row["defence"], row["seed"]) for row in rows[:2]] == [
        (folders[0], "none", "0"),
        (folders[0], DP, "0"),
    ]
    files = ["--curves", str(tmp_path / "curves.csv"), "--markdown", str(tmp_path / "t.md")]
    assert command(["summary", *folders, *files]) == 0
    assert capsys.readouterr().out == ""
    points = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert [row["round"] for row in points] == [*2 * ["1", "2"], *3 * ["1", "2", "3"]]
    assert (tmp_path / "t.md").read_text().startswith("lenet-zhu on digits")
    assert command(["summary", folders[0], "--json"]) == 0
    summaries: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(row["defence"], len(row["curve"])) for row in summaries] == [("none", 2), (DP, 2)]


def test_weights_from_other_files_of_one_name_make_other_tables(runs: tuple[Path, Path], tmp_path: Path):
    def started(folder: Path, held: str, name: str) -> Path:
        info = json.loads((folder / "train.json").read_text())
        model = {**info["config"]["model"], "weights": "w.safetensors"}
        copy = shutil.copytree(folder, tmp_path / name)
        changed(copy / "train.json", config={**info["config"], "model": model}, weights=held)
        return copy

    same = [started(folder, 64 * "a", f"same-{folder.name}") for folder in runs]
    (table,) = of(*same)
    assert table.seeds == 2
    other = started(runs[1], 64 * "b", "other")
    differences = [table.title.partition(" (")[2] for table in of(same[0], other)]
    assert differences == [f'initial weights = "{12 * letter}")' for letter in "ab"]


def test_settings_that_only_a_later_run_has_tell_it_apart(runs: tuple[Path, Path], tmp_path: Path):
    other = shutil.copytree(runs[1], tmp_path / "other")
    config = json.loads((other / "train.json").read_text())["config"]
    changed(other / "train.json", config={**config, "model": {**config["model"], "options": {"width": 2}}})
    differences = [table.title.partition(" (")[2] for table in of(runs[0], other)]
    assert differences == ["model.options.width = null)", "model.options.width = 2)"]


def test_epsilons_of_other_deltas_are_no_table(runs: tuple[Path, Path], tmp_path: Path):
    loose = shutil.copytree(runs[1], tmp_path / "loose")
    for file in (loose / "trials").glob("dp*.json"):
        changed(file, delta=0.01)
    with pytest.raises(GradveilError, match=r"loose: .*delta 0\.01, and .* at delta 1e-05 -> run it again with --set"):
        of(runs[0], loose)
    (table,) = of(*runs)
    assert "; epsilons at delta 1e-05." in table.caption()
    (bare,) = of(trained(tmp_path / "bare", "rounds=1", defences=["none"]))
    assert "delta" not in bare.caption()


def test_custom_code_that_changed_between_trials_is_warned_of(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in runs]
    for folder, version in zip(copies, "ab", strict=True):
        for file in (folder / "trials").glob("dp*.json"):
            changed(file, code={"mine": version})
    assert command(["summary", *map(str, copies), "--csv", str(tmp_path / "t.csv")]) == 0
    assert "warning: module mine: has changed: 2 versions" in capsys.readouterr().err
    assert command(["summary", str(copies[0]), "--csv", str(tmp_path / "t.csv")]) == 0
    assert capsys.readouterr().err == ""


def test_a_defence_is_one_however_it_was_written(runs: tuple[Path, Path], tmp_path: Path):
    other = trained(tmp_path / "other", defences=["none", "dp( sigma=2.0, clip=1 )"], seeds=[1])
    (table,) = of(runs[0], other)
    assert [(kind.name, len(kind.completed)) for kind in table.groups] == [("none", 2), ("dp(clip=1, sigma=2)", 2)]


def test_difference_is_to_a_training_of_equal_length_with_its_seeds():
    def summary(seed: int, rounds: int, accuracy: float, status: str = "finished") -> TrainingSummary:
        return {"seed": seed, "rounds": rounds, "accuracy": accuracy, "status": status, "tested": 40}

    undefended = [summary(0, 2, 0.5), summary(1, 3, 0.5), summary(3, 2, 0.4)]
    private_trainings = [summary(0, 2, 0.4), summary(1, 2, 0.1), summary(2, 2, 0.1), summary(3, 1, 0.1, "diverged")]
    trials = [
        (TrainingTrial(name, each["seed"]), each)
        for name, some in (("none", undefended), ("dp", private_trainings))
        for each in some
    ]
    none, private = group_trainings(trials)
    assert private.differences == pytest.approx([-0.1, -0.3])
    assert (difference_text(none), compared_seeds_text(none), compared_seeds_text(private)) == ("", "", " (2 seeds)")


def test_folder_without_a_run_is_rejected(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    gone = tmp_path / "gone"
    assert command(["summary", str(runs[0]), str(gone)]) == 2
    assert f"{gone}: is no training (it has no train.json)" in capsys.readouterr().err
    assert command(["summary", str(gone), "--curves", "-"]) == 2
    assert f"{gone}: is not a run directory" in capsys.readouterr().err


def test_defences_with_brackets_and_bars_are_shown_as_written(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    name = "my.defences:noise(layers='[a-z]|[/b]')"
    sheet = PaperTable("", [PlacedText("defence")], [[PlacedText(name, code=True)]])
    assert "`my.defences:noise(layers='[a-z]\\|[/b]')`" in as_markdown([sheet])
    assert "[a-z]\\textbar{}[/b]" in as_latex([sheet])
    custom = shutil.copytree(runs[0], tmp_path / "own")
    config = json.loads((custom / "train.json").read_text())["config"]
    changed(custom / "train.json", config={**config, "defences": ["none", name]})
    file = custom / "trials" / f"{TrainingTrial(name, 0).id}.json"
    next((custom / "trials").glob("dp*.json")).rename(file)
    changed(file, defence=name)
    assert command(["summary", str(custom)]) == 0
    shown = capsys.readouterr().out
    assert f"Proven of {name}" in " ".join(shown.split())


def test_no_number_is_folded_and_no_defence_cut_off(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    console = Console(width=wide().width, color_system=None, markup=False)
    config = [
        (replace(trial, defence=trial.defence * 3), summary)
        for run in runs
        for trial, summary in load_training(run).trials
    ]
    with console.capture() as captured:
        console.print(table(group_trainings(config)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in captured.get()
    assert 3 * "dp(clip=1,sigma=2)" in "".join(line.partition("  ")[0].replace(" ", "") for line in lines)
    assert any(re.search(r"% ± \d+\.\d  .* kB", line) for line in lines)


def test_audits_and_trainings_are_not_summed_up_together(runs: tuple[Path, Path], tmp_path: Path, capsys: Any):
    audit = tmp_path / "audit"
    execute(config(), audit)
    assert command(["summary", str(runs[0]), str(audit)]) == 2
    assert f"{runs[0]}: does not fit the audit {audit}" in capsys.readouterr().err
    assert command(["summary", str(runs[0]), "--junit", "-"]) == 2
    assert f"{runs[0]}: is a training, and has no verdict" in capsys.readouterr().err
    assert command(["summary", str(audit), "--curves", "-"]) == 2
    assert "has no rounds of a training" in capsys.readouterr().err


def test_group_reports_the_largest_epsilon_of_its_seeds():
    row = {"status": "finished", "delta": 1e-5}
    summaries = [{**row, "guarantee": f"epsilon {e}", "epsilon": {"example": e}} for e in (1.0, 3.0, 2.0)]
    failed = {"status": "failed", "guarantee": None, "epsilon": {}}
    (kind,) = group_trainings([(TrainingTrial("dp", seed), each) for seed, each in enumerate([failed, *summaries])])
    assert kind.worst == summaries[1]
    (lost,) = group_trainings([(TrainingTrial("dp", 0), failed)])
    assert lost.worst is None


def test_training_without_progress_is_reported(tmp_path: Path):
    def trials_of(defence: str, right: float, seeds: int = 1) -> Trials:
        summary = {"status": "finished", "tested": 100, "constant": 0.15, "accuracy": right}
        return [(TrainingTrial(defence, seed), summary) for seed in range(seeds)]

    told = no_progress(group_trainings([*trials_of("none", 0.22), *trials_of("dp", 0.1), *trials_of("cvb", 0.23)]))
    assert told.startswith("none and dp classified no more examples")
    assert "within 2 standard errors (15% + 7.1 points, on 100 test examples)" in told
    assert no_progress(group_trainings([*trials_of("none", 0.22, seeds=3)])) == "", "three times as many images"
    assert no_progress(group_trainings([*trials_of("none", 0.5), *trials_of("dp", 0.1)])).endswith(
        "on 100 test examples): no training progress yet."
    )
    still = trained(tmp_path / "still", "local.lr=1e-9", defences=["none"])
    ((_, summary),) = load_training(still).trials
    (table,) = of(still)
    assert summary is not None
    assert (summary["tested"], summary["constant"]) == (40, 6 / 40)
    assert table.caption().endswith(no_progress(table.groups))
    assert no_progress(table.groups) in training_page(still)


def test_chosen_columns_names_and_order_make_the_table(runs: tuple[Path, Path], capsys: Any):
    words = ["--metric", "sent", "--metric", "accuracy", "--label", "dp=DP", "--order", "dp", "--header", "sent=Upload"]
    assert command(["summary", str(runs[0]), "--markdown", "-", *words]) == 0
    head, _, first, second = capsys.readouterr().out.splitlines()[2:6]
    assert head == "| defence | Upload | accuracy |"
    assert first.startswith("| DP |")
    assert second.startswith("| `none` |")
    assert command(["summary", str(runs[0]), "--latex", "-", "--metric", "ssim", "--header", "x=X"]) == 2
    told = capsys.readouterr().err
    assert "metric: 'ssim'" in told
    assert "header: 'x'" in told
