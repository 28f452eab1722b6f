"""Options of a model: what the run decides is no option, and a value of the wrong kind is told, not raised by torch."""

from __future__ import annotations

from typing import Any

import pytest

from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import read, resolve
from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from tests.audit.runs import config, settings

DECIDED = {"classes": 3, "channels": 1, "size": 16, "generator": 0, "name": "a"}


@pytest.mark.parametrize("model", ["lenet-zhu", "tests.nn.users_models:plain"])
def test_options_that_the_run_decides_are_refused_by_name(model: str) -> None:
    with pytest.raises(GradveilError) as caught:
        resolve(settings(model={"name": model, "options": {**DECIDED, "norm": "none"}}, target_clients=0))
    wanted = {f"model.options.{key}" for key in DECIDED}
    assert {problem.where for problem in caught.value.problems} == wanted | {"target_clients"}
    said = {problem.where: problem.what for problem in caught.value.problems}
    assert said["model.options.channels"] == "is no option: the data say it: set data.channels"


def test_options_that_the_run_decides_are_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GradveilError, match=r"model\.options\.classes: is no option"):
        read("faces", {}, ("model.options.classes=3",))
    assert run(["audit", "faces", "--set", "model.options.generator=3"]) == 2
    out, err = capsys.readouterr()
    assert "model.options.generator: is no option: initial weights are drawn" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": "x"}, "model.width: is 'x' -> give a whole number of at least 1, such as 64"),
        ({"width": 0}, "model.width: is 0 -> give a whole number of at least 1"),
        ({"width": 2.5}, "model.width: is 2.5 -> give a whole number"),
        ({"groups": True}, "model.groups: is True -> give a whole number"),
        ({"stem": ["cifar"]}, "model.stem: is .* -> give a string in quotes, such as 'imagenet'"),
        ({"stem": "oak"}, "model.stem: "),
    ],
)
def test_options_of_the_wrong_kind_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        open_experiment(config(model={"name": "resnet18", "options": options}))


def test_good_options_are_taken() -> None:
    experiment = open_experiment(config(model={"name": "resnet18", "options": {"width": 2, "stem": "cifar"}}))
    assert sum(p.numel() for p in experiment.model(0).parameters()) < 20_000
