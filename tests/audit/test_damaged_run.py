"""A damaged run directory: every file that is wrong is named with what to do, and resuming repairs what it may."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradveil.audit.run_directory import Run, load_run, read_images
from gradveil.cli.app import run as command
from gradveil.core.errors import GradveilError
from gradveil.core.private_files import DamagedError, seal
from tests.audit.runs import config, execute
from tests.audit.test_store import assert_same

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has happened to."""
    return execute(config(), tmp_path_factory.mktemp("whole") / "run")[0]


@pytest.fixture
def folder(tmp_path: Path, whole: Run) -> Path:
    """A copy of it, to be damaged."""
    assert whole.path is not None
    shutil.copytree(whole.path, tmp_path / "run")
    return tmp_path / "run"


def first(folder: Path) -> Path:
    return folder / "trials" / json.loads((folder / "run.json").read_text())["trials"][0]


def changed(name: str, change: Callable[[list[dict]], object]) -> Damage:
    """Change what a JSON file of a trial holds, within a list."""

    def damage(trial: Path) -> None:
        held = [json.loads((trial / name).read_text())]
        change(held)
        (trial / name).write_text(json.dumps(held[0]))

    return damage


def text(name: str, content: str) -> Damage:
    return lambda trial: (trial / name).write_text(content)


def cut(trial: Path) -> None:
    file = trial / "images.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def other_images(trial: Path) -> None:
    images = {name: torch.zeros(3, 1, 1, 16, 16) for name in ("truth", "reconstruction")}
    (trial / "images.safetensors").write_bytes(seal(images))


def no_reconstruction(trial: Path) -> None:
    (trial / "images.safetensors").write_bytes(seal({"truth": torch.zeros(2, 1, 1, 16, 16)}))


def no_digest(trial: Path) -> None:
    save_file(
        {name: torch.zeros(2, 1, 1, 16, 16) for name in ("truth", "reconstruction")}, trial / "images.safetensors"
    )


TRIALS: dict[str, tuple[Damage, str, str]] = {
    "a list": (text("trial.json", "[1]"), "trial.json", "is [1], not an object"),
    "an empty object": (text("trial.json", "{}"), "trial.json", "trial is missing; model is missing"),
    "half a trial": (text("trial.json", '{"trial": "a'), "trial.json", "is not valid JSON"),
    "bytes": (lambda trial: (trial / "trial.json").write_bytes(b"\xff\xfe"), "trial.json", "is not valid JSON"),
    "no trial": (lambda trial: (trial / "trial.json").unlink(), "trial.json", "is missing"),
    "no seed": (changed("trial.json", lambda held: held[0].pop("seed")), "trial.json", "seed is missing"),
    "a wrong kind": (
        changed("trial.json", lambda held: held[0].update(batch="x")),
        "trial.json",
        "batch is 'x', not a whole number",
    ),
    "a control without a rate": (
        changed("trial.json", lambda held: held[0].update(controls={"mean_image": {}})),
        "trial.json",
        "controls.mean_image.asr is missing",
    ),
    "no records": (lambda trial: (trial / "records.json").unlink(), "records.json", "is missing"),
    "empty records": (text("records.json", "[]"), "records.json", "is empty"),
    "half the records": (text("records.json", '[{"target_client": 0}'), "records.json", "is not valid JSON"),
    "no list": (text("records.json", '{"target_client": 0}'), "records.json", "is {'target_client': 0}, not a list"),
    "no objects": (text("records.json", "[1, 2]"), "records.json", "[0] is 1, not an object; [1] is 2, not an object"),
    "a score is missing": (
        changed("records.json", lambda held: held[0][1]["per_image"][0].pop("ssim")),
        "records.json",
        "[1].per_image[0].ssim is missing",
    ),
    "no images": (lambda trial: (trial / "images.safetensors").unlink(), "images.safetensors", "the run keeps images"),
    "half the images": (cut, "images.safetensors", "is damaged"),
    "no bytes": (lambda trial: (trial / "images.safetensors").write_bytes(b""), "images.safetensors", "is damaged"),
    "no digest": (no_digest, "images.safetensors", "holds no digest"),
    "other images": (other_images, "images.safetensors", "(3, 1) images 'truth', the records tell of (2, 1)"),
    "half the names": (no_reconstruction, "images.safetensors", "holds no images 'reconstruction'"),
}


