"""Metrics of replies: each has to hold what the strategy needs, and what all replies share is kept.

Flower's strategies stop a training where two replies have other metrics, or one has two records of them. So each reply
gets one record, of one name, with equal metrics in all; no reply is compared with the majority.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, Strategy

from gradveil.core.errors import fail

LOG = logging.getLogger("flwr.gradveil")
"""Flower's console shows what is written here."""
RECORD = "metrics"
"""Name of the one `MetricRecord` that the inner strategy sees of each reply."""
_MOST_WEIGHT = 2.0**53
"""Beyond this numbers are not counted any more, and two of them may add up to infinity."""
_NORM_BIT = "norm_bit"
Metrics = dict[str, int | float | list[int] | list[float]]


@dataclass(frozen=True)
class Wanted:
    """The metrics that a strategy needs of each reply."""

    weights: frozenset[str]
    """Those that weigh a reply."""
    numbers: frozenset[str]
    """Other numbers, at least 0."""
    most: float = _MOST_WEIGHT
    """Largest weight; a larger one counts as this."""
    equal: bool = False
    """Whether every reply has weight 1, because a strategy accounts for privacy with equal weights."""

    @staticmethod
    def of(strategy: Strategy, also: Sequence[str], most: float | None, training: bool = True) -> Wanted:
        """Collect the metrics of a strategy and of those that it wraps; `also` are named by the user."""
        chain = list(_wrapped(strategy))
        weights = {str(key) for one in chain if (key := getattr(one, "weighted_by_key", None))}
        losses = {str(key) for one in chain if (key := getattr(one, "train_loss_key", None))}
        bits = {_NORM_BIT for one in chain if isinstance(one, DifferentialPrivacyClientSideAdaptiveClipping)}
        numbers = {*also, *losses, *bits} if training else set[str]()
        equal = any(getattr(one, "accountant", None) is not None for one in chain)
        return Wanted(frozenset(weights), frozenset(numbers - weights), most or _MOST_WEIGHT, equal)

    def read(self, content: RecordDict) -> Metrics:
        """Read the metrics of a reply from all its records; refuse what would spoil a mean, or is missing."""
        found: Metrics = {}
        for name, value in _all(content):
            if name in found and found[name] != value:
                raise fail("reply", f"has two values of {shown(name)}", "reply with one MetricRecord")
            found[name] = value
        if missing := (self.weights | self.numbers) - found.keys():
            remedy = "put it into the metrics of every reply"
            raise fail("reply", f"does not say '{min(missing)}', which the strategy needs", remedy)
        for name, value in found.items():
            if not all(_is_finite(number) for number in (value if isinstance(value, list) else [value])):
                raise fail("reply", f"has metrics that are not finite ({shown(name)})", "leave this reply out")
        for name in self.numbers:
            if isinstance(value := found[name], list) or value < 0:
                raise fail("reply", f"has {value} as '{name}'", "reply with one number, at least 0")
        for name in self.weights:
            found[name] = self._weight(found[name])
        return found

    def _weight(self, value: float | list[int] | list[float]) -> int | float:
        if isinstance(value, list) or not 0 < value <= _MOST_WEIGHT:
            raise fail("reply", f"counts for {value} in the mean", "reply with a positive number of examples")
        return 1 if self.equal else min(value, self.most)


def alike(number: int, found: Sequence[Metrics]) -> list[MetricRecord]:
    """Keep the metrics that all replies of a round share, and log which are dropped."""
    forms = [{(name, len(v) if isinstance(v, list) else None) for name, v in metrics.items()} for metrics in found]
    shared = {name for name, _ in set.intersection(*forms)} if forms else set[str]()
    if dropped := {name for metrics in found for name in metrics} - shared:
        names = ", ".join(shown(name) for name in sorted(dropped)[:5]) + (", ..." if len(dropped) > 5 else "")
        LOG.warning("round %d: metrics that not all replies have are dropped: %s", number, names)
    return [MetricRecord({name: metrics[name] for name in sorted(shared)}) for metrics in found]


def shown(name: str) -> str:
    r"""Quote a text of a client for a log: no control characters, at most 60 characters.

    >>> shown("a\nb")
    "'a\\nb'"
    """
    text = repr(name)
    return text if len(text) <= 60 else f"{text[:57]}...'"


def _wrapped(strategy: object) -> Iterator[Strategy]:
    while isinstance(strategy, Strategy):
        yield strategy
        strategy = getattr(strategy, "strategy", None)


def _all(content: RecordDict) -> Iterator[tuple[str, int | float | list[int] | list[float]]]:
    records: Mapping[str, MetricRecord] = content.metric_records
    for metrics in records.values():
        yield from metrics.items()


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False
