"""Proven probabilities of recovery stand in the records, and no attack exceeds them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.attacks.protocol import Reconstruction
from gradveil.audit.baselines import Gallery
from gradveil.audit.error_bound import best_chances
from gradveil.audit.result_rows import Row, summarise
from gradveil.data import Dataset, load
from gradveil.metrics import wilson
from gradveil.nn import build
from gradveil.theory.reconstruction_robustness import gaussian
from tests.audit.runs import config, execute, legend

PRIVATE = ("dp(clip=1, sigma=4)", "fed-cdp(clip=1, sigma=4)", "user-dp(clip=1, sigma=4)")


def test_no_measured_rate_exceeds_its_bound(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    local = {"batch": 2, "local": {"epochs": 1, "batch": 1, "sampling": "poisson", "lr": 0.1}}
    for number, client in enumerate(({}, local)):
        chosen = config(defences=[*PRIVATE], attacks=["ig(iterations=2)"], client=client)
        found, _ = execute(chosen, tmp_path / f"{number}")
        rows = [Row(place, trial) for place, trial in enumerate(found.trials) if trial.failed is None]
        assert {row.defence for row in rows} == {*PRIVATE}
        for row in rows:
            limits = [each for each in row.info["recovery_bounds"] if each["of"] == "watched"]
            assert limits, row.defence
            for limit in limits:
                assert limit["guess"] <= limit["bound"] <= 1
                assert wilson(row.identifiable, row.images)[0] <= limit["bound"]
                assert row.bounds[0] <= limit["bound_recovered"]


@dataclass(frozen=True)
class InformedGuess:
    """The attacker of the bound: the likeliest of candidates whose clipped gradients it knows."""

    candidates: Tensor
    targets: Tensor
    gradients: Mapping[str, Tensor]
    name: str = "informed-guess"
    simulated_client: Literal["naive", "full"] = "naive"
    knowledge: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, observations: Any, simulated_client: Any, knowledge: Any, key: Any, *_: Any, **__: Any
    ) -> Reconstruction:
        names = observations[-1].update
        own = torch.cat([self.gradients[name].flatten(1) for name in names], 1)
        rounds = [torch.cat([each.update[name].flatten(1) for name in names], 1) for each in observations]
        seen = torch.stack(rounds).mean(0)
        apart = torch.cdist(seen / seen.norm(dim=1, keepdim=True).clamp(min=1), own)
        best = apart.argmin(1)
        return Reconstruction(self.candidates[best, None], self.targets[best, None], objective=apart.amin(1))


def informed(model: nn.Module, data: Dataset) -> InformedGuess:
    client = gradveil.Client(model)
    gradients = list[dict[str, Tensor]]()
    for place in range(len(data)):
        loss = client.loss(model(data.inputs[place : place + 1]), data.targets[place : place + 1]).mean()
        named = dict(model.named_parameters())
        each = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = torch.cat([value.flatten() for value in each.values()]).norm()
        gradients.append({name: value / norm.clamp(min=1) for name, value in each.items()})
    stacked = {name: torch.stack([each[name] for each in gradients]) for name in gradients[0]}
    return InformedGuess(data.inputs, data.targets, stacked)


@pytest.mark.parametrize(("sigma", "rounds"), [(0.4, 1), (0.5, 1), (1.0, 6)])
def test_no_guess_at_rows_exceeds_its_bound(sigma: float, rounds: int) -> None:
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    data = load("census")
    few, facts = data.private.subset(range(24)), data.public.space.model_facts()
    net = build("tabular-mlp", classes=2, generator=torch.Generator().manual_seed(0), example=facts)
    against = ["none", f"dp(clip=1, sigma={sigma})"]
    settings: dict[str, Any] = {"rounds": rounds, "server_lr": 0.0, "target_clients": 24}
    result = gradveil.audit(net, few, attacks=[informed(net, few)], defences=against, public=data.public, **settings)
    rows = {trial.info["defence"]: Row(place, trial) for place, trial in enumerate(result.trials)}
    assert rows["none"].identifiable > 20  # it works
    assert rows[against[1]].identifiable > 0
    within_its_bound(rows[against[1]])


def test_no_attack_on_sentences_exceeds_its_bound(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    chosen = config(
        data={"name": "reviews", "tokens": 8},
        model={"name": "small-encoder", "options": {"width": 48}},
        attacks=["span-rank"],
        defences=["none", "dp(clip=1, sigma=0.5)"],
        target_clients=4,
    )
    found, _ = execute(chosen, tmp_path / "run")
    rows = {trial.info["defence"]: Row(place, trial) for place, trial in enumerate(found.trials)}
    assert rows["none"].identifiable == 4  # it works
    within_its_bound(rows["dp(clip=1, sigma=0.5)"])


def within_its_bound(row: Row) -> None:
    (limit,) = [each for each in row.info["recovery_bounds"] if each["of"] == "watched"]
    assert 0.1 < limit["bound"] < 0.9
    assert wilson(row.identifiable, row.images)[0] <= limit["bound"]
    assert row.bounds[0] <= limit["bound_recovered"]


def test_bound_follows_noise_rounds_and_guess(tmp_path: Path) -> None:
    chosen = config(defences=["dp(clip=1, sigma=2)", "prune(0.9)"], rounds=4)
    found, _ = execute(chosen, tmp_path / "run")
    private, heuristic = sorted(found.trials, key=lambda trial: str(trial.info["defence"]))
    (limit,) = private.info["recovery_bounds"]
    assert (limit["unit"], limit["noise"], limit["releases"]) == ("example", 2, 4)
    assert limit["bound"] == pytest.approx(gaussian(limit["guess"], 1.0))
    assert limit["guess"] == pytest.approx(min(best_chances(private.records).values()))
    assert heuristic.info["recovery_bounds"] == []
    assert summarise(private)["recovery_bound"] == limit["bound"]
    assert summarise(heuristic)["recovery_bound"] is None
    assert "sigma 2, 4 releases" in legend(found.trials)
    assert json.loads(json.dumps(private.info["recovery_bounds"])) == private.info["recovery_bounds"]


def test_chance_of_a_guess_is_its_upper_end() -> None:
    image = {"expected": {"recovered": 0.0, "public": 100}}
    assert best_chances([{"per_image": [image]}])["recovered"] == pytest.approx(1 - (0.05 / 102) ** (1 / 100))
    assert best_chances([{"per_image": [{"expected": {"recovered": 1.0, "public": 0}}]}]) == {"recovered": 1.0}
    assert best_chances([{"per_image": [{}]}]) == {}


def test_attacker_who_knows_the_other_images_aims_all_guesses_at_one() -> None:
    gallery = Gallery(torch.arange(12.0).view(12, 1, 1, 1), torch.tensor([0] * 4 + [1] * 8))
    (two, _, _), (single,) = gallery.of_batch([0, 0, 1]), gallery.of_batch([1])
    assert two.aimed == 1.0  # three guesses, and three images of its class that may be it
    assert single.aimed == single.share == 1 / 8
    images = [
        {"expected": {"identified": 0.1, "aimed": aimed, "recovered": 0.5, "public": 100}} for aimed in (0.2, 0.3)
    ]
    records = [{"per_image": images}]
    assert best_chances(records)["identified"] == 0.3
    assert best_chances(records, "client")["identified"] == 0.1


def test_guess_at_a_client_is_that_of_the_easiest_client() -> None:
    clients = [{"per_image": [{"expected": {"identified": chance}}] * 2} for chance in (0.1, 0.5)]
    assert best_chances(clients, "client") == {"identified": 0.5}
