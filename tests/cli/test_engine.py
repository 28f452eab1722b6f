"""`--engine` and `--address`: what does not go together is refused at once, and a missing Ray names its extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradveil.cli.app import run
from gradveil.cli.shared_options import Engine, Place
from gradveil.core.errors import GradveilError
from gradveil.runs.pool import Processes
from gradveil.runs.ray_pool import Cluster
from gradveil.runs.task import Site, in_process
from tests.cli.small_run import RUN

SITE = Site("package.module:function", {})


def problems(place: Place, workers: int | None = 2, recording: bool = False) -> list[str]:
    with pytest.raises(GradveilError) as error:
        place.check(workers, recording)
    return [problem.where for problem in error.value.problems]


def test_every_engine_gives_its_schedule() -> None:
    assert Place(Engine.processes, None, "cpu").schedule(1)(SITE) is in_process
    assert Place(Engine.processes, None, "cpu").schedule(3, 2)(SITE) == Processes(SITE, 3, 2)
    assert Place(Engine.ray, None, "cpu").schedule(1)(SITE) == Cluster(SITE, 1)
    assert Place(Engine.ray, "auto", "cuda").schedule(4)(SITE) == Cluster(SITE, 4, 1, "auto", gpus=1)


def test_contradicting_options_are_rejected_together() -> None:
    Place(Engine.ray, None, "cpu").check(None)
    Place(Engine.ray, "10.0.0.1:6379", "cuda").check(8)
    Place(Engine.processes, None, "cuda:1").check(None, recording=True)
    assert problems(Place(Engine.processes, "auto", "cpu"), None) == ["--address", "--workers"]
    assert problems(Place(Engine.ray, "ray://10.0.0.1:10001", "cpu")) == ["--address"]
    assert problems(Place(Engine.ray, "auto", "cuda:1"), 2, recording=True) == ["--record", "--device"]


@pytest.mark.parametrize("command", ["audit", "train"])
def test_a_missing_ray_names_its_extra(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    name = "small.toml" if command == "audit" else "digits"
    assert run([command, name, "--engine", "ray", "--workers", "1"]) == 2
    assert "--engine ray: the package 'ray' is not installed" in capsys.readouterr().err
    assert run([command, name, "--address", "auto"]) == 2
    err = capsys.readouterr().err
    assert "--address: is of a Ray cluster" in err
    assert "--workers: is missing" in err
