"""Shares of victims, with the interval that says how far they can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor

from gradveil.core.errors import Problem, refuse


class Rate(NamedTuple):
    """A share of victims with its interval."""

    successes: int
    n: int
    rate: float
    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the Wilson score interval of a binomial share (E. B. Wilson, 1927), without continuity correction.

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half-width z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2).

    >>> [round(bound, 3) for bound in wilson(31, 32)]
    [0.843, 0.994]
    """
    problems = []
    if n < 1:
        problems.append(Problem("n", f"is {n}", "an interval needs at least one victim"))
    elif not 0 <= successes <= n:
        problems.append(Problem("successes", f"are {successes} of {n}", "count between 0 and n"))
    if not 0 < confidence < 1:
        problems.append(Problem("confidence", f"is {confidence}", "give a number between 0 and 1, say 0.95"))
    refuse(problems)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, scale = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The ends are exact at no success and at nothing but successes; rounding would leave 1e-17.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


class Risk(NamedTuple):
    """The success of an attack beyond its control, as a share of what was left to gain, with its 95% interval."""

    value: float
    low: float
    high: float


def risk(successes: int, n: int, control: float) -> Risk:
    """Compute (a - c) / (1 - c) for an attack's rate a and the rate c of a control (Anonymeter, 2023).

    Both rates are Wilson centres of `n` images, with Wilson's half-widths as their errors; value and ends are cut to
    [0, 1].

    >>> [round(each, 3) for each in risk(60, 100, 0.2)]
    [0.488, 0.359, 0.618]
    """
    (a, spread), (c, error) = (_centre(count, n) for count in (float(successes), control * n))
    half = math.hypot(spread / (1 - c), error * (1 - a) / (1 - c) ** 2)
    value = (a - c) / (1 - c)
    return Risk(*(min(1.0, max(0.0, each)) for each in (value, value - half, value + half)))


def _centre(successes: float, n: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.975)
    half = z / (n + z * z) * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return (successes + z * z / 2) / (n + z * z), half


def asr(ssim: Tensor, threshold: float = 0.5, confidence: float = 0.95) -> Rate:
    """Compute the attack success rate: the share of images whose SSIM is above the threshold, with Wilson's interval.

    A NaN counts as a failed attack. The interval takes images as independent, which those of one batch are not quite.
    """
    successes, n = int((ssim > threshold).sum()), ssim.numel()
    low, high = wilson(successes, n, confidence)
    return Rate(successes, n, successes / n, low, high)