@pytest.mark.parametrize("case", TRIALS)
def test_a_damaged_trial_is_named_and_resuming_makes_it_anew(
    folder: Path, whole: Run, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, file, said = TRIALS[case]
    damage(first(folder))
    for name in ("summary", "report"):
        assert command([name, str(folder)]) == 2
        out, err = capsys.readouterr()
        assert f"{first(folder) / file}: " in err
        assert said in err
        assert "give the command of the audit again" in err
        assert "Traceback" not in out + err
    _, display = execute(config(), folder)
    assert [said in problem.what for problem in display.damaged] == [True]
    assert [result.info["trial"] for result in display.finished] == [first(folder).name]
    assert_same(folder, whole.path)


def test_every_damaged_file_is_named_at_once(folder: Path) -> None:
    one, two = sorted((folder / "trials").iterdir())
    (one / "trial.json").write_text("{")
    (one / "records.json").unlink()
    (two / "records.json").write_text("[3]")
    cut(two)
    with pytest.raises(GradveilError) as caught:
        load_run(folder)
    assert {problem.where for problem in caught.value.problems} == {
        str(path / name)
        for path, name in (
            (one, "trial.json"),
            (one, "records.json"),
            (two, "records.json"),
            (two, "images.safetensors"),
        )
    }
    _, display = execute(config(), folder)
    assert (len(display.damaged), len(display.finished)) == (4, 2)


def test_a_trial_that_is_a_file_is_made_anew(folder: Path, whole: Run) -> None:
    trial = first(folder)
    shutil.rmtree(trial)
    trial.write_text("no folder")
    with pytest.raises(GradveilError, match=r"trial\.json: is missing"):
        load_run(folder)
    execute(config(), folder)
    assert_same(folder, whole.path)


def test_a_file_that_cannot_be_read_may_be_whole_and_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = first(folder)
    before, read = (trial / "records.json").read_bytes(), Path.read_bytes

    def refused(file: Path) -> bytes:
        if file == trial / "records.json":
            raise PermissionError(13, "Permission denied")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", refused)
    for attempt in (lambda: load_run(folder), lambda: execute(config(), folder)):
        with pytest.raises(GradveilError, match=r"records\.json: cannot be read: Permission denied"):
            attempt()
    monkeypatch.undo()
    assert (trial / "records.json").read_bytes() == before


RUNS = {
    "[]": "is [], not an object",
    "{}": "config is missing; trials is missing",
    "": "is not valid JSON",
    '{"format": 3, "config": {': "is not valid JSON",
    '{"format": 3, "config": {}, "trials": []}': "trials is empty",
    '{"format": 99}': "has format 99, this version reads 3",
    '{"format": 3, "config": [], "trials": [3]}': "config is [], not an object; trials[0] is 3, not a text",
}


@pytest.mark.parametrize("content", RUNS)
def test_without_its_settings_a_run_is_neither_read_nor_resumed(
    folder: Path, whole: Run, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.json").write_text(content)
    for name in ("summary", "report"):
        assert command([name, str(folder)]) == 2
        out, err = capsys.readouterr()
        assert f"{folder / 'run.json'}: {RUNS[content]}" in err
        assert "Traceback" not in out + err
    with pytest.raises(GradveilError, match=r"run\.json"):
        execute(config(), folder)
    assert len(list((folder / "trials").iterdir())) == 2
    execute(config(), folder, fresh=True)
    assert_same(folder, whole.path)


def test_trials_of_unknown_settings_are_not_taken_for_finished(folder: Path) -> None:
    (folder / "run.json").unlink()
    for fresh in (False, True):
        with pytest.raises(GradveilError, match=r"run\.json: is missing, .* of the 2 trials there"):
            execute(config(iterations=3), folder, fresh=fresh)
    assert len(list((folder / "trials").iterdir())) == 2


def test_a_run_without_its_division_is_neither_read_nor_resumed(folder: Path) -> None:
    info = json.loads((folder / "run.json").read_text())
    del info["share"]
    (folder / "run.json").write_text(json.dumps(info))
    for use in (lambda: load_run(folder), lambda: execute(config(), folder)):
        with pytest.raises(GradveilError, match=r"run\.json: share is missing"):
            use()


def test_images_damaged_after_the_run_was_read_are_named(folder: Path) -> None:
    run = load_run(folder)
    cut(first(folder))
    with pytest.raises(GradveilError, match="is damaged"):
        run.trials[0].images()


def test_no_flipped_bit_of_images_is_read_as_good(folder: Path) -> None:
    """Every byte of the header, and many of the images."""
    file, content = first(folder) / "images.safetensors", (first(folder) / "images.safetensors").read_bytes()
    draw = np.random.default_rng(0)
    size = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(size), *draw.integers(0, len(content), size=100)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(draw.integers(8))
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match="damaged"):
            read_images(file)


def test_scores_alone_are_whole_where_no_images_were_kept(tmp_path: Path) -> None:
    run, _ = execute(config(images=False), tmp_path / "run")
    _, display = execute(config(images=False), tmp_path / "run")
    assert (len(run.trials), display.finished, display.damaged) == (2, [], [])
