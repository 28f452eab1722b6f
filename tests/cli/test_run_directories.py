"""Where runs go that name no directory: on in their own, and other settings into a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gradveil.audit.run_directory import load_run
from gradveil.cli.app import run
from gradveil.federated.training_run import load_training
from gradveil.runs.run_folder import numbered

COST = "cost = {rounds = 1, clients = 2, local = {epochs = 1, lr = 0.1}, delta = 1e-3}\n"
TRAIN = """
name = "little"
clients = 2
rounds = 1
data = {name = "faces", size = 16}
model = {name = "lenet-zhu"}
local = {epochs = 1, lr = 0.1}
"""


@pytest.mark.parametrize(
    ("there", "fits", "chosen"),
    [
        ([], [], "a"),
        (["a"], ["a"], "a"),
        (["a"], [], "a-2"),
        (["a", "a-2", "a-3"], ["a-3"], "a-3"),
        (["a", "a-3"], [], "a-2"),
        (["a", "a-2", "a-10", "a-b", "a-02"], ["a-10"], "a-10"),
    ],
)
def test_a_run_goes_on_where_it_fits_and_else_to_the_first_free_directory(
    there: list[str], fits: list[str], chosen: str, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).mkdir()

    def problems(folder: Path) -> list:
        return [] if not folder.exists() or folder.name in fits else ["other"]

    assert numbered(tmp_path / "a", problems)[0] == tmp_path / chosen


def test_a_run_without_a_file_is_named_after_model_and_data(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without attacks, it has the first search of its examples."""
    asked = ["audit", "--model", "lenet-zhu", "--data", "faces", "--set", "data.size=16", "--target-clients", "2"]
    assert run([*asked, "--iterations", "2", "--workers", "1"]) == 0
    done = load_run("runs/lenet-zhu-faces")
    assert [trial.info["attack"] for trial in done.trials] == ["portfolio"]
    assert run(["audit", "--model", "lenet-zhu"]) == 2
    assert "--data: is missing" in capsys.readouterr().err


def test_options_name_another_model_than_the_file(small: Path) -> None:
    assert run(["audit", "small.toml", "--model", "mlp", "--prepare", "--workers", "1"]) == 0
    assert load_run("runs/small").info["config"]["model"] == {
        **load_run("runs/small").info["config"]["model"],
        "name": "mlp",
        "prepare": True,
    }


def words(*more: str) -> list[str]:
    return ["audit", "small.toml", "--workers", "1", *more]


def test_a_changed_audit_gets_a_directory_of_its_own_and_goes_on_there(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words()) == 0
    before = load_run("runs/small").info
    assert "runs/" not in capsys.readouterr().err
    for line in ("This run is in runs/small-2.", "Resuming the run in runs/small-2."):
        assert run(words("--set", "threshold=0.4")) == 0
        errors = capsys.readouterr().err
        assert "runs/small holds another run: threshold (0.5 there, 0.4 now).\n" in errors
        assert line in errors
    assert load_run("runs/small-2").info["config"]["threshold"] == 0.4
    assert load_run("runs/small").info == before
    assert run(words()) == 0
    assert "Resuming the run in runs/small.\n" in capsys.readouterr().err
    assert sorted(path.name for path in (small / "runs").iterdir()) == ["small", "small-2"]


def test_a_directory_of_another_run_that_is_asked_for_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words()) == 0
    capsys.readouterr()
    assert run(words("--out", "runs/small", "--set", "threshold=0.4")) == 2
    errors = capsys.readouterr().err
    assert "runs/small, threshold (0.5 there, 0.4 now): differs from the run that is there" in errors
    assert "Resuming" not in errors


def test_a_fresh_start_removes_no_other_run(small: Path) -> None:
    assert run(words()) == 0
    created = (small / "runs/small/run.json").read_text()
    assert run(words("--set", "threshold=0.4", "--fresh")) == 0
    assert (small / "runs/small/run.json").read_text() == created
    assert (small / "runs/small-2").is_dir()


def test_a_changed_training_gets_a_directory_of_its_own(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "little.toml").write_text(TRAIN)
    command = ["train", "little.toml", "--threads", "1"]
    assert run(command) == 0
    assert run([*command, "--set", "clients=4"]) == 0
    assert "runs/little holds another run: clients (2 there, 4 now).\nThis run is in runs/little-2.\n" in (
        capsys.readouterr().err
    )
    assert load_training(Path("runs/little-2")).config.clients == 4
    assert run([*command, "--rounds", "2"]) == 0  # more rounds go on
    assert load_training(Path("runs/little")).trials[0][1]["rounds"] == 2


def test_trainings_for_accuracies_are_resumed_and_others_are_another_run(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "small.toml").write_text(COST + (small / "small.toml").read_text())
    assert run(words("--defence", "prune(0.5)", "--no-control")) == 0
    errors = capsys.readouterr().err
    assert "2 trainings of 1 round for the accuracy of each defence\n" in errors
    assert errors.index("trained with prune(0.5)") < errors.index("against prune(0.5)")
    stored = Path("runs/small/training")
    assert [trial.title for trial, _ in load_training(stored).trials] == ["prune(0.5)", "none"]
    for trial in Path("runs/small/trials").iterdir():
        shutil.rmtree(trial)
    next(path for path in (stored / "trials").iterdir() if path.suffix == ".json").unlink()
    assert run(words("--defence", "prune(0.5)", "--no-control")) == 0
    assert "trained with" not in capsys.readouterr().err  # the state is there: only its summary is written again
    assert run(words("--defence", "prune(0.5)", "--no-control", "--set", "cost.local.lr=0.2")) == 0
    errors = capsys.readouterr().err
    assert "runs/small holds another run: " in errors
    assert "local.lr (0.1 there, 0.2 now)" in errors
    assert load_training(Path("runs/small-2/training")).config.local.lr == 0.2
