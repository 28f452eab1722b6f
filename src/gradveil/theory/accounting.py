"""Differential privacy accounting: epsilon for a noise multiplier and back, by the package dp-accounting.

A mechanism adds normal noise to a sum in which each unit (an example, or a client) has a vector of norm at most C. Its
*noise multiplier* is the standard deviation of the noise divided by C. The epsilon of many such sums at a given delta
follows from the multiplier, the number of sums, and the sampling of units. All results are upper bounds of epsilon,
under the assumptions that `assumptions` describes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.extras import needs
from gradveil.core.settings import Checked, Count, Kept, Range, collect
from gradveil.theory.loss_distribution import Sums, composed_loss

Accountant = Literal["pld", "rdp"]
"""Composition of privacy losses: by their distribution, or by Rényi divergences."""
Sampling = Literal["poisson", "shuffled"]
"""Selection of the examples of a step."""
Unit = Literal["example", "client"]
"""The privacy unit: what neighbouring data sets differ in."""

POSITIVE = Range(0, low_open=True)
"""Any number above zero."""
PROBABILITY = Range(0, 1, low_open=True, high_open=True)
"""A probability that is neither zero nor one."""
HOPELESS = 20.0
"""Epsilon above which `pld` returns the looser `rdp` bound: its grid of privacy losses would fill the memory, and e^20
protects nobody."""
_LIMITS = (1e-4, 1e6)
"""Search range of `multiplier`."""
_PRECISION = 1e-4
_NEAR = 0.8
"""Share of the multiplier of `rdp` that usually bounds that of `pld` from below."""
_LEAST = 1e-6
"""Smallest ratio of epsilon to its target, which keeps the logarithm finite."""


@dataclass(frozen=True)
class Participation(Checked):
    """How often a unit is part of a release, with the delta and accountant of the guarantee.

    With `poisson` sampling, each unit is in each of `steps` sums with probability `rate`, independently; neighbours
    differ by one unit added or removed (Abadi et al. 2016). With `shuffled` batches of fixed size, a unit is in one of
    floor(1 / rate) sums of each epoch; it is accounted once per epoch, *without* amplification by sampling, and
    neighbours differ by one unit replaced, which can change the sum by 2 C. The schedule must not depend on the data.
    """

    steps: Annotated[Count, "Noisy sums of the training."]
    rate: Annotated[Kept, "Probability that a unit is in a sum."] = 1.0
    delta: Annotated[float, PROBABILITY, "Delta of the guarantee."] = 1e-5
    sampling: Annotated[Sampling, "How the examples of a step are chosen."] = "poisson"
    accountant: Annotated[Accountant, "How privacy losses are composed."] = "pld"
    at_most: Annotated[int | None, Range(1, integer=True, optional=True)] = None
    """Most sums of `shuffled` batches with the same unit, if that does not follow from steps and rate."""
    label: ClassVar[str] = "privacy"

    @property
    def epochs(self) -> int:
        """Most sums of shuffled batches with the same unit.

        >>> Participation(steps=250, rate=0.01, sampling="shuffled").epochs
        3
        """
        # 1 / rate may come out a little below a whole number: 1 / (1 / 93) does.
        return self.at_most or math.ceil(self.steps / math.floor(1 / self.rate + 1e-9))


def epsilon(multiplier: float, training: Participation) -> float:
    """Return an upper bound of epsilon for a noise multiplier; infinite without noise.

    `rdp` uses the best order of Rényi divergence (Mironov 2017). `pld` composes privacy loss distributions numerically,
    rounded up (Koskela et al. 2020), and is nearly exact.
    """
    return composed([(multiplier, training)])


def composed(parts: Sequence[tuple[float, Participation]]) -> float:
    """Return an upper bound of epsilon for one or more (noise multiplier, training) pairs on the same units.

    All pairs must define neighbouring data alike: Poisson samples and shuffled batches do not compose.
    """
    kinds = [(training.delta, training.sampling, training.accountant) for _, training in parts]
    problems = collect("privacy", (("sigma", Range(0), noise) for noise, _ in parts))
    if len(set(kinds)) > 1:
        what = "differ in delta, sampling or accountant, so that no epsilon holds for all of them"
        problems.append(Problem("privacy", what, "account for each by itself"))
    refuse(problems)
    if not all(noise for noise, _ in parts):
        return math.inf
    loose = _epsilon(tuple(parts), "rdp")
    return loose if kinds[0][2] == "rdp" or loose > HOPELESS else _epsilon(tuple(parts), "pld")


def worst(noises: Iterable[tuple[float, Participation]]) -> tuple[float, float, Participation]:
    """Return the largest epsilon of several noise multipliers and trainings, and its multiplier and training.

    Pairs whose `rdp` bound is below the largest epsilon so far are skipped: hundreds of clients take a second or two.
    """
    loose = ((epsilon(noise, replace(training, accountant="rdp")), noise, training) for noise, training in set(noises))
    largest: tuple[float, float, Participation] | None = None
    for bound, noise, training in sorted(loose, key=lambda entry: -entry[0]):
        if largest is not None and bound <= largest[0]:
            break
        exact = min(bound, epsilon(noise, training))
        largest = (exact, noise, training) if largest is None or exact > largest[0] else largest
    assert largest is not None
    return largest


def multiplier(target: float, training: Participation) -> float:
    """Return the smallest noise multiplier whose epsilon is at most `target`, rounded up by at most 0.01%."""
    refuse(collect("privacy", [("epsilon", POSITIVE, target)]))
    low, high = _LIMITS
    if training.accountant == "pld" and target < HOPELESS:
        # The looser accountant is fast, and its multiplier is rarely much larger.
        loose = multiplier(target, replace(training, accountant="rdp"))
        low, high = (loose * _NEAR, loose) if epsilon(loose, training) <= target else (loose, high)
        low = low if epsilon(low, training) > target else _LIMITS[0]
    if epsilon(high, training) > target:
        what = f"{target:g} would need noise of more than {high:g} times the sensitivity"
        raise fail("privacy.epsilon", what, "raise epsilon or delta, or lower rate or steps")
    return _crossing(lambda noise: math.log(max(epsilon(noise, training) / target, _LEAST)), low, high)


def _crossing(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return the noise in [low, high] at which a falling function crosses zero, rounded up.

    Regula falsi in the logarithm of the noise, as epsilon is nearly a power of it. After two points in a row on one
    side, the other end's weight is halved (Dowell and Jarratt 1971, "Illinois").
    """
    above, below = excess(low), excess(high)
    last = 0
    while high > low * (1 + _PRECISION):
        width = math.log(high / low)
        margin = min(0.5, _PRECISION / 3 / width)
        # The share of the interval where a line between both values crosses zero, kept off its ends: otherwise one end
        # may hardly move, and the interval never gets narrow.
        share = above / (above - below) if math.isfinite(above) and above > below else 0.5
        middle = low * math.exp(width * min(max(share, margin), 1 - margin))
        value = excess(middle)
        if value > 0:
            low, above, below = middle, value, below / 2 if last > 0 else below
        else:
            high, below, above = middle, value, above / 2 if last < 0 else above
        last = 1 if value > 0 else -1
    return high


