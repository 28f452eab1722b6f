"""The largest probability with which any attacker recovers an example, from the noise that protects it.

A mechanism is (eta, gamma)-reconstruction robust if every attacker that knows all other examples, and is right without
the update with probability at most kappa, is right with it at most with probability gamma (Balle, Cherubin, Hayes
2022). gamma(kappa) is the power of the best test at level kappa between "the example is absent" and "it is present"
(Hayes, Mahloujifar, Balle 2023; Kaissis et al. 2023). Sampling can only lower it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist

from gradveil.core.errors import Problem, refuse
from gradveil.core.extras import needs
from gradveil.theory.accounting import HOPELESS, Participation, epsilon
from gradveil.theory.loss_distribution import composed_loss

GUESSES = (1e-1, 1e-3, 1e-6)
"""Values of kappa to quote where the probability of a right guess is unknown."""
_LOSSES = (-5.0, 60.0, 2600)
"""Grid of privacy losses over which the bound of a privacy loss distribution is minimised."""
_ORDERS = tuple(1 + 1.03**step / 100 for step in range(320))
_LARGEST_ORDER = 128
_LAW = NormalDist()


def gaussian(guess: float, mu: float) -> float:
    """Compute gamma for normal noise: Phi(Phi^-1(kappa) + mu), mu the largest shift in standard deviations.

    >>> round(gaussian(0.01, 1.0), 6), gaussian(0.0, 1.0), gaussian(1.0, 1.0)
    (0.092362, 0.0, 1.0)
    """
    _check(guess)
    if guess in (0.0, 1.0) or mu == math.inf:
        return float(guess > 0)
    return max(guess, _LAW.cdf(_LAW.inv_cdf(guess) + mu))


def sampled_gaussian(guess: float, mu: float, rate: float) -> float:
    """Compute gamma for one sum with an example in it at probability q: (1 - q) kappa + q Phi(Phi^-1(kappa) + mu).

    >>> round(sampled_gaussian(0.1, 1.0, 0.1), 5)
    0.12891
    """
    return (1 - rate) * guess + rate * gaussian(guess, mu)


def laplace(guess: float, loss: float) -> float:
    """Compute gamma for Laplace noise with epsilon `loss` = sensitivity / scale.

    >>> round(laplace(0.1, 1.0), 6), round(laplace(0.9, 1.0), 6)
    (0.271828, 0.963212)
    """
    _check(guess)
    # The power of the test that rejects above a threshold: one piece each for a threshold beyond both centres, between
    # them, and before them.
    if guess <= math.exp(-loss) / 2:
        return guess * math.exp(loss)
    if guess <= 0.5:
        return 1 - math.exp(-loss) / (4 * guess)
    return 1 - math.exp(-loss) * (1 - guess)


def pure(guess: float, loss: float) -> float:
    """Compute gamma for any mechanism with epsilon `loss` and delta 0: min(kappa e^eps, 1 - e^-eps (1 - kappa)).

    >>> round(pure(0.01, math.log(3)), 6), round(pure(0.9, math.log(2)), 6)
    (0.03, 0.95)
    """
    _check(guess)
    return min(guess * math.exp(min(loss, 700.0)), 1 - math.exp(-loss) * (1 - guess))


def renyi(guess: float, parts: Sequence[tuple[float, Participation]]) -> float:
    """Compute the looser bound of Rényi privacy: min over orders a of (kappa e^eps(a))^((a - 1) / a).

    Of sampled sums it takes whole orders (Mironov, Talwar, Zhang 2019). It needs no grid, so it also holds for noise
    that is too small for privacy loss distributions.

    >>> round(renyi(0.01, [(1.0, Participation(steps=1))]), 4)
    0.1261
    """
    _check(guess)
    if guess in (0.0, 1.0) or not all(noise for noise, _ in parts):
        return float(guess > 0)
    orders = _ORDERS if all(_always(training) for _, training in parts) else range(2, _LARGEST_ORDER + 1)
    spent = ((order, sum(_renyi_loss(order, *part) for part in parts)) for order in orders)
    least = min((order - 1) / order * (math.log(guess) + loss) for order, loss in spent)
    return max(guess, math.exp(min(0.0, least)))


def _renyi_loss(order: float, noise: float, training: Participation) -> float:
    """Compute the Rényi divergence of "it is present" from "it is absent" over all sums."""
    times, half = _times(training), 1 / (2 * noise**2)
    if _always(training):
        return times * order * half
    top, rate = int(order), training.rate
    # (a - 1) eps(a) = log sum_k C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 sigma^2)); the logarithms of its terms,
    # added up relative to the largest, as their exponentials overflow.
    terms = [
        math.lgamma(top + 1)
        - math.lgamma(k + 1)
        - math.lgamma(top - k + 1)
        + (top - k) * math.log1p(-rate)
        + k * math.log(rate)
        + (k * k - k) * half
        for k in range(top + 1)
    ]
    most = max(terms)
    return times * (most + math.log(sum(math.exp(term - most) for term in terms))) / (order - 1)


def recovery_bound(guess: float, parts: Sequence[tuple[float, Participation]]) -> float:
    """Compute gamma for one or more (noise multiplier, training) pairs on the same examples.

    Normal noise without sampling has a closed form, and so has one sampled sum. The others take the privacy loss
    distribution: gamma <= delta(eps) + e^eps kappa for every eps. Its rounding keeps the result an upper bound, and
    participation in all sums bounds it too. The distance is between absent and present, also for shuffled batches.

    >>> round(recovery_bound(0.01, [(1.0, Participation(steps=1))]), 6)
    0.092362
    """
    _check(guess)
    mu = total_shift(parts)
    if guess in (0.0, 1.0) or mu == math.inf:
        return float(guess > 0)
    whole = gaussian(guess, mu)
    if all(_always(training) for _, training in parts):
        return whole
    if len(parts) == 1 and parts[0][1].steps == 1:
        return sampled_gaussian(guess, mu, parts[0][1].rate)
    if any(epsilon(noise, _coarse(training)) > HOPELESS for noise, training in parts):
        return min(whole, renyi(guess, parts))
    return max(guess, min(1.0, whole, _least(guess, parts)))


def _least(guess: float, parts: Sequence[tuple[float, Participation]]) -> float:
    """Compute the minimum of delta(eps) + e^eps kappa over the grid of privacy losses.

    Both terms are convex in e^eps, so that the minimum is where the sum stops falling.
    """
    releases = tuple((noise, 1.0 if _always(one) else one.rate, _times(one)) for noise, one in parts)
    with needs("dp", "the bound of recovery"):
        spent = composed_loss(releases)
    low, high, count = _LOSSES

    def bound(place: int) -> float:
        loss = low + (high - low) * place / (count - 1)
        return float(spent.get_delta_for_epsilon(loss)) + math.exp(loss) * guess

    return bound(bisect_left(range(count - 1), True, key=lambda place: bound(place + 1) >= bound(place)))


def total_shift(parts: Sequence[tuple[float, Participation]]) -> float:
    """Compute mu = sqrt(sum 1 / sigma^2) over all sums that an example may be in; infinite without noise.

    >>> total_shift([(0.5, Participation(steps=4))])
    4.0
    """
    if not all(noise for noise, _ in parts):
        return math.inf
    return math.sqrt(sum(_times(training) / noise**2 for noise, training in parts))


def unbiased_error(mu: float) -> float:
    """Compute the least mean squared error per pixel in [0, 1] of attackers without bias: 1 / (4 (e^(4 mu^2) - 1)).

    It follows from Rényi differential privacy of order 2 (Guo, Karrer, Chaudhuri, van der Maaten 2022) between two
    values of the example: replacing it moves the sum by up to twice the clip norm, hence 2 mu. Attackers with a prior
    are biased and may go below it.

    >>> round(unbiased_error(0.5), 4), round(unbiased_error(1.0), 4)
    (0.1455, 0.0047)
    """
    square = 4 * mu * mu
    return 0.0 if square > 700 else math.inf if square == 0 else 1 / (4 * math.expm1(square))


def _check(guess: float) -> None:
    if not 0 <= guess <= 1:
        refuse([Problem("guess", f"is {guess}", "give the probability of a right guess, between 0 and 1")])


def _always(training: Participation) -> bool:
    return training.sampling == "shuffled" or training.rate == 1


def _times(training: Participation) -> int:
    return training.epochs if training.sampling == "shuffled" else training.steps


def _coarse(training: Participation) -> Participation:
    return Participation(training.steps, training.rate, training.delta, training.sampling, "rdp", training.at_most)
