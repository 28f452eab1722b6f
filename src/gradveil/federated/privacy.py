"""The differential privacy of a training: what the noise of its clients proves, over all their rounds.

It holds towards a server who sees each update by itself and knows who sends it, so that choosing some of the clients
amplifies nothing. Of a client counts in how many rounds it answers: that depends on the seed and not on anybody's data.
What clients tell of examples that they keep apart (validation losses) is not covered, nor is it of those they train on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gradveil.client import Client
from gradveil.core.types import Batch
from gradveil.defences.privacy import Mechanism, examine, promise
from gradveil.federated.engine import Federation
from gradveil.theory.accounting import Training, worst


def guarantee(federation: Federation, rounds: int, delta: float) -> dict[str, Any]:
    """Say what is proven of each example and of each client of a training: in words, and the epsilon of each unit.

    It is that of the client of which least is proven, after all the rounds that were planned: who stops earlier because
    of what he saw has no smaller epsilon.
    """
    sizes = [_size(federation, len(share.train.targets)) for share in federation.shares]
    found = {size: examine(federation.client, _first(federation, size)) for size in set(sizes)}
    any_of_them = found[sizes[0]]
    if not any_of_them.sound:
        return {"guarantee": any_of_them.promise(), "epsilon": {}, "delta": None}
    answers = Counter(client for number in range(1, rounds + 1) for client in federation.chosen(number)[0])
    said: dict[str, tuple[float, str]] = {}
    for place, mechanism in enumerate(any_of_them.mechanisms):
        if mechanism.flaws:
            continue
        of_each = [(found[size].mechanisms[place], size, answers[client]) for client, size in enumerate(sizes)]
        value, text = _account(federation.client, of_each, delta)
        # Where two noises protect the same unit, both promises hold: the better one is told.
        if mechanism.unit not in said or value < said[mechanism.unit][0]:
            said[mechanism.unit] = value, text
    texts = "; ".join([*(text for _, text in said.values()), *any_of_them.denied(), *_too_large(delta, said, sizes)])
    return {"guarantee": texts, "epsilon": {unit: value for unit, (value, _) in said.items()}, "delta": delta}


def _too_large(delta: float, units: Collection[str], sizes: Sequence[int]) -> Iterator[str]:
    """Warn of a delta at which publishing a unit drawn at random counts as private (Dwork and Roth 2014, sec. 2.3)."""
    counts = {"example": max(sizes), "client": len(sizes)}
    for unit in units:
        if delta * counts[unit] >= 1:
            yield f"delta is not below one over {counts[unit]} {unit}s: it allows that one of them is published"


def _account(client: Client, of_each: list[tuple[Mechanism, int, int]], delta: float) -> tuple[float, str]:
    """Find the largest epsilon of clients with these mechanisms, sizes and rounds, and put it into words."""
    parts = {
        (mechanism.multiplier, released(client, mechanism, size, max(rounds, 1), delta)): mechanism
        for mechanism, size, rounds in of_each
    }
    value, noise, training = worst(parts)
    return value, promise(parts[noise, training], training)


def released(client: Client, mechanism: Mechanism, examples: int, rounds: int, delta: float) -> Training:
    """Say how often an example (or the client itself) gets into a noisy sum when the client answers so many times.

    Only Poisson sampling amplifies. Otherwise neighbours differ in what is *replaced*: batches keep their size, and
    everybody sees that the client took part.
    """
    local, sums = client.local, mechanism.sums * rounds
    if mechanism.unit == "client" or local is None:
        return Training(sums, delta=delta, sampling="shuffled", at_most=sums)
    if local.sampling == "poisson":
        return Training(sums, rate=local.batch / examples, delta=delta)
    passes = math.ceil(mechanism.sums / (examples // local.batch))
    return Training(sums, delta=delta, sampling="shuffled", at_most=passes * rounds)


def _size(federation: Federation, examples: int) -> int:
    """Count the examples that a client's update is made from."""
    return examples if federation.client.local or not federation.batch else min(federation.batch, examples)


def _first(federation: Federation, size: int) -> Batch:
    share = next(share for share in federation.shares if len(share.train.targets) >= size)
    return Batch(share.train.inputs[:size], share.train.targets[:size])