def assumptions(training: Participation, unit: Unit = "example") -> str:
    """Describe the assumptions of an epsilon of this training."""
    if training.sampling == "shuffled":
        times = f"at most {training.epochs} of {training.steps:,} sums" if training.steps > 1 else "the one sum"
        neighbours = f"neighbours differ by one {unit} replaced, as sums of a fixed size hold another one"
        return f"each {unit} is in {times}, no amplification by sampling; {neighbours}"
    share = "certainly" if training.rate == 1 else f"with probability {training.rate:g}, independently (Poisson)"
    sums = f"each of {training.steps:,} sums" if training.steps > 1 else "the one sum"
    return f"each {unit} is in {sums} {share}; neighbours differ by one {unit} added or removed"


@cache
def _epsilon(parts: tuple[tuple[float, Participation], ...], accountant: Accountant) -> float:
    releases, delta = tuple(_releases(parts)), parts[0][1].delta
    with needs("dp", "epsilon"):  # imported here, because it takes a second to load
        if accountant == "pld":
            return float(composed_loss(releases).get_epsilon_for_delta(delta))
        import dp_accounting  # pyright: ignore[reportMissingImports]
        from dp_accounting import rdp  # pyright: ignore[reportMissingImports]

    total = rdp.RdpAccountant()
    with _quiet():
        for noise, rate, count in releases:
            event = dp_accounting.GaussianDpEvent(noise)
            total.compose(event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event), count)
        return float(total.get_epsilon(delta))


def _releases(parts: Iterable[tuple[float, Participation]]) -> Iterator[Sums]:
    for noise, training in parts:
        if training.sampling == "shuffled":
            # Replacing a unit moves the sum by up to 2 C: relative to that the noise is half.
            yield noise / 2, 1.0, training.epochs
        else:
            yield noise, training.rate, training.steps


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about Rényi orders that the package skips: the bound holds without them."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
