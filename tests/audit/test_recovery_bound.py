"""Proven probabilities of recovery stand in the records, and no attack exceeds them."""

import json
from pathlib import Path

import pytest
import torch

from gradveil.audit.baselines import Gallery
from gradveil.audit.error_bound import best_chances
from gradveil.audit.result_rows import Row, summarise
from gradveil.metrics import wilson
from gradveil.theory.reconstruction_robustness import gaussian
from tests.audit.runs import config, execute, legend

PRIVATE = ("dp(clip=1, sigma=4)", "fed-cdp(clip=1, sigma=4)", "user-dp(clip=1, sigma=4)")
WEAK = "dp(clip=1, sigma=0.5)"
ATTACKS = ["ig(iterations=10)", "cdia(iterations=10)", "dlg(iterations=3)", "learned(epochs=3, width=50, features=256)"]


def test_no_measured_rate_exceeds_its_bound(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    local = {"batch": 2, "local": {"epochs": 2, "batch": 1, "sampling": "poisson", "lr": 0.1}}
    for number, changes in enumerate(({"client": [{}]}, {"client": [local]}, {"rounds": 3})):
        chosen = config(
            defences=[*PRIVATE, WEAK], attacks=ATTACKS[:2] if number else ATTACKS, target_clients=6, **changes
        )
        found, _ = execute(chosen, tmp_path / f"run{number}")
        rows = [Row(place, trial) for place, trial in enumerate(found.trials) if trial.failed is None]
        assert {row.defence for row in rows} == {*PRIVATE, WEAK}
        for row in rows:
            limits = [each for each in row.info["recovery_bounds"] if each["of"] == "watched"]
            assert limits, row.defence
            for limit in limits:
                assert limit["guess"] <= limit["bound"] <= 1
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
