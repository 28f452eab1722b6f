"""Rates with intervals, exact tests against chance, corrections for many tests, and the bootstrap of a maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key


class Rate(NamedTuple):
    """A share of target clients with its interval."""

    successes: int
    n: int
    rate: float
    low: float
    high: float


def wilson(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the Wilson score interval of a binomial share (E. B. Wilson, 1927), without continuity correction.

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half-width z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2).

    >>> [round(bound, 3) for bound in wilson(31, 32)]
    [0.843, 0.994]
    """
    problems = []
    if n < 1:
        problems.append(Problem("n", f"is {n}", "an interval needs at least one target client"))
    elif not 0 <= successes <= n:
        problems.append(Problem("successes", f"are {successes} of {n}", "count between 0 and n"))
    if not 0 < confidence < 1:
        problems.append(Problem("confidence", f"is {confidence}", "give a number between 0 and 1, say 0.95"))
    refuse(problems)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, scale = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding would leave 1e-17 at the ends.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


class Risk(NamedTuple):
    """The excess of an attack's success rate over its control, relative to the largest excess, with 95% interval."""

    value: float
    low: float
    high: float


def risk(successes: int, n: int, control: float) -> Risk:
    """Compute (a - c) / (1 - c) for an attack's rate a and the rate c of a control (Anonymeter, 2023).

    Both rates are Wilson centres of `n` images, with Wilson's half-widths as their errors. The result is clamped to
    [0, 1].

    >>> [round(each, 3) for each in risk(60, 100, 0.2)]
    [0.488, 0.359, 0.618]
    """
    (a, spread), (c, error) = (_centre(count, n) for count in (float(successes), control * n))
    # Propagation of independent errors: the derivatives are 1 / (1 - c) by a, and -(1 - a) / (1 - c)^2 by c.
    half = math.hypot(spread / (1 - c), error * (1 - a) / (1 - c) ** 2)
    value = (a - c) / (1 - c)
    return Risk(*(min(1.0, max(0.0, each)) for each in (value, value - half, value + half)))


def _centre(successes: float, n: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.975)
    half = z / (n + z * z) * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return (successes + z * z / 2) / (n + z * z), half


def asr(ssim: Tensor, threshold: float = 0.5, confidence: float = 0.95) -> Rate:
    """Compute the attack success rate: the share of images whose SSIM is above the threshold, with Wilson's interval.

    NaN counts as a failed attack. The interval treats images as independent; those of one batch are not exactly.
    """
    successes, n = int((ssim > threshold).sum()), ssim.numel()
    low, high = wilson(successes, n, confidence)
    return Rate(successes, n, successes / n, low, high)


def poisson_binomial(probabilities: Iterable[float]) -> tuple[float, ...]:
    """Compute the distribution of the number of successes in independent trials with these probabilities.

    >>> poisson_binomial([0.5, 0.5]), poisson_binomial([])
    ((0.25, 0.5, 0.25), (1.0,))
    """
    mass = [1.0]
    for chance in probabilities:
        missed = [*(share * (1 - chance) for share in mass), 0.0]
        mass = [left + one * chance for left, one in zip(missed, [0.0, *mass], strict=True)]
    return tuple(mass)


@lru_cache(maxsize=4096)
def beta_binomial(n: int, share: float, trials: int | None) -> tuple[float, ...]:
    """Compute the distribution of the successes in `n` trials whose probability was estimated from `trials` others.

    The probability has Jeffreys' posterior, Beta(k + 1/2, trials - k + 1/2) with k = share * trials. With None it is
    exactly `share` (the binomial distribution).

    >>> beta_binomial(2, 0.5, None), [round(mass, 3) for mass in beta_binomial(1, 0.0, 4)]
    ((0.25, 0.5, 0.25), [0.9, 0.1])
    """
    if trials is None:
        return poisson_binomial([share] * n)
    a, b = share * trials + 0.5, (1 - share) * trials + 0.5
    # C(n, k) = 1 / ((n + 1) B(k + 1, n - k + 1)), in logarithms: it overflows otherwise.
    whole = _log_beta(a, b) + math.log(n + 1)
    return tuple(math.exp(_log_beta(a + k, b + n - k) - _log_beta(k + 1, n - k + 1) - whole) for k in range(n + 1))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@lru_cache(maxsize=4096)
def matches(groups: tuple[int, ...], gallery: int) -> tuple[float, ...]:
    """Compute the distribution of the number of hits when groups guess the gallery images dealt to them at random.

    Groups of these sizes get different images of a gallery, and each makes as many different guesses. For groups of one
    the hits are the fixed points of a random injection. With the rook number r_j of the boards of groups and guesses
    (the number of ways to choose j compatible hits), P[K >= k] is the sum over j >= k of
    (-1)^(j - k) C(j - 1, k - 1) r_j (gallery - j)! / gallery! (I. Kaplansky and J. Riordan, 1946).

    >>> matches((1, 1), 2), matches((2,), 2), [round(mass, 3) for mass in matches((1, 1, 1), 3)]
    ((0.5, 0.0, 0.5), (0.0, 0.0, 1.0), [0.333, 0.5, 0.0, 0.167])
    """
    rooks = [1]
    for size in groups:
        # A full board of `size` x `size`: choose j rows and j columns, and pair them. Boards of groups multiply.
        board = [math.comb(size, j) ** 2 * math.factorial(j) for j in range(size + 1)]
        rooks = _product(rooks, board)
    n = len(rooks) - 1
    ways = [rook * math.perm(gallery - j, n - j) for j, rook in enumerate(rooks)]
    every = math.perm(gallery, n)
    # P[K = k], with C(j, k) in place of C(j - 1, k - 1). The signs alternate: whole numbers keep the sum exact.
    signed = (sum((-1) ** (j - k) * math.comb(j, k) * ways[j] for j in range(k, n + 1)) for k in range(n + 1))
    return tuple(whole / every for whole in signed)


def _product(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Multiply two polynomials, given by their coefficients."""
    product = [0] * (len(first) + len(second) - 1)
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            product[i + j] += left * right
    return product


def added(counts: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Compute the distribution of a sum of independent counts.

    >>> added([[0.5, 0.5], [0.5, 0.5]])
    (0.25, 0.5, 0.25)
    """
    mass = np.ones(1)
    for distribution in counts:
        mass = np.convolve(mass, distribution)
    return tuple(mass.tolist())


def upper_tail(mass: Sequence[float], observed: int) -> float:
    """Compute the probability of at least `observed` under a distribution over 0, 1, 2, ...

    >>> upper_tail([0.25, 0.5, 0.25], 1), upper_tail([0.25, 0.5, 0.25], 0)
    (0.75, 1.0)
    """
    return min(1.0, sum(reversed(mass[observed:]))) if observed > 0 else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of tests (S. Holm, 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def bootstrap_maximum(
    counts: Sequence[Sequence[int]], sizes: Sequence[int], key: Key, draws: int = 2000
) -> tuple[float, float]:
    """Compute the 95% percentile interval of the highest rate of several attackers on the same clients.

    `counts` has one row of successes per attacker and one column per client; `sizes` are the clients' image counts.
    Clients are drawn with replacement, the same ones for every attacker.
    """
    wins, images = torch.tensor(counts, dtype=torch.double), torch.tensor(sizes, dtype=torch.double)
    drawn = torch.randint(len(sizes), (draws, len(sizes)), generator=key.generator())
    # [attackers, draws, clients], summed over the clients.
    highest = (wins[:, drawn].sum(-1) / images[drawn].sum(-1)).amax(0)
    low, high = torch.quantile(highest, torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return low, high
