"""The run directory: private, atomic, resumable, and never two processes in one."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch

from gradveil.audit.audit_run import describe
from gradveil.audit.result_rows import summarise
from gradveil.audit.run_directory import Store, Trial, load_run
from gradveil.core.errors import GradveilError
from gradveil.core.private_files import plain
from gradveil.metrics import wilson
from tests.audit.runs import Silent, config, execute, without_times


def info(**changes: object) -> dict[str, object]:
    return describe(config(**changes), 2, "gradveil audit small")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_lies_on_disk_as_the_format_says(tmp_path: Path) -> None:
    run, display = execute(config(), tmp_path / "run")
    assert [trial.info["defence"] for trial in run.trials] == ["none", "gaussian(0.01)"]
    assert run.info["format"] == 3
    assert run.info["config"]["target_clients"] == 2
    assert run.info["packages"]["torch"] == torch.__version__
    for trial in run.trials:
        assert trial.path is not None
        assert {file.name for file in trial.path.iterdir()} == {"trial.json", "records.json", "images.safetensors"}
        images = trial.images()
        assert images is not None
        assert {name: tuple(value.shape) for name, value in images.items()} == {
            "truth": (2, 1, 1, 16, 16),
            "nearest": (2, 3, 1, 16, 16),
            "reconstruction": (2, 1, 1, 16, 16),
        }
        assert all(0 <= float(value.min()) <= float(value.max()) <= 1 for value in images.values())
    assert display.finished[0].info["trial"] == run.trials[0].info["trial"]
    assert display.steps[-1].row_iterations == 12


def test_everything_is_private(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    execute(config(), tmp_path / "run")
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_no_images_keeps_scores_only(tmp_path: Path) -> None:
    run, _ = execute(config(images=False), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert all(trial.images() is None and len(trial.records) == 2 for trial in run.trials)


def test_finished_trials_are_not_run_again(tmp_path: Path) -> None:
    first, _ = execute(config(), tmp_path / "run")
    second, display = execute(config(), tmp_path / "run")
    assert display.skipped == {trial.info["trial"] for trial in first.trials}
    assert display.finished == []
    assert [trial.info for trial in second.trials] == [trial.info for trial in first.trials]


def test_an_interrupted_run_ends_with_the_same_records(tmp_path: Path) -> None:
    class Stops(Silent):
        def done(self, trial: object, result: Trial) -> None:
            raise KeyboardInterrupt

    from gradveil.audit.audit_run import run
    from gradveil.audit.preflight import open_experiment

    chosen, folder = config(), tmp_path / "stopped"
    experiment = open_experiment(chosen)
    with pytest.raises(KeyboardInterrupt), Store(folder).open(describe(chosen, 2, "")) as store:
        run(experiment, store, Stops(), 2)
    assert len(load_run(folder).trials) == 1
    resumed, display = execute(chosen, folder)
    whole, _ = execute(chosen, tmp_path / "whole")
    assert len(display.finished) == 1
    assert_same(resumed.path, whole.path)


def assert_same(first: Path | None, second: Path | None) -> None:
    """Every record, trial and image is the same, but for the clock's."""
    assert first is not None
    assert second is not None
    one, two = load_run(first), load_run(second)
    assert without_times([trial.info for trial in one.trials]) == without_times([trial.info for trial in two.trials])
    assert without_times([trial.records for trial in one.trials]) == without_times(
        [trial.records for trial in two.trials]
    )
    for a, b in zip(one.trials, two.trials, strict=True):
        images, others = a.images(), b.images()
        assert images is not None
        assert others is not None
        assert all(torch.equal(images[name], others[name]) for name in others)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run")
    with pytest.raises(GradveilError) as caught:
        execute(config(target_clients=1, seeds=[3]), tmp_path / "run")
    said = str(caught.value)
    assert "target_clients (2 there, 1 now)" in said
    assert "seeds (without 0)" in said
    assert "--fresh" in said
    assert "--out" in said


def test_a_run_grows_by_defences_attacks_and_seeds(tmp_path: Path) -> None:
    """What is there stays, and what is new is as in a run that had it from the start."""
    few, more = config(), config(defences=["clip(1)", "none", "gaussian(0.01)"], seeds=[0, 1])
    first, _ = execute(few, tmp_path / "run")
    grown, display = execute(more, tmp_path / "run")
    assert display.skipped == {trial.info["trial"] for trial in first.trials}
    assert len(display.finished) == 4
    assert grown.info["created"] == first.info["created"]
    assert grown.info["config"]["seeds"] == [0, 1]
    whole, _ = execute(more, tmp_path / "whole")
    assert_same(grown.path, whole.path)
    with pytest.raises(GradveilError, match=r"defences \(without clip\(1\)\)"):
        execute(few, tmp_path / "run")
    with_attack = config(defences=more.defences, seeds=more.seeds, attacks=[*more.attacks, "dlg(iterations=2)"])
    assert len(execute(with_attack, tmp_path / "run")[1].finished) == 6


