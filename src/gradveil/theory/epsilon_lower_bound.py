"""Lower bounds of epsilon from what a distinguisher achieved on releases of a mechanism.

An upper bound by an accountant holds for the algorithm on paper. A lower bound holds for the code that made the
releases: where it is above the claim, the claim is wrong. A low value shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy.special import bdtrc, betaincinv  # pyright: ignore[reportMissingTypeStubs]

from gradveil.core.errors import Problem, refuse

_LAW = NormalDist()
_LARGEST = 700.0
PILOT = 10
"""Of so many scores one chooses the threshold for normal noise, and is not counted."""


def upper_end(hits: int, trials: int, level: float) -> float:
    """Compute the upper Clopper-Pearson end of a probability: exceeded by the truth with probability `level` at most.

    >>> round(upper_end(0, 100, 0.025), 4), upper_end(3, 3, 0.05)
    (0.0362, 1.0)
    """
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - level))


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound of epsilon, with what it was computed from."""

    epsilon: float
    gaussian: float | None
    """The same if the noise is normal, as the client claims; None where that is not claimed."""
    releases: int
    delta: float
    confidence: float
    false_positives: float = 1.0
    """Upper end of the rate of releases taken for ones with the canary."""
    false_negatives: float = 1.0

    @property
    def best(self) -> float:
        """The larger of the two bounds."""
        return max(self.epsilon, self.gaussian or 0.0)


def from_scores(
    present: Sequence[float], absent: Sequence[float], delta: float, *, confidence: float = 0.95, normal: bool = True
) -> EpsilonBound:
    """Bound epsilon from scores of releases with and without a canary; scores are higher with it.

    Scores that choose the threshold are not counted. For `normal` noise it lies halfway between the medians of every
    tenth score, where the rates say most of mu = Phi^-1(1 - FPR) - Phi^-1(FNR), from which epsilon follows. Otherwise
    it is the best one for every second score. Clopper-Pearson ends at (1 - confidence) / 2 each give epsilon >= log((1
    - delta - FPR) / FNR) and its mirror image.
    """
    problems = [
        Problem("releases", f"are {len(some)} {which} the canary", "replay at least 20 of each")
        for some, which in ((present, "with"), (absent, "without"))
        if len(some) < 20
    ]
    refuse(problems)
    # NaN is neither above a threshold nor below it, and would never count as an error of the distinguisher.
    inside, outside = (np.nan_to_num(np.asarray(some, dtype=float)) for some in (present, absent))
    every = PILOT if normal else 2
    pilot = inside[::every], outside[::every]
    threshold = _halfway(*pilot) if normal else _threshold(*pilot, delta, confidence)
    tried = [np.delete(some, np.s_[::every]) for some in (inside, outside)]
    level = (1 - confidence) / 2
    positives = upper_end(int((tried[1] > threshold).sum()), len(tried[1]), level)
    negatives = upper_end(int((tried[0] <= threshold).sum()), len(tried[0]), level)
    gaussian = _normal_epsilon(_shift(positives, negatives), delta) if normal else None
    total = len(present) + len(absent)
    return EpsilonBound(_pure(positives, negatives, delta), gaussian, total, delta, confidence, positives, negatives)


def from_guesses(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Bound epsilon from one run with `canaries`, each in with probability 1/2 (Steinke, Nasr, Jagielski 2023).

    `guesses` of them were guessed in or out, a number chosen before the run, and `right` guesses were right. The result
    is the largest epsilon with beta + 2 m delta alpha <= 1 - confidence, where beta = P[Bin(r, q) >= v], q = 1 / (1 +
    e^-eps), and alpha = max_i (P[Bin(r, q) >= v - i] - beta) / i.

    >>> [round(from_guesses(m, m, m), 2) for m in (100, 1000)], from_guesses(100, 100, 50)
    ([3.49, 5.81], 0.0)
    """
    problems = list[Problem]()
    if not 0 < guesses <= canaries:
        problems.append(Problem("guesses", f"are {guesses} of {canaries}", "guess between 1 and all canaries"))
    if not 0 <= right <= guesses:
        problems.append(Problem("right", f"are {right} of {guesses}", "count between 0 and all guesses"))
    refuse(problems)
    level = 1 - confidence
    low, high = 0.0, 60.0
    if _one_run(0.0, canaries, guesses, right, delta) > level:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _one_run(middle, canaries, guesses, right, delta) <= level else (low, middle)
    # The lower end of the bisection, so that the bound is not above the solution.
    return low


def _one_run(loss: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    q = 1 / (1 + math.exp(-loss))
    # `bdtrc(k, n, q)` is P[X > k], so P[X >= right] takes right - 1.
    beta = float(bdtrc(right - 1, guesses, q))
    if not delta or not right:
        return beta
    steps = np.arange(1, right + 1)
    alpha = float(((bdtrc(right - steps - 1, guesses, q) - beta) / steps).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def _halfway(inside: np.ndarray, outside: np.ndarray) -> float:
    return float(np.median(inside) + np.median(outside)) / 2


def _threshold(inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float) -> float:
    """Choose the threshold with the largest bound on these scores."""
    level = (1 - confidence) / 2
    tried = np.unique(np.quantile(np.concatenate([inside, outside]), np.linspace(0.01, 0.99, 99)))
    best, chosen = -1.0, float(tried[len(tried) // 2])
    for threshold in tried:
        positives = upper_end(int((outside > threshold).sum()), len(outside), level)
        negatives = upper_end(int((inside <= threshold).sum()), len(inside), level)
        # The plain bound is often zero for weak signals, where the shift still orders thresholds.
        value = _pure(positives, negatives, delta) + _shift(positives, negatives)
        if value > best:
            best, chosen = value, float(threshold)
    return chosen


def _pure(positives: float, negatives: float, delta: float) -> float:
    ways = ((positives, negatives), (negatives, positives))
    return max([0.0, *(math.log((1 - delta - one) / two) for one, two in ways if 1 - delta > one and two > 0)])


def _shift(positives: float, negatives: float) -> float:
    if positives >= 1 or negatives >= 1:
        return 0.0
    return max(0.0, _LAW.inv_cdf(1 - positives) - _LAW.inv_cdf(negatives))


def _normal_epsilon(mu: float, delta: float) -> float:
    """Solve delta = Phi(-eps / mu + mu / 2) - e^eps Phi(-eps / mu - mu / 2) for eps (Balle, Wang 2018).

    >>> round(_normal_epsilon(1.0, 1e-5), 2), _normal_epsilon(0.0, 1e-5)
    (4.38, 0.0)
    """
    if mu <= 0:
        return 0.0

    def spent(loss: float) -> float:
        far = _LAW.cdf(-loss / mu - mu / 2)
        return _LAW.cdf(-loss / mu + mu / 2) - (math.exp(loss) * far if far and loss < _LARGEST else 0.0)

    low, high = 0.0, _LARGEST
    if spent(low) <= delta:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return low
