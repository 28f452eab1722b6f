"""Exact tests of counts against chance, corrections for many tests, and the bootstrap of a maximum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradveil.core.noise import Key


def poisson_binomial(probabilities: Iterable[float]) -> list[float]:
    """Compute the distribution of the number of successes in independent trials of their own probabilities.

    >>> poisson_binomial([0.5, 0.5]), poisson_binomial([])
    ([0.25, 0.5, 0.25], [1.0])
    """
    mass = [1.0]
    for chance in probabilities:
        missed = [*(share * (1 - chance) for share in mass), 0.0]
        mass = [left + one * chance for left, one in zip(missed, [0.0, *mass], strict=True)]
    return mass


def upper_tail(mass: Sequence[float], observed: int) -> float:
    """Compute the probability of at least `observed` under a distribution over 0, 1, 2, ...

    >>> upper_tail([0.25, 0.5, 0.25], 1), upper_tail([0.25, 0.5, 0.25], 0)
    (0.75, 1.0)
    """
    return min(1.0, sum(reversed(mass[observed:]))) if observed > 0 else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of tests (S. Holm, 1979): reject those at or below the level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def bootstrap_maximum(
    counts: Sequence[Sequence[int]], sizes: Sequence[int], key: Key, draws: int = 2000
) -> tuple[float, float]:
    """Compute the 95% percentile interval of the highest rate of several attackers on the same clients.

    `counts` has one row of successes per attacker, one column per client; `sizes` are the clients' images. Clients are
    drawn with replacement, the same ones for every attacker.
    """
    wins, images = torch.tensor(counts, dtype=torch.double), torch.tensor(sizes, dtype=torch.double)
    drawn = torch.randint(len(sizes), (draws, len(sizes)), generator=key.generator())
    highest = (wins[:, drawn].sum(-1) / images[drawn].sum(-1)).amax(0)
    low, high = torch.quantile(highest, torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return low, high