def test_attacks_that_share_a_budget_stay_as_they_are(tmp_path: Path) -> None:
    execute(config(budget="40", defences=["none"]), tmp_path / "run")
    run, _ = execute(config(budget="40"), tmp_path / "run")
    assert len(run.trials) == 2
    with pytest.raises(GradveilError, match="the budget of 'none' was shared by 1 attack in the run that is there"):
        execute(config(budget="40", attacks=[*config().attacks, "dlg(iterations=2)"]), tmp_path / "run")
    more, display = execute(config(budget="40", attacks=[*config().attacks, "r-gap"]), tmp_path / "run")
    assert len(more.trials) == 4, "who takes no share may come"
    assert len(display.finished) == 2


def test_fresh_starts_again(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run")
    run, display = execute(config(target_clients=1), tmp_path / "run", fresh=True)
    assert len(display.finished) == 2
    assert [len(trial.records) for trial in run.trials] == [1, 1]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run")
    half = tmp_path / "run" / "trials" / "x.tmp-1"
    half.mkdir()
    (half / "records.json").write_text("[")
    (tmp_path / "run" / "run.json.tmp-1").write_text("{")
    run, display = execute(config(), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp-*"))
    assert (len(run.trials), display.finished) == (2, [])


def test_a_start_that_was_killed_early_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "run" / "trials").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "run.json.tmp-9").write_text("{")
    assert len(execute(config(), tmp_path / "run")[0].trials) == 2


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "run").open(info()),
        pytest.raises(GradveilError, match="in use by another process"),
        Store(tmp_path / "run").open(info()),
    ):
        pass
    with Store(tmp_path / "run").open(info()) as store:
        assert store.info()["name"] == "small"


def test_a_failed_trial_is_kept_and_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path / "run").open(info()) as store:
        trial = str(store.info()["trials"][0])
        facts = {"model": "lenet-zhu", "data": "faces", "seed": 0, "round": 0, "client": "c", "batch": 1}
        facts |= {"attack": "ig(iterations=6, report=2)", "preset": "ig", "trained": None}
        facts |= {"update": "one gradient", "local": False, "changes": [], "undefended": True}
        store.write(trial, Trial({"trial": trial, "defence": "none", **facts, "failed": "broke"}, []))
        assert store.survey([trial]) == (set(), [])
    assert load_run(tmp_path / "run").trials[0].failed == "broke"
    run, display = execute(config(), tmp_path / "run")
    assert [result.failed for result in run.trials] == [None, None]
    assert (len(display.finished), display.damaged) == (2, [])


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="not a run directory"):
        load_run(tmp_path)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(GradveilError, match="holds other files"), Store(tmp_path).open(info(), fresh=True):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    with pytest.raises(GradveilError, match="is a file"), Store(tmp_path / "thesis.txt").open(info()):
        pass
    for place in ("thesis.txt/run", 300 * "a"):
        with pytest.raises(GradveilError, match="cannot be made"), Store(tmp_path / place).open(info()):
            pass


def test_json_never_holds_nan(tmp_path: Path) -> None:
    with Store(tmp_path / "run").open(info()) as store:
        trial = str(store.info()["trials"][0])
        store.write(trial, Trial({"trial": trial, "distance": float("inf"), "x": float("nan")}, []))
    text = (tmp_path / "run" / "trials" / trial / "trial.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["distance"] is None
    assert plain({"a": (float("-inf"), 1.5)}) == {"a": [None, 1.5]}


def test_summary_counts_images() -> None:
    image = {"mse": 0.1, "psnr": 10.0, "ssim": 0.7}
    records = [
        {"status": "budget", "label_accuracy": 1.0, "per_image": [{**image, "success": 1}, {**image, "success": 1}]},
        {"status": "stalled", "label_accuracy": 0.5, "per_image": [{**image, "success": 1}, {**image, "success": 0}]},
    ]
    row = summarise(Trial({"trial": "a", "defence": "none", "seconds": 3.0}, records))
    low, high = wilson(3, 4)
    assert (row["asr"], row["asr_low"], row["asr_high"]) == (0.75, low, high)
    assert (row["target_clients"], row["images"], row["label_accuracy"]) == (2, 4, 0.75)
    assert row["statuses"] == {"budget": 1, "stalled": 1}
    assert row["ssim_mean"] == pytest.approx(0.7)


def test_a_trial_of_another_run_is_refused_and_made_anew(tmp_path: Path) -> None:
    mine, _ = execute(config(), tmp_path / "run")
    other, _ = execute(config(seeds=[5]), tmp_path / "other")
    name, place, foreign = mine.trials[0].info["trial"], mine.trials[0].path, other.trials[0].path
    assert place is not None
    assert foreign is not None
    shutil.rmtree(place)
    shutil.copytree(foreign, place)
    with pytest.raises(GradveilError) as caught:
        load_run(tmp_path / "run")
    assert "is no trial of this run: trial is" in str(caught.value)
    assert "seed is '5', and the run's 0" in str(caught.value)
    again, display = execute(config(), tmp_path / "run")
    assert [trial.info["trial"] for trial in display.finished] == [name]
    assert [trial.info["seed"] for trial in again.trials] == [0, 0]
