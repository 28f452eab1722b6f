"""The bound in an audit: known in closed form for a linear model and normal images, and respected by its attackers."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import ATTACKS as CATALOGUE
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.protocol import Active
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_run import finish
from gradveil.audit.error_bound import leaked, mse_bound
from gradveil.audit.experiment import Experiment
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import summarise
from gradveil.audit.trial import recover
from gradveil.cli.app import run
from gradveil.cli.privacy_commands import _rows
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import Dataset
from gradveil.defences import parse
from gradveil.report import audit_page
from gradveil.theory.reconstruction_bound import rate_bound, spectrum
from tests.audit.runs import config, execute
from tests.audit.test_trial import Recorder

SIDE, SPREAD, STD, TARGET_CLIENTS = 11, 0.1, 0.4, 50


def images(count: int, key: str) -> Dataset:
    """White normal images around grey, five deviations inside black and white."""
    drawn = torch.randn(count, 1, SIDE, SIDE, generator=Key(0, (key,)).generator())
    pixels = (0.5 + SPREAD * drawn).clamp(0, 1)
    return Dataset("white", (pixels - 0.5) / 0.25, torch.zeros(count, dtype=torch.long), ("a", "b"), (0.5,), (0.25,))


def linear(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient is the input itself, in the row of its class."""
    if targets.is_floating_point():  # as soft labels, which some attackers search for
        return (outputs * targets).sum(-1)
    return outputs.gather(-1, targets[..., None]).squeeze(-1)


class Reader(Recorder):
    """Knows how the gradient was made: reads the images off it, and draws them towards the mean by `weight`."""

    weight: float = 1.0

    def __call__(self, observations, *rest: Any):
        found = super().__call__(observations, *rest)
        read = torch.stack([seen.update["1.weight"][:, 0] for seen in observations]).mean(0)
        inputs = self.weight * read.reshape(len(read), 1, 1, SIDE, SIDE).expand_as(found.inputs)
        return dataclasses.replace(found, inputs=inputs)


def reader(weight: float) -> Reader:
    found = Reader()
    found.weight = weight
    return found


@cache
def experiment(defence: str, bias: bool, weight: float, batch: int, rounds: int) -> Experiment:
    """The linear model. The gradient of its bias says nothing of the image, and nor do its weights."""
    chosen = config(
        defences=[defence], target_clients=TARGET_CLIENTS, attacks=["ig"], client={"batch": batch}, rounds=rounds
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2, bias=bias))
    for parameter in net.parameters():
        nn.init.constant_(parameter, weight)
    data = images(TARGET_CLIENTS * batch, "target_clients"), images(4000, "public")
    return Experiment(chosen, *data, lambda seed: copy.deepcopy(net), {defence: parse(defence)}, ATTACKERS, linear)


