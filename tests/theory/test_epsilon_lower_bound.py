"""Lower bounds of epsilon: published values, and never above the truth."""

import numpy as np
import pytest
import torch

from gradveil.theory.epsilon_lower_bound import from_guesses, from_scores


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "wanted"),
    [
        (100, 100, 100, 0.0, 3.49),
        (1000, 1000, 1000, 0.0, 5.81),
        (1000, 1000, 1000, 1e-5, 5.78),
        (1000, 100, 95, 0.0, 2.17),
        (10_000, 10_000, 10_000, 0.0, 8.11),
        (1000, 100, 50, 0.0, 0.0),
    ],
)
def test_one_run_bound_has_the_published_value(canaries: int, guesses: int, right: int, delta: float, wanted: float):
    assert from_guesses(canaries, guesses, right, delta) == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize(("sigma", "truth", "at_least"), [(0.5, 10.0, 9.3), (1.0, 4.38, 4.0), (2.0, 1.99, 1.7)])
def test_bound_from_scores_is_below_the_truth_and_near_it(sigma: float, truth: float, at_least: float):
    draws = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(1)) * sigma
    found = from_scores((draws[0] + 1).tolist(), draws[1].tolist(), 1e-5)
    assert at_least < found.best <= truth
    assert found.best == max(found.epsilon, found.gaussian or 0.0)


def test_scores_without_signal_bound_nothing():
    draws = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    assert from_scores(draws[0].tolist(), draws[1].tolist(), 1e-5).best == pytest.approx(0, abs=0.3)


def test_bound_for_normal_noise_is_no_bound_for_laplace_noise():
    random = np.random.default_rng(0)
    absent = random.laplace(0.0, 1.0, 20000)
    present = random.laplace(1.0, 1.0, 20000)  # epsilon 1, delta 0
    found = from_scores(list(present), list(absent), 1e-5)
    assert 0.8 < found.epsilon < 1 < (found.gaussian or 0)
    plain = from_scores(list(present), list(absent), 1e-5, normal=False)
    assert plain.gaussian is None
    assert 0.8 < plain.best == plain.epsilon < 1
