"""Distributions of counts under guessing, against enumeration and simulation."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from gradveil.core.noise import Key
from gradveil.metrics import risk, wilson
from gradveil.metrics.statistics import (
    added,
    beta_binomial,
    bootstrap_maximum,
    holm,
    matches,
    poisson_binomial,
    upper_tail,
)


def test_trials_of_their_own_probabilities_are_counted_exactly() -> None:
    chances = [0.1, 0.5, 0.9, 0.3]
    by_hand = np.zeros(5)
    for outcome in range(16):
        hits = [outcome >> place & 1 for place in range(4)]
        by_hand[sum(hits)] += np.prod([p if hit else 1 - p for p, hit in zip(chances, hits, strict=True)])
    assert poisson_binomial(chances) == pytest.approx(by_hand)
    assert added([poisson_binomial(chances[:2]), poisson_binomial(chances[2:])]) == pytest.approx(by_hand)
    assert upper_tail(by_hand.tolist(), 3) == pytest.approx(by_hand[3:].sum())


@pytest.mark.parametrize(("n", "share", "trials"), [(16, 0.0, 50), (32, 0.7, 50), (900, 0.3, 120)])
def test_a_share_of_few_images_leaves_more_room_than_a_known_probability(n: int, share: float, trials: int) -> None:
    mass = beta_binomial(n, share, trials)
    assert sum(mass) == pytest.approx(1, abs=1e-9)
    rng = np.random.default_rng(0)
    drawn = rng.binomial(n, rng.beta(share * trials + 0.5, (1 - share) * trials + 0.5, 200_000))
    for quantile in (0.5, 0.9, 0.99):
        least = int(np.quantile(drawn, quantile))
        assert upper_tail(mass, least) == pytest.approx(float((drawn >= least).mean()), abs=0.005)
    assert beta_binomial(n, share, 10**9) == pytest.approx(poisson_binomial([share] * n), abs=1e-4)


@pytest.mark.parametrize(("groups", "gallery"), [([1, 1, 1], 5), ([2, 1], 4), ([2, 2], 6), ([3, 1, 2], 6)])
def test_hits_of_guesses_are_counted_over_all_ways_to_deal_images(groups: list[int], gallery: int) -> None:
    owner = [group for group, size in enumerate(groups) for _ in range(size)]
    counts = np.zeros(len(owner) + 1)
    for dealt in permutations(range(gallery), len(owner)):
        # Place i was dealt to owner[i]; guess i of group owner[i] names gallery image i.
        counts[sum(image < len(owner) and owner[image] == owner[i] for i, image in enumerate(dealt))] += 1
    assert matches(tuple(groups), gallery) == pytest.approx(counts / counts.sum())


def test_holm_keeps_the_order_and_never_exceeds_one() -> None:
    assert holm([0.001, 0.2, 0.02]) == pytest.approx([0.003, 0.2, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_maximum_of_attackers_is_drawn_over_the_same_clients() -> None:
    rng = np.random.default_rng(0)
    one = (rng.random(40) < 0.3).astype(int).tolist()
    low, high = bootstrap_maximum([one], [1] * 40, Key(0))
    assert (low, high) == pytest.approx(wilson(sum(one), 40), abs=0.06)
    assert bootstrap_maximum([one, one], [1] * 40, Key(0)) == (low, high)
    other = one[::-1]
    both = bootstrap_maximum([one, other], [1] * 40, Key(0))
    assert both[0] > low
    assert both[1] >= high


def test_risk_is_anonymeters() -> None:
    """Figures of the specification: rates of 100, value and half-width."""
    for hits, control, value, spread in ((60, 0.2, 0.488, 0.130), (10, 0.08, 0.021, 0.088), (100, 0, 0.981, 0.019)):
        found = risk(hits, 100, control)
        assert found.value == pytest.approx(value, abs=6e-4)
        assert min(found.high, 1) == pytest.approx(min(value + spread, 1), abs=2e-3)
        assert found.low == pytest.approx(max(value - spread, 0), abs=2e-3)
    assert risk(0, 100, 0) == pytest.approx((0, 0, 0.027), abs=6e-4)
    assert risk(8, 8, 1.0).value == 0
