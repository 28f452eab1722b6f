"""The server's side: any Flower strategy, behind a door that lets only marked, well-formed updates in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gradveil.core.errors import GradveilError, fail, refuse
from gradveil.integrations.flower.bounds import Accepted, Bounds, finite, norm
from gradveil.integrations.flower.metrics import LOG, RECORD, Metrics, Wanted, alike
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


@dataclass(frozen=True)
class Refusal:
    """A reply that was not aggregated, and why."""

    number: int
    """Of the round."""
    node: int
    reason: str


@dataclass(frozen=True)
class _Opened:
    """A reply that is in order."""

    reply: Message
    name: str
    """Of its record of arrays."""
    arrays: ArrayRecord
    metrics: Metrics
    norm: float


class Protected(Strategy):
    """A strategy that aggregates what protected clients send: `Protected(FedAvg(fraction_evaluate=0))`.

    Each update u is decoded to the parameters p - u that the client would have sent without a defence, p being what the
    server sent to it, and the inner strategy aggregates those. A reply is refused, with its reason in the log and in
    `refusals`, if it is unmarked (nothing says that it was defended), is not of this model or round, is damaged, was
    not asked for, lacks a metric that the strategy needs, or exceeds a bound. Where none is left the inner strategy is
    not called, and the model stays.

    Each reply is judged by itself. The inner strategy gets one `MetricRecord` of each, named "metrics", with the
    metrics that it needs and those that all accepted replies share; a metric that some lack is dropped, unless
    `metrics` names it: then a reply without it is refused. Other records are dropped.

    `trainable` has the patterns of `Client.trainable`, where not all parameters are trained. What is not sent stays.

    The bounds: `max_norm` of the l2 norm of an update (None: far beyond any training), `max_ratio` of the norm in units
    of the round's upper median (None: none; it assumes that more than half of the replies are honest), `max_examples`
    caps the weight of a reply. `statistics` are those of BatchNorm layers: "refuse" them, accept them "bounded"
    (variances at least 0, means and standard deviations move by at most `max_change` standard deviations), or "accept"
    all that are finite.
    """

    def __init__(
        self,
        strategy: Strategy,
        trainable: Sequence[str] | None = None,
        *,
        metrics: Sequence[str] = (),
        max_norm: float | None = None,
        max_ratio: float | None = None,
        max_examples: float | None = None,
        statistics: Accepted = "bounded",
        max_change: float = 1e4,
    ) -> None:
        """Wrap a strategy."""
        self.strategy = strategy
        self.trainable = trainable
        self.bounds = Bounds(max_norm, max_ratio, max_examples, statistics, max_change)
        self.wanted = Wanted.of(strategy, metrics, max_examples)
        self.refusals: list[Refusal] = []
        """Every reply that was not aggregated."""
        self._asked: dict[int, tuple[str, ArrayRecord]] = {}
        self._evaluating: set[int] = set()
        self._round = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Mark the inner strategy's messages, and remember what each node is sent."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._round, self._asked = server_round, {}
        for message in messages:
            message.content[MARK] = mark(server_round)
            name, sent = only_arrays(message.content, "message")
            if name == RECORD:
                raise fail(
                    "strategy.arrayrecord_key", f"is '{RECORD}', as the metrics are called", "choose another name"
                )
            self._asked[message.metadata.dst_node_id] = name, sent
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies, and let the inner strategy aggregate those that are in order."""
        answers = list(replies)
        failed = [reply for reply in answers if reply.has_error()]
        opened = list(self._opened(reply for reply in answers if not reply.has_error()))
        large = dict(self.bounds.outliers([one.norm for one in opened]))
        for index, reason in large.items():
            self._refuse(opened[index].reply.metadata.src_node_id, reason)
        kept = self._alike([one for index, one in enumerate(opened) if index not in large])
        if len(kept) + len(failed) < len(answers):
            number = len(answers) - len(failed) - len(kept)
            LOG.warning("round %d: %d of %d replies were refused", server_round, number, len(answers))
        if not kept and len(answers) > len(failed):
            LOG.error("round %d: no reply is left, the model stays as it was", server_round)
            return None, None
        _, before = next(iter(self._asked.values()), ("", ArrayRecord()))
        arrays, metrics = self.strategy.aggregate_train(server_round, [*kept, *failed])
        after = None if arrays is None else _as_before(arrays, before)
        if after is not None and not all(np.isfinite(array.numpy()).all() for array in after.values()):
            LOG.error("round %d: the aggregate is not finite, the model stays as it was", server_round)
            after = None
        return after, metrics

    def _opened(self, replies: Iterable[Message]) -> Iterator[_Opened]:
        """Decode each reply; leave those out that are not in order."""
        unanswered = dict(self._asked)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in unanswered:
                    raise fail("reply", "was not asked for, or comes a second time", "find out who sends it")
                yield self._decoded(reply, *unanswered.pop(node))
            except GradveilError as error:
                self._refuse(node, str(error))

    def _decoded(self, reply: Message, name: str, sent: ArrayRecord) -> _Opened:
        """Rebuild what an app without a defence would have replied, in a record of the name of the one it was sent."""
        content = reply.content
        if (number := marked(content)) != self._round:
            raise fail("reply", f"answers round {number}, not {self._round}", "leave it out: it is stale")
        metrics = self.wanted.read(content)
        received = tensors(sent)
        update = decoded(unpacked(content), trained(received, self.trainable), received)
        after = {n: value - update[n] if n in update else value for n, value in received.items()}
        refuse([*finite(update, after)] or [*self.bounds.problems(received, update)])
        return _Opened(reply, name, record(after), metrics, norm(update))

    def _alike(self, opened: Sequence[_Opened]) -> list[Message]:
        """Give every reply one record of arrays and one of metrics, with the same names in all."""
        for one, metrics in zip(opened, alike(self._round, [one.metrics for one in opened]), strict=True):
            one.reply.content = RecordDict({one.name: one.arrays, RECORD: metrics})
        return [one.reply for one in opened]

    def _refuse(self, node: int, reason: str) -> None:
        LOG.warning("round %d: the reply of node %d is refused: %s", self._round, node, reason)
        self.refusals.append(Refusal(self._round, node, reason))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy, and remember who is asked."""
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._evaluating = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate the metrics that are in order; the arrays of a reply are dropped."""
        answers = list(replies)
        failed = [reply for reply in answers if reply.has_error()]
        wanted = Wanted.of(self.strategy, (), self.bounds.max_examples, training=False)
        unanswered, kept, found = set(self._evaluating), list[Message](), list[Metrics]()
        for reply in (reply for reply in answers if not reply.has_error()):
            node = reply.metadata.src_node_id
            try:
                if node not in unanswered:
                    raise fail("reply", "was not asked for, or comes a second time", "find out who sends it")
                unanswered.remove(node)
                found.append(wanted.read(reply.content))
                kept.append(reply)
            except GradveilError as error:
                self._refuse(node, str(error))
        for reply, metrics in zip(kept, alike(server_round, found), strict=True):
            reply.content = RecordDict({RECORD: metrics})
        if not kept and len(answers) > len(failed):
            return None
        return self.strategy.aggregate_evaluate(server_round, [*kept, *failed])

    def summary(self) -> None:
        """Log the settings."""
        LOG.info("\t├──> Gradveil: only marked updates are aggregated, by %s", type(self.strategy).__name__)
        self.strategy.summary()


def _as_before(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Give the aggregate the dtypes of what was sent: some strategies widen, and make numbers of counts."""
    kept: dict[str, Array] = {}
    for name, array in arrays.items():
        values, dtype = array.numpy(), np.dtype(before[name].dtype if name in before else array.dtype)
        whole = np.rint(values) if dtype.kind in "iu" else values
        kept[name] = array if values.dtype == dtype else Array(np.asarray(whole.astype(dtype)))
    return ArrayRecord(kept)
