"""The server's side: any Flower strategy, behind a door that lets only marked, well-formed updates in."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gradveil.core.errors import GradveilError, fail
from gradveil.integrations.flower.records import (
    MARK,
    decoded,
    mark,
    marked,
    only_arrays,
    record,
    tensors,
    trained,
    unpacked,
)

LOG = logging.getLogger("flwr.gradveil")
"""Flower's console shows what is written here."""
_MOST_EXAMPLES = 2.0**53
"""Beyond this numbers are not counted any more, and two of them may add up to infinity."""


@dataclass(frozen=True)
class Refusal:
    """A reply that was not aggregated, and why."""

    number: int
    """Of the round."""
    node: int
    reason: str


class Protected(Strategy):
    """A strategy that aggregates what protected clients send: `Protected(FedAvg(fraction_evaluate=0))`.

    Each update u is decoded to the parameters p - u that the client would have sent without a defence, p being what the
    server sent to it, and the inner strategy aggregates those. A reply is refused, with its reason in the log and in
    `refusals`, if it is unmarked (nothing says that it was defended), is not of this model or round, is damaged, or was
    not asked for. Where none is left the inner strategy is not called, and the model stays.

    `trainable` has the patterns of `Client.trainable`, where not all parameters are trained. What is not sent stays.
    """

    def __init__(self, strategy: Strategy, trainable: Sequence[str] | None = None) -> None:
        """Wrap a strategy."""
        self.strategy = strategy
        self.trainable = trainable
        self.refusals: list[Refusal] = []
        """Every reply that was not aggregated."""
        self._asked: dict[int, tuple[str, ArrayRecord]] = {}
        self._round = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Mark the inner strategy's messages, and remember what each node is sent."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._round, self._asked = server_round, {}
        for message in messages:
            message.content[MARK] = mark(server_round)
            self._asked[message.metadata.dst_node_id] = only_arrays(message.content, "message")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies, and let the inner strategy aggregate those that are in order."""
        answers = list(replies)
        failed = [reply for reply in answers if reply.has_error()]
        kept = self._alike(list(self._opened(reply for reply in answers if not reply.has_error())))
        if len(kept) + len(failed) < len(answers):
            number = len(answers) - len(failed) - len(kept)
            LOG.warning("round %d: %d of %d replies were refused", server_round, number, len(answers))
        if not kept and len(answers) > len(failed):
            LOG.error("round %d: no reply is left, the model stays as it was", server_round)
            return None, None
        _, before = next(iter(self._asked.values()), ("", ArrayRecord()))
        arrays, metrics = self.strategy.aggregate_train(server_round, [*kept, *failed])
        return (None if arrays is None else _as_before(arrays, before)), metrics

    def _opened(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Decode each reply; leave those out that are not in order."""
        unanswered = dict(self._asked)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in unanswered:
                    raise fail("reply", "was not asked for, or comes a second time", "find out who sends it")
                reply.content = self._plain(reply.content, *unanswered.pop(node))
            except GradveilError as error:
                self._refuse(node, str(error))
            else:
                yield reply

    def _plain(self, content: RecordDict, name: str, sent: ArrayRecord) -> RecordDict:
        """Rebuild what an app without a defence would have replied, in a record of the name of the one it was sent."""
        if (number := marked(content)) != self._round:
            raise fail("reply", f"answers round {number}, not {self._round}", "leave it out: it is stale")
        self._check(content)
        own, _ = only_arrays(content, "reply")
        received = tensors(sent)
        params = trained(received, self.trainable)
        update = decoded(unpacked(content), params, received)
        after = {n: value - update[n] if n in update else value for n, value in received.items()}
        # Two finite numbers can differ by more than their type holds, and one infinity spoils the mean of all.
        if spoiled := [n for n in update if not bool(after[n].isfinite().all())]:
            raise fail(f"reply, update.{spoiled[0]}", "moves parameters beyond all numbers", "leave this reply out")
        rest = {n: found for n, found in content.items() if n not in (own, name, MARK)}
        return RecordDict({name: record(after), **rest})

    def _check(self, content: RecordDict) -> None:
        """Refuse metrics that would spoil a mean."""
        found = [(name, value) for metrics in content.metric_records.values() for name, value in metrics.items()]
        numbers = [number for _, value in found for number in (value if isinstance(value, list) else [value])]
        keys = set(_weights_of(self.strategy))
        weights = [value for name, value in found if name in keys]
        if missing := keys - {name for name, _ in found}:
            remedy = "put it into the metrics of every reply"
            raise fail("reply", f"does not say '{min(missing)}', by which the strategy weighs replies", remedy)
        if not all(math.isfinite(number) for number in numbers):
            raise fail("reply", "has metrics that are not finite", "leave this reply out")
        for weight in weights:
            if isinstance(weight, list) or not 0 < weight <= _MOST_EXAMPLES:
                raise fail("reply", f"counts for {weight} in the mean", "reply with a positive number of examples")

    def _alike(self, replies: list[Message]) -> list[Message]:
        """Keep the replies whose metrics have the names that most have: Flower would drop the whole round."""
        forms = [_form(reply.content) for reply in replies]
        if len(set(forms)) < 2:
            return replies
        usual = Counter(forms).most_common(1)[0][0]
        for reply, form in zip(replies, forms, strict=True):
            if form != usual:
                self._refuse(reply.metadata.src_node_id, "reply: has other metrics than most -> use one client app")
        return [reply for reply, form in zip(replies, forms, strict=True) if form == usual]

    def _refuse(self, node: int, reason: str) -> None:
        LOG.warning("round %d: the reply of node %d is refused: %s", self._round, node, reason)
        self.refusals.append(Refusal(self._round, node, reason))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Leave evaluation to the inner strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the settings."""
        LOG.info("\t├──> Gradveil: only marked updates are aggregated, by %s", type(self.strategy).__name__)
        self.strategy.summary()


def _weights_of(strategy: object) -> Iterator[str]:
    """Name the metrics that a strategy weighs replies by, and those of the strategies that it wraps."""
    while isinstance(strategy, Strategy):
        if key := getattr(strategy, "weighted_by_key", None):
            yield str(key)
        strategy = getattr(strategy, "strategy", None)


def _form(content: RecordDict) -> tuple[object, ...]:
    """Describe the metrics of a reply: their names, and how many numbers each has."""
    return tuple(
        (name, key, len(value) if isinstance(value, list) else None)
        for name, metrics in sorted(content.metric_records.items())
        for key, value in sorted(metrics.items())
    )


def _as_before(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Give the aggregate the dtypes of what was sent: some strategies widen, and make numbers of counts."""
    kept: dict[str, Array] = {}
    for name, array in arrays.items():
        values, dtype = array.numpy(), np.dtype(before[name].dtype if name in before else array.dtype)
        whole = np.rint(values) if dtype.kind in "iu" else values
        kept[name] = array if values.dtype == dtype else Array(np.asarray(whole.astype(dtype)))
    return ArrayRecord(kept)