def audited(
    attack: str,
    defence: str = f"gaussian({STD})",
    bias: bool = False,
    weight: float = 0.0,
    batch: int = 1,
    rounds: int = 1,
) -> dict[str, Any]:
    opened = experiment(defence, bias, weight, batch, rounds)
    trial = dataclasses.replace(trials(opened.config)[0], attack=attack)
    shares = [range(TARGET_CLIENTS // 2), range(TARGET_CLIENTS // 2, TARGET_CLIENTS)]
    found = finish(opened, trial, [recover(opened, trial, numbers, lambda step: None) for numbers in shares])
    assert found.failed is None, found.failed
    error = sum(record["mse"] for record in found.records) / TARGET_CLIENTS
    return {**(found.info["bound"] or {}), "measured": error, "why": found.info["unbounded"]}


def closed_form(rounds: int = 1) -> float:
    """Posterior variance of a pixel, of which the model sees four times as much."""
    return 1 / (1 / SPREAD**2 + rounds / (STD / 4) ** 2)


def shrinking(rounds: int = 1) -> float:
    """The weight of the best estimate there is."""
    return (4 * SPREAD) ** 2 / ((4 * SPREAD) ** 2 + STD**2 / rounds)


FREE = "ig(iterations=150, objective=l2, tv=0, sign=plain, start=uniform"
SHORT = {
    "learned": "learned(epochs=1, width=32)",
    "analytic": "analytic",
    "r-gap": "r-gap",
    "wiig": "wiig(iterations=60)",
    "grnn": "grnn(iterations=6, width=1)",
    "gias": "gias(iterations=6, restarts=1, width=1, lessons=9)",
    "ggl": "ggl(iterations=4, population=4, width=1, lessons=9)",
    **{name: f"{name}(iterations=6, restarts=1)" for name in ("dlg", "idlg", "sapag")},
}
TOLD_THE_NOISE = {"wiig"}
CURIOUS = [
    name
    for name, entry in CATALOGUE.items()
    if not isinstance(entry.make(), Active) and getattr(entry.make(), "needs", "") != "tokens" and name != "unmix"
]
"""All but those of texts and `unmix`, which is for batches: these clients have one image."""


@pytest.mark.parametrize(
    ("attack", "reaches"),
    [
        ("posterior mean", True),
        ("least squares", False),
        ("mean image", False),
        ("l2", False),
        ("l2 with prior", None),
        ("cosine", False),
        ("long dlg", False),
    ],
)
def test_linear_normal_model_has_its_closed_form_and_attackers_respect_it(attack: str, reaches: bool | None) -> None:
    found = audited(attack)
    assert found["mse"] == pytest.approx(closed_form(), rel=0.02)
    assert found["by"] == "Cramér-Rao"
    assert found["prior"] == pytest.approx(SPREAD**2, rel=0.02)
    assert found["measured"] > 0.95 * found["mse"]  # 50 clients: a standard error of 1.8%
    if reaches is not None:
        assert (found["measured"] < 1.05 * found["mse"]) == reaches


# The gradient of this model is the same at all parameters: `sme` has nothing to look for between them.
@pytest.mark.parametrize("name", [*(name for name in CURIOUS if name != "sme"), "analytic(prior=public)"])
def test_every_attack_respects_it_but_one_who_is_told_the_noise(name: str) -> None:
    """Who is told what was added subtracts it: the bound is of those who are not, and is not low by chance."""
    found = audited(name, bias=name.startswith("analytic"))
    assert found["mse"] == pytest.approx(closed_form(), rel=0.02)
    if name in TOLD_THE_NOISE:
        assert found["measured"] < 0.8 * found["mse"]
    else:
        assert found["measured"] > 0.95 * found["mse"]  # 50 clients: a standard error of 1.8%


@pytest.mark.parametrize("text", ["rob(sparse=true, gain=0.01)", "curious"])
@pytest.mark.parametrize("std", [0.001, STD])
def test_who_changes_the_model_respects_the_bound_of_that_model(text: str, std: float) -> None:
    """Which is lower than the honest model's: a block shows of an image as much as the server wants."""
    found = audited(text, f"gaussian({std})", weight=1.0)
    honest = 1 / (1 / SPREAD**2 + 1 / (std / 4) ** 2)
    assert found["measured"] >= 0.97 * found["mse"]
    assert found["measured"] < 0.5 * honest, "who leaves the model as it is could not have got this near"


FITTED = f"optimal-noise({STD}, form=global, probes=8, batches=8)"


def spreads() -> Tensor:
    """Deviations of the noise on each pixel's entry: nearly equal, as white images have white gradients."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2, bias=False))
    public = images(4000, "public")
    domain = Domain(public.space, 2, public.inputs, public.targets)
    client = parse(FITTED)(Client(net, linear, domain=domain))
    params, first = client.params(), Batch(public.inputs[:1], public.targets[:1])
    spec = client.noise_spec(params, first)
    ones = {n: torch.ones(noise.shape) if ".normal." in n else noise.off() for n, noise in spec.items()}
    noisy, plain = (client.update(params, first, own, {})[0]["1.weight"] for own in (ones, spec.neutral()))
    return (noisy - plain)[0]


class Weighing(Reader):
    """Knows the law of the images and, as the server does, what noise each entry got."""

    def __call__(self, observations, *rest: Any):
        found = super().__call__(observations, *rest)
        weight = (4 * SPREAD) ** 2 / ((4 * SPREAD) ** 2 + spreads().square())
        return dataclasses.replace(found, inputs=found.inputs * weight.reshape(SIDE, SIDE))


ATTACKERS: dict[str, Any] = {
    "posterior mean": reader(shrinking()),
    "posterior mean of three rounds": reader(shrinking(3)),
    "posterior mean of fitted noise": Weighing(),
    "least squares": reader(1.0),
    "mean image": reader(0.0),
    "l2": make_attack(f"{FREE})"),
    "l2 with prior": make_attack(f"{FREE}, l2=1)"),
    "cosine": make_attack("ig(iterations=150)"),
    "long dlg": make_attack("dlg(iterations=20, restarts=1, labels=given)"),
    **{name: make_attack(SHORT.get(name, f"{name}(iterations=12)")) for name in CURIOUS},
    **{name: make_attack(name) for name in ("analytic(prior=public)", "rob(sparse=true, gain=0.01)", "curious")},
}


@pytest.mark.parametrize(("attack", "reaches"), [("posterior mean of fitted noise", True), ("least squares", False)])
def test_noise_that_is_fitted_to_public_images_has_a_bound(attack: str, reaches: bool) -> None:
    found = audited(attack, FITTED)
    best = float((1 / (1 / SPREAD**2 + 16 / spreads().square())).mean())
    assert found["why"] is None
    assert found["by"] == "Cramér-Rao"
    assert 0.9 * best < found["mse"] < 1.005 * best
    assert found["measured"] > 0.95 * found["mse"]  # 50 clients: a standard error of 1.8%
    assert (found["measured"] < 1.12 * found["mse"]) == reaches


def test_the_command_knows_the_bound_of_fitted_noise(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bound", "faces", "--set", "model.name=lenet-zhu", "--set", "model.options={}", "--set", "data.size=16"]
    words += [w for std in (0.003, 0.03) for w in ("--defence", f"optimal-noise({std}, form=global, batches=3)")]
    assert run([*words, "--target-clients", "2", "--defence", "optimal-noise(0.03)", "--json"]) == 0
    weak, strong, local = json.loads(capsys.readouterr().out)
    assert 0 < weak["mse_bound"] < strong["mse_bound"] < strong["mse_prior"]
    assert local["mse_bound"] is None


def test_every_round_that_is_watched_tells_more() -> None:
    found = audited("posterior mean of three rounds", rounds=3)
    assert found["mse"] == pytest.approx(closed_form(3), rel=0.02)
    assert found["measured"] == pytest.approx(closed_form(3), rel=0.05)


def test_the_images_of_a_batch_hide_each_other() -> None:
    """Of two images only the mean is seen: half of the directions tell nothing, and each image has its own prior."""
    found = audited("mean image", batch=2)
    assert found["mse"] == pytest.approx(1 / (1 / SPREAD**2 + (4 / STD) ** 2 / 4), rel=0.02)
    assert found["mse"] < (SPREAD**2 + 1 / (1 / SPREAD**2 + (4 / STD) ** 2 / 2)) / 2


def test_nats_of_a_batch_are_shared_by_its_images() -> None:
    experiment = open_experiment(config())
    assert experiment.public is not None
    told = {"information": torch.full((2, 3), torch.nan), "nats": torch.tensor([10.0, 30.0]).double()}
    found = mse_bound(experiment, told, 2)
    wanted = rate_bound(spectrum(experiment.public.views).variances, torch.tensor(10.0).double())
    assert found["mse"] == pytest.approx(float(wanted))
    assert found["by"] == "mutual information"


def test_without_a_bound_the_reason_is_told() -> None:
    found = audited("least squares", "prune(0.5)")
    assert found["why"].startswith("no noise is added")
    assert "mse" not in found


def test_where_gradients_jump_mutual_information_bounds_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own network has ReLU."""
    defences = [word for text in ("dp(clip=1, sigma=0.3)", "laplace(0.1)") for word in ("--defence", text)]
    assert run(["bound", "faces", "--target-clients", "1", *defences, "--json"]) == 0
    for found in json.loads(capsys.readouterr().out):
        assert found["by"] == "mutual information"
        assert 0 < found["mse_bound"] < found["mse_prior"]


def test_the_report_and_the_summary_tell_it(tmp_path: Path) -> None:
    defences = ["none", "gaussian(0.1)", "dp(clip=1, sigma=1)", "prune(0.9)"]
    chosen = config(attacks=["ig(iterations=2)"], defences=defences, client={"batch": 2})
    found, _ = execute(chosen, tmp_path / "run")
    told = {trial.info["defence"]: summarise(trial)["mse_bound"] for trial in found.trials}
    assert [name for name, value in told.items() if value] == defences[1:3]
    assert 0 < told["gaussian(0.1)"] < told["dp(clip=1, sigma=1)"]
    html = audit_page(found)
    assert html.count("Every attacker's mean squared error is at least") == 2
    assert html.count(">MSE bound<") == 1 + len(defences)


def test_updates_that_nobody_changed_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = list[Any]()

    def counted(*given: Any) -> Any:
        measured.append(given)
        return leaked(*given)

    monkeypatch.setattr(sys.modules[recover.__module__], "leaked", counted)
    attacks = ["ig(iterations=1)", "dlg(iterations=1)", "rob"]
    execute(config(attacks=attacks, defences=["gaussian(0.1)"]), tmp_path / "run")
    assert len(measured) == 2


def test_noise_that_proves_nothing_is_not_given_a_number(tmp_path: Path) -> None:
    found, _ = execute(config(attacks=["ig(iterations=2)"], defences=["none", "gaussian(1e-6)"]), tmp_path / "run")
    html = audit_page(found)
    assert "Noise this small proves nothing" in html
    assert "mean squared error is at least" not in html


def test_the_command_tells_the_utilities_that_an_audit_measures(tmp_path: Path) -> None:
    """Of the same updates: `gradveil bound` draws what an audit would."""
    chosen = config(attacks=["ig(iterations=2)"], defences=["none", "gaussian(0.1)", "prune(0.9)"], rounds=2)
    found, _ = execute(chosen, tmp_path / "run")
    measured = {trial.info["defence"]: summarise(trial) for trial in found.trials}
    rows = {row["defence"]: row for row in _rows(open_experiment(chosen))}
    keys = ("first_order_utility", "second_order_utility")
    for name, row in rows.items():
        assert [row[key] for key in keys] == pytest.approx([measured[name][key] for key in keys], rel=1e-4), name
    assert [rows["none"][key] for key in keys] == pytest.approx([1, -1], rel=1e-4)
    assert rows["prune(0.9)"]["first_order_utility"] < 0.99


def test_the_command_tells_it_and_attacks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inversion, "__call__", lambda *_: pytest.fail("attacked"))
    monkeypatch.chdir(tmp_path)
    words = ["bound", "faces", "--set", "model.name=lenet-zhu", "--set", "model.options={}", "--set", "data.size=16"]
    words += ["--target-clients", "2", "--defence", "gaussian(0.1)", "--defence", "gaussian(0.3)", "--defence", "none"]
    assert run([*words, "--json"]) == 0
    weak, strong, none = json.loads(capsys.readouterr().out)
    assert 0 < weak["mse_bound"] < strong["mse_bound"] < strong["mse_prior"]
    assert none["mse_bound"] is None
    assert none["unbounded"].startswith("no noise is added")
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "MSE bound" in out
    assert "gaussian(0.3)" in out
    assert "2nd order" in out
    assert list(tmp_path.iterdir()) == []
