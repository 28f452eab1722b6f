"""Bounds of recovery: published closed forms, the privacy loss distribution, and attackers that reach them."""

import math
from statistics import NormalDist

import pytest
import torch

from gradveil.theory.accounting import Participation
from gradveil.theory.reconstruction_robustness import gaussian, laplace, pure, recovery_bound, renyi, unbiased_error

LAW = NormalDist()
ONE = Participation(steps=1)
SAMPLED = Participation(steps=30, rate=0.1)


@pytest.mark.parametrize(
    ("guess", "sigma", "training", "wanted"),
    [
        (0.1, 0.5, ONE, 0.763760),
        (0.1, 1, ONE, 0.389144),
        (0.01, 1, ONE, 0.092362),
        (1e-3, 1, ONE, 0.018298),
        (1e-6, 0.5, ONE, 0.002949),
        (0.1, 1, Participation(steps=1, rate=0.1), 0.12891),
        (0.01, 1, Participation(steps=1, rate=0.1), 0.01824),
        (0.1, 1, Participation(steps=100, rate=0.01), 0.12709),
        (0.01, 0.6, SAMPLED, 0.21637),
        (0.001, 2, Participation(steps=1000, rate=0.05), 0.01262),
    ],
)
def test_bound_has_the_tabulated_value(guess: float, sigma: float, training: Participation, wanted: float):
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    found = recovery_bound(guess, [(sigma, training)])
    assert found == pytest.approx(wanted, abs=1e-4)
    assert guess < found <= renyi(guess, [(sigma, training)])


@pytest.mark.parametrize(
    ("guess", "sigma", "wanted"), [(0.1, 0.5, 0.9894), (0.1, 1, 0.5186), (0.01, 1, 0.1261), (1e-3, 1, 0.0250)]
)
def test_renyi_bound_has_the_tabulated_value(guess: float, sigma: float, wanted: float):
    assert renyi(guess, [(sigma, ONE)]) == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("training", [ONE, SAMPLED, Participation(steps=300, rate=0.01)])
def test_renyi_bound_holds_for_hopeless_noise(training: Participation):
    assert 1e-3 < recovery_bound(1e-3, [(0.1, training)]) <= renyi(1e-3, [(0.1, training)])


def test_bound_is_the_power_of_the_best_test_in_ten_thousand_replays():
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    sigma, rate, steps = 0.6, SAMPLED.rate, SAMPLED.steps
    guess, count, random = 0.1, 10_000, torch.Generator().manual_seed(0)

    def losses(present: bool) -> torch.Tensor:
        drawn = sigma * torch.randn(count, steps, generator=random, dtype=torch.float64)
        drawn += (torch.rand(count, steps, generator=random) < rate).double() * present
        return torch.log1p(rate * torch.expm1((drawn - 0.5) / sigma**2)).sum(1)

    threshold = losses(False).quantile(1 - guess)
    power = float((losses(True) > threshold).double().mean())
    bound = recovery_bound(guess, [(sigma, SAMPLED)])
    assert power == pytest.approx(bound, abs=0.02)  # four standard errors of the power, and of the threshold


@pytest.mark.parametrize(
    "bound",
    [
        lambda k: recovery_bound(k, [(1.0, ONE)]),
        lambda k: recovery_bound(k, [(1.0, Participation(steps=1, rate=0.2))]),
        lambda k: recovery_bound(k, [(2.0, Participation(steps=20, rate=0.1))]),
        lambda k: recovery_bound(k, [(2.0, Participation(steps=20, rate=0.1, sampling="shuffled"))]),
        lambda k: laplace(k, 1.5),
        lambda k: pure(k, 1.5),
    ],
)
def test_bound_is_concave_and_above_the_guess(bound):
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    places = [i / 20 for i in range(21)]
    values = [bound(k) for k in places]
    assert (values[0], values[-1]) == (0, 1)
    assert all(value >= guess for value, guess in zip(values, places, strict=True))
    middles = zip(values, values[1:], values[2:], strict=False)
    assert all(centre >= (left + right) / 2 - 1e-4 for left, centre, right in middles)


def test_releases_add_up_and_noise_without_end_leaves_the_guess():
    assert recovery_bound(0.01, [(2.0, Participation(steps=16))]) == pytest.approx(recovery_bound(0.01, [(0.5, ONE)]))
    assert recovery_bound(0.01, [(1e6, ONE)]) == pytest.approx(0.01, abs=1e-6)
    assert recovery_bound(0.01, [(0.0, ONE)]) == 1
    parts = [(1.0, ONE), (0.5, Participation(steps=3))]
    assert recovery_bound(0.01, parts) == pytest.approx(gaussian(0.01, math.sqrt(13)))


def test_numerical_composition_matches_the_closed_form():
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    nearly = recovery_bound(0.1, [(2.0, Participation(steps=2, rate=1 - 1e-9))])
    assert nearly == pytest.approx(gaussian(0.1, math.sqrt(0.5)), abs=1e-4)


@pytest.mark.parametrize(("count", "sigma", "measured"), [(2, 1.0, 0.761), (10, 0.5, 0.674), (100, 0.3, 0.780)])
def test_likeliest_of_orthogonal_gradients_stays_below_the_bound(count: int, sigma: float, measured: float):
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(40_000, count, generator=generator) * sigma
    seen[:, 0] += 1
    rate = float((seen.argmax(1) == 0).double().mean())
    assert rate == pytest.approx(measured, abs=0.01)
    assert rate < recovery_bound(1 / count, [(sigma, ONE)])


def test_opposite_gradients_reach_the_bound():
    generator = torch.Generator().manual_seed(0)
    rate = float((1 + torch.randn(200_000, generator=generator) > 0).double().mean())
    assert recovery_bound(0.5, [(1.0, ONE)]) == pytest.approx(LAW.cdf(1.0))
    assert rate == pytest.approx(LAW.cdf(1.0), abs=4e-3)


def test_unbiased_attackers_have_the_printed_error():
    assert [round(unbiased_error(mu), 4) for mu in (0.5, 1.0)] == [0.1455, 0.0047]
    assert (unbiased_error(0.0), unbiased_error(1e3)) == (math.inf, 0.0)


def test_bound_of_unbiased_attackers_holds_where_two_values_of_an_example_are_two_clip_norms_apart():
    # Sent is +1 or -1 plus normal noise. The likelihood ratio, centred and scaled, is unbiased for both values.
    apart = 2.0
    least = 1 / math.expm1(apart**2)  # the variance of (ratio - 1) / (e^4 - 1) where the value is 0
    assert unbiased_error(1.0) <= least < 1 / (4 * math.expm1(1.0))
