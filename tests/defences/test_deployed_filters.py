"""The filters of NVFlare and Flower do what naive loops after their documentation do."""

import math

import numpy as np
import pytest
import torch

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences.deployed_filters import Percentile, SparseVector, svt_budget

SHAPES = {"a.weight": (20, 6), "b.bias": (80,)}
CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))


def normal(seed, shape):
    return torch.randn(shape, generator=Key(seed).generator(), dtype=torch.float64)


@pytest.fixture
def sent():
    return {name: 0.01 * normal(index, shape) for index, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize(("percentile", "gamma", "steps"), [(10, 0.01, 1), (63, 0.004, 3), (0, 1, 1), (100, 1, 1)])
def test_percentile_equals_a_naive_filter(sent, percentile, gamma, steps):
    flat = np.concatenate([value.numpy().ravel() / steps for value in sent.values()])
    cutoff = np.percentile(np.abs(flat), percentile)
    kept = np.where(np.abs(flat) < cutoff, 0, np.clip(flat, -gamma, gamma)) * steps
    result, _ = Percentile(percentile, gamma, steps).apply(sent, {}, {}, CONTEXT)
    np.testing.assert_allclose(np.concatenate([value.numpy().ravel() for value in result.values()]), kept, atol=1e-15)


def naive_svt(values, defence, random):
    """Ask again and again, as the filter is documented; return which entries are sent, and what."""
    budget = svt_budget(len(values), defence.fraction, defence.epsilon, defence.noise_var)
    cut = np.clip(values, -defence.gamma, defence.gamma)
    threshold = defence.tau + random.laplace(scale=defence.gamma / budget.threshold)
    left, accepted = np.arange(len(values)), []
    while len(accepted) < budget.sent:
        asked = np.abs(cut[left]) + random.laplace(scale=2 * defence.gamma * budget.sent / budget.query, size=len(left))
        accepted += left[asked >= threshold].tolist()
        left = left[asked < threshold]
    drawn = random.choice(accepted, size=budget.sent, replace=defence.replace)
    out = np.zeros_like(values)
    out[drawn] = cut[drawn] + random.laplace(scale=2 * defence.gamma / defence.noise_var, size=budget.sent)
    return out


@pytest.mark.parametrize("replace", [True, False])
def test_sparse_vector_sends_what_a_loop_sends_in_distribution(sent, replace):
    """With a large epsilon large entries are preferred: how often each half is sent, and how the values spread."""
    defence = SparseVector(fraction=0.2, epsilon=4000, noise_var=5, gamma=0.01, tau=0.008, replace=replace)
    flat = np.concatenate([value.numpy().ravel() for value in sent.values()])
    large, random, rounds = np.abs(flat) > np.median(np.abs(flat)), np.random.default_rng(0), 300
    spec, ours, theirs = defence.noise(sent), [], []
    for number in range(rounds):
        result, _ = defence.apply(sent, {}, spec.sample(Key(number)), CONTEXT)
        ours.append(np.concatenate([value.numpy().ravel() for value in result.values()]))
        theirs.append(naive_svt(flat, defence, random))
    rates = [[np.mean([each[part] != 0 for each in some]) for some in (ours, theirs)] for part in (large, ~large)]
    for rate, expected in rates:
        assert rate == pytest.approx(expected, abs=0.02)
    assert rates[0][0] > 1.5 * rates[1][0], "large entries are preferred"
    spread = [np.std(np.concatenate([each[each != 0] for each in some])) for some in (ours, theirs)]
    assert spread[0] == pytest.approx(spread[1], rel=0.05)


def test_sparse_vector_budget_grows_with_what_is_sent():
    budgets = [svt_budget(size, 0.1, 0.1, 0.1) for size in (10, 1000, 7_033_300)]
    assert [budget.sent for budget in budgets] == [1, 100, 703_330]
    assert all(math.isclose(budget.threshold + budget.query, 0.1) for budget in budgets)
    assert round(budgets[-1].total) == 70_333
