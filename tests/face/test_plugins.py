"""Names of installed packages: a package is a module and a dist-info directory on the path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradveil
from gradveil.attacks.attack_catalogue import ALL_ATTACKS, make_attack
from gradveil.cli.app import app
from gradveil.core.errors import GradveilError
from gradveil.defences import ALL_DEFENCES, entries, parse
from gradveil.nn.models import build

CODE = '''
"""What a package adds."""
from torch import nn
from gradveil.attacks import Adam, Descent, Inversion, StepSchedule
from gradveil.core import Stage, Transform

class Half(Transform):
    """Send a part of the update."""
    stage = Stage.QUANTISE
    def __init__(self, part=0.5):
        self.part = part
    def apply(self, update, state, noise, context):
        return {name: self.part * value for name, value in update.items()}, state

def patient():
    """Wait longer."""
    return Inversion("patient", descent=Descent(Adam(lr=0.1), StepSchedule(), iterations=7))

def contrast(candidate, truth):
    """Difference of the largest pixels."""
    return (candidate.amax((-3, -2, -1)) - truth.amax((-3, -2, -1))).abs()

def tiny(channels, size, classes, width=3):
    """One layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return what installs a package: its name, its entry points by group, and the code of its module."""
    made: list[str] = []

    def installed(package: str, points: Mapping[str, str], code: str = CODE) -> None:
        folder, module = tmp_path / package, package.replace("-", "_")
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"[gradveil.{group}]\n{line}\n" for group, line in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        made.append(module)

    yield installed
    for module in made:
        sys.modules.pop(module, None)


POINTS = {
    "metrics": "contrast = extra:contrast",
    "attacks": "patient = extra:patient",
    "defences": "half = extra:Half",
    "models": "tiny = extra:tiny",
}


def test_names_of_a_package_are_used_by_their_short_names(install: Install) -> None:
    install("extra", POINTS)
    assert "half" in ALL_DEFENCES
    assert "patient" in ALL_ATTACKS
    assert "extra" not in sys.modules
    defence = parse("half(part=0.25) + clip(2)")
    assert defence.name == "half(part=0.25) + clip(norm=2)"
    (half, _) = entries("half + clip(2)")
    assert half.changes == ("send",)
    attack = make_attack("patient(restarts=2)")
    assert (attack.name, attack.restarts, attack.descent.iterations) == ("patient(restarts=2)", 2, 7)
    model = build("tiny", channels=1, size=4, classes=3, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, nn.Sequential)


def test_a_metric_of_a_package_scores_a_run(install: Install) -> None:
    install("extra", POINTS)
    draw = torch.Generator().manual_seed(0)
    batch = torch.rand(2, 1, 12, 12, generator=draw), torch.tensor([0, 1])
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    settings = {"metrics": ["contrast", "ssim_rescaled"], "images": False, "target_clients": 1, "control": False}
    result = gradveil.audit(net, batch, attacks=["analytic"], progress=False, **settings)
    (row,) = result.summary()
    assert 0 <= row["contrast_mean"] < 1e-3
    assert row["ssim_rescaled_mean"] > 0.99
    with pytest.raises(GradveilError) as caught:
        gradveil.audit(net, batch, attacks=["analytic"], progress=False, **{**settings, "metrics": ["contrasts"]})
    (problem,) = caught.value.problems
    assert problem.remedy == "did you mean 'contrast'?"


def test_a_metric_that_goes_wrong_costs_its_own_score_alone(install: Install) -> None:
    code = """
def blank(candidate, truth):
    return candidate.mul_(0).sum((2, 3, 4))

def short(candidate, truth):
    return candidate.mean()

def broken(candidate, truth):
    raise OSError("no disk")
"""
    install("extra", {"metrics": "blank = extra:blank\nshort = extra:short\nbroken = extra:broken"}, code)
    draw = torch.Generator().manual_seed(0)
    batch = torch.rand(2, 1, 12, 12, generator=draw), torch.tensor([0, 1])
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    settings = {"images": False, "target_clients": 1, "control": False, "metrics": ["blank", "short", "broken"]}
    result = gradveil.audit(net, batch, attacks=["analytic"], progress=False, **settings)
    (row,) = result.summary()
    assert (row["asr"], row["blank_mean"]) == (1.0, 0.0)
    (trial,) = result.trials
    assert {"short", "broken"} <= trial.info["missing"].keys()


def test_a_list_names_the_package(install: Install) -> None:
    install("extra", POINTS)
    shown = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    for kind, name in (("attacks", "patient"), ("defences", "half"), ("models", "tiny")):
        (row,) = (row for row in shown[kind] if row["name"] == name)
        assert row["package"] == "extra"
        assert "(package extra)" in row["description"]


@pytest.mark.parametrize("name", ["half", "clip"])
def test_a_name_of_two_is_refused(install: Install, name: str) -> None:
    install("extra", {"defences": f"{name} = extra:Half"})
    if name == "half":
        install("other-extra", {"defences": "half = other_extra:Half"})
    with pytest.raises(GradveilError) as caught:
        parse(f"{name}(2)")
    (problem,) = caught.value.problems
    assert "extra" in problem.what
    assert ("gradveil itself" if name == "clip" else "other-extra") in problem.what
    assert "gradveil.defences" in problem.remedy
    assert "extra" not in sys.modules


def test_a_package_that_fails_to_import_is_a_warning_and_only_its_own_names_fail(install: Install) -> None:
    install(
        "broken", {"attacks": "bad = broken:attack", "defences": "worse = broken:Worse"}, "raise OSError('no disk')"
    )
    result = CliRunner().invoke(app, ["list", "attacks"])
    assert result.exit_code == 0
    assert "attack bad of the package broken" in result.stderr
    assert "defence worse of the package broken" in result.stderr
    assert "bad" not in result.stdout.split()
    assert make_attack("ig").name == "ig"
    with pytest.raises(GradveilError, match="broken"):
        make_attack("bad")
