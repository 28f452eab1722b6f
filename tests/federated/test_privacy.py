"""What is proven of a training: epsilons that follow from what its clients do, and none for heuristics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradveil.audit.run_file import read_training
from gradveil.client import Local
from gradveil.defences.guarantees import NOTHING
from gradveil.federated.privacy_ledger import guarantee
from gradveil.theory.accounting import Participation, epsilon
from tests.federated.small_federations import federation
from tests.laws.cases import DOMAIN

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

DP = "dp(clip=1, sigma=16)"
DELTA = 1e-5


def proven(text: str = DP, rounds: int = 6, **settings: Any) -> dict[str, Any]:
    return guarantee(federation(text, **settings), rounds, DELTA)


def replaced(multiplier: float, times: int) -> float:
    """The epsilon of so many Gaussian mechanisms whose neighbours differ by two clip norms."""
    return epsilon(multiplier / 2, Participation(times))


def test_an_example_is_in_one_sum_of_each_epoch():
    assert proven()["epsilon"] == {"example": pytest.approx(replaced(16, 6))}
    twice = proven(local=Local(batch=5, lr=0.1, epochs=2))
    assert twice["epsilon"]["example"] == pytest.approx(replaced(16, 12))
    assert twice["delta"] == DELTA
    assert "at delta 1e-05 of each example" in twice["guarantee"]


def test_steps_that_begin_another_epoch_count_as_one():
    """Twenty examples in batches of five are four steps; the fifth begins another epoch in every round."""
    told = proven(local=Local(batch=5, lr=0.1, steps=5), clients=1)
    assert told["epsilon"]["example"] == pytest.approx(replaced(16, 12))
    assert "at most 12 of 30 sums" in told["guarantee"]


def test_poisson_sampling_amplifies_and_the_client_with_the_fewest_examples_is_told():
    told = proven(local=Local(batch=5, lr=0.1, steps=4, sampling="poisson"))
    assert told["epsilon"]["example"] == pytest.approx(epsilon(16.0, Participation(24, rate=5 / 20)))
    assert told["epsilon"]["example"] < proven(local=Local(batch=5, lr=0.1, steps=4))["epsilon"]["example"]


def test_one_gradient_a_round_is_one_sum():
    for batch in (None, 7):
        assert proven(local=None, batch=batch)["epsilon"]["example"] == pytest.approx(replaced(16, 6))


def test_the_client_who_answers_most_often_is_told():
    experiment = federation(DP, participation=0.5, absent=0.3)
    often = max(sum(client in experiment.chosen(number)[0] for number in range(1, 13)) for client in range(4))
    assert 0 < often < 12
    assert guarantee(experiment, 12, DELTA)["epsilon"]["example"] == pytest.approx(replaced(16, often))


def test_what_voids_the_examples_privacy_leaves_the_clients():
    experiment = federation("dp(clip=1, sigma=16) + user-dp(clip=1, sigma=24) + mixup")
    told = guarantee(replace(experiment, client=replace(experiment.client, domain=DOMAIN)), 6, DELTA)
    assert told["epsilon"] == {"client": pytest.approx(replaced(24, 6))}
    assert told["guarantee"].startswith("epsilon")
    assert f"; {NOTHING} of each example: examples are mixed" in told["guarantee"]


def test_a_client_is_promised_the_noise_of_its_own_update():
    assert proven("user-dp(clip=1, sigma=24)")["epsilon"] == {"client": pytest.approx(replaced(24, 6))}
    both = proven("dp(clip=1, sigma=16) + user-dp(clip=1, sigma=24)")["epsilon"]
    assert both == {"example": pytest.approx(replaced(16, 6)), "client": pytest.approx(replaced(24, 6))}


@pytest.mark.parametrize("text", ["none", "prune(0.5)", "gaussian(0.1)", "clip(1)", "topk(0.1, feedback=true)"])
def test_a_heuristic_has_no_epsilon(text: str):
    assert proven(text) == {"guarantee": NOTHING, "epsilon": {}, "delta": None}


def test_what_voids_the_guarantee_is_told_and_leaves_no_epsilon():
    told = proven("dp(clip=1, sigma=16) + optimal-noise(0.1)", local=None)
    assert told["guarantee"].startswith(f"{NOTHING}: 'noise' uses the data again")
    assert told["epsilon"] == {}


def test_delta_is_told_and_leaves_the_training_as_it_is():
    plain, other = (read_training("digits", {}, extra) for extra in ((), ("delta=1e-7",)))
    assert (plain.delta, other.delta) == (1e-5, 1e-7)
    assert plain.digest() == other.digest()


@pytest.mark.parametrize(("text", "few", "unit"), [(DP, 23, "example"), ("user-dp(clip=1, sigma=24)", 4, "client")])
def test_a_delta_that_allows_publishing_one_of_them_is_told(text: str, few: int, unit: str):
    """The largest of the four clients has 23 examples."""
    told = f"delta is not below one over {few} {unit}s"
    assert told in guarantee(federation(text), 2, 1 / few)["guarantee"]
    assert told not in guarantee(federation(text), 2, 0.99 / few)["guarantee"]
