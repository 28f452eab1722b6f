"""Server strategy that aggregates only marked, well-formed replies within bounds; each reply is checked alone.

The default bounds are wide: an honest training, its privacy noise included, does not reach them. They keep a single
absurd reply from destroying the model. Robustness against clients that lie within the bounds needs tighter bounds and a
robust inner strategy.

Flower's strategies stop a training if two replies have different metrics, or one has two metric records. So each
accepted reply gets one record, with the same name and the same metrics in all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, Strategy
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.settings import Bound, Checked, Range
from gradveil.core.tree import Tensors
from gradveil.integrations.flower.flower_records import (
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
from gradveil.nn.weight_files import is_statistic
from gradveil.wire.header import location_of

Accepted = Literal["refuse", "bounded", "accept"]
"""Treatment of running statistics in a reply."""
Ceiling = Annotated[float | None, Range(0, low_open=True, unlimited=True, optional=True)]
_USUAL = 1000.0
"""Root mean square of an update's entries, in units of one plus that of the parameters, which no training reaches."""
_VARIANCE = "running_var"


@dataclass(frozen=True)
class Bounds(Checked):
    """The bounds of `Protected`, checked when it is made."""

    max_norm: Ceiling = None
    """l2 norm of an update. None: 1000 times the norm of the parameters plus the root of their number."""
    max_ratio: Ceiling = None
    """Norm of an update in units of the round's upper median. None: no such bound."""
    max_examples: Ceiling = None
    """Weight in a mean; a larger one counts as this. None: no such bound."""
    statistics: Annotated[Accepted, "Treatment of running statistics."] = "bounded"
    max_change: Bound = 1e4
    """Change of a running mean or standard deviation, in units of one plus the standard deviation before."""
    label: ClassVar[str] = "Protected"

    def problems(self, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[Problem]:
        """Yield each bound that an update of these arrays exceeds."""
        size = norm(update)
        if not size <= (most := self._most(before, update)):
            remedy = "give Protected another max_norm if honest clients send such updates"
            yield Problem("reply, update", f"has the norm {size:.4g}, above {most:.4g}", remedy)
        means = [name for name in update if is_statistic(name)]
        if means and self.statistics == "refuse":
            remedy = "let clients keep them, or give Protected statistics='bounded'"
            yield Problem(f"reply, {location_of(means[0])}", "is a running statistic, and none is accepted", remedy)
        elif means and self.statistics == "bounded":
            for name in means:
                yield from self._statistic(name, before, update)

    def _most(self, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> float:
        if self.max_norm is not None:
            return self.max_norm
        trained = {name: before[name] for name in update if not is_statistic(name)}
        return _USUAL * (norm(trained) + math.sqrt(sum(value.numel() for value in trained.values())))

    def _statistic(self, name: str, before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[Problem]:
        """Compare a running mean or variance with the one that the server holds."""
        old, new = before[name].double(), before[name].double() - update[name].double()
        where = f"reply, {location_of(name)}"
        if name.endswith(_VARIANCE):
            if bool((new < 0).any()):
                yield Problem(where, f"makes a variance negative ({float(new.min()):.4g})", "leave this reply out")
                return
            old, new = old.clamp(min=0).sqrt(), new.sqrt()
            scale = 1 + old
        else:
            variance = before.get(name.removesuffix("running_mean") + _VARIANCE)
            scale = 1 + old.abs() + (0 if variance is None else variance.double().clamp(min=0).sqrt())
        change = float(((new - old).abs() / scale).max()) if new.numel() else 0.0
        if not change <= self.max_change:
            what = f"moves a running statistic by {change:.4g} standard deviations, above {self.max_change:g}"
            yield Problem(where, what, "give Protected another max_change, or statistics='refuse'")

    def outliers(self, norms: Sequence[float]) -> Iterator[tuple[int, str]]:
        """Yield the replies whose update is too large compared with the round's others, each with the reason.

        The upper median of two norms is the larger one, so it takes more than half of the replies to exclude another.
        """
        if self.max_ratio is None or not norms:
            return
        usual = sorted(norms)[len(norms) // 2]
        for index, size in enumerate(norms):
            if usual > 0 and size > self.max_ratio * usual:
                what = f"has the norm {size:.4g}, above {self.max_ratio:g} times the round's median {usual:.4g}"
                yield index, str(Problem("reply, update", what, "give Protected another max_ratio if this is honest"))


def norm(update: Mapping[str, Tensor]) -> float:
    """Compute the l2 norm of the trained parameters, in double precision: squares of large float32 overflow."""
    parts = [torch.linalg.vector_norm(value.double()) for name, value in update.items() if not is_statistic(name)]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0


def finite(update: Tensors, after: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield the arrays that an update moves beyond their type's range; one infinity would spoil the mean of all."""
    for name in update:
        if not bool(after[name].isfinite().all()):
            yield Problem(
                f"reply, {location_of(name)}", "moves parameters beyond the range of their type", "leave this reply out"
            )


LOG = logging.getLogger("flwr.gradveil")
"""Logger whose messages Flower's console shows."""
RECORD = "metrics"
"""Name of the only `MetricRecord` per reply that the inner strategy gets."""
_MOST_WEIGHT = 2.0**53
"""Largest weight: larger whole numbers are not exact in float64, and two may add up to infinity."""
_NORM_BIT = "norm_bit"
Metrics = dict[str, int | float | list[int] | list[float]]


@dataclass(frozen=True)
class NeededMetrics:
    """The metrics that a strategy needs from each reply."""

    weights: frozenset[str]
    """Metrics that weight a reply."""
    numbers: frozenset[str]
    """Other numbers, at least 0."""
    most: float = _MOST_WEIGHT
    """Largest weight; larger weights are reduced to this."""
    equal: bool = False
    """Whether every reply has weight 1, because a strategy accounts for privacy with equal weights."""

    @staticmethod
    def of(strategy: Strategy, also: Sequence[str], most: float | None, training: bool = True) -> NeededMetrics:
        """Collect the metrics that a strategy and the strategies it wraps need, and `also` those named by the user."""
        strategies = list(_wrapped(strategy))
        weights = {str(key) for one in strategies if (key := getattr(one, "weighted_by_key", None))}
        losses = {str(key) for one in strategies if (key := getattr(one, "train_loss_key", None))}
        bits = {_NORM_BIT for one in strategies if isinstance(one, DifferentialPrivacyClientSideAdaptiveClipping)}
        numbers = {*also, *losses, *bits} if training else set[str]()
        equal = any(getattr(one, "accountant", None) is not None for one in strategies)
        return NeededMetrics(frozenset(weights), frozenset(numbers - weights), most or _MOST_WEIGHT, equal)

    def read(self, content: RecordDict) -> Metrics:
        """Read the metrics of a reply from all its records; refuse metrics that are missing or would spoil a mean."""
        metrics: Metrics = {}
        records: Mapping[str, MetricRecord] = content.metric_records
        for name, value in chain.from_iterable(each.items() for each in records.values()):
            if name in metrics and metrics[name] != value:
                raise fail("reply", f"has two values of {shown(name)}", "reply with one MetricRecord")
            metrics[name] = value
        if missing := (self.weights | self.numbers) - metrics.keys():
            remedy = "put it into the metrics of every reply"
            raise fail("reply", f"lacks the metric '{min(missing)}', which the strategy needs", remedy)
        for name, value in metrics.items():
            if not all(_is_finite(number) for number in (value if isinstance(value, list) else [value])):
                raise fail("reply", f"has metrics that are not finite ({shown(name)})", "leave this reply out")
        for name in self.numbers:
            if isinstance(value := metrics[name], list) or value < 0:
                raise fail("reply", f"has {value} as '{name}'", "reply with one number, at least 0")
        for name in self.weights:
            metrics[name] = self._weight(metrics[name])
        return metrics

    def _weight(self, value: float | list[int] | list[float]) -> int | float:
        if isinstance(value, list) or not 0 < value <= _MOST_WEIGHT:
            raise fail("reply", f"has the weight {value} in the mean", "reply with a positive number of examples")
        return 1 if self.equal else min(value, self.most)


def shared_metrics(number: int, replies: Sequence[Metrics]) -> list[MetricRecord]:
    """Keep the metrics that all replies of a round share, and log which are dropped."""
    forms = [{(name, len(v) if isinstance(v, list) else None) for name, v in metrics.items()} for metrics in replies]
    shared = {name for name, _ in set.intersection(*forms)} if forms else set[str]()
    if dropped := {name for metrics in replies for name in metrics} - shared:
        names = ", ".join(shown(name) for name in sorted(dropped)[:5]) + (", ..." if len(dropped) > 5 else "")
        LOG.warning("round %d: dropped metrics that not all replies have: %s", number, names)
    return [MetricRecord({name: metrics[name] for name in sorted(shared)}) for metrics in replies]


def shown(name: str) -> str:
    r"""Quote a client's text for a log: without control characters, at most 60 characters.

    >>> shown("a\nb")
    "'a\\nb'"
    """
    text = repr(name)
    return text if len(text) <= 60 else f"{text[:57]}...'"


def _wrapped(strategy: object) -> Iterator[Strategy]:
    while isinstance(strategy, Strategy):
        yield strategy
        strategy = getattr(strategy, "strategy", None)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        return False


@dataclass(frozen=True)
class Refusal:
    """A reply that was not aggregated, with the reason."""

    number: int
    """Of the round."""
    node: int
    reason: str


@dataclass(frozen=True)
class _Accepted:
    """A decoded reply within all bounds."""

    reply: Message
    name: str
    """Of its record of arrays."""
    arrays: ArrayRecord
    metrics: Metrics
    norm: float


class Protected(Strategy):
    """A strategy that aggregates the updates of protected clients: `Protected(FedAvg(fraction_evaluate=0))`.

    An update u of a client that received the parameters p is decoded to p - u, and the inner strategy aggregates those
    parameters. A reply is refused, with the reason in the log and in `refusals`, if it is unmarked (so it may be
    undefended), belongs to another model or round, is damaged, was not asked for, lacks a metric that the strategy
    needs, or exceeds a bound. If no reply is left, the inner strategy is not called and the model stays.

    Each reply is checked alone. The inner strategy gets one `MetricRecord` per reply, named "metrics", with the metrics
    that it needs and those that all accepted replies share. A reply that lacks one of `metrics` is refused. Other
    records are dropped.

    `trainable` has the patterns of `Client.trainable`, where not all parameters are trained. Parameters that are not
    sent stay.

    The bounds: `max_norm` limits the l2 norm of an update (None: far beyond any training). `max_ratio` limits the norm
    in units of the round's upper median, and assumes that more than half of the replies are honest (None: no limit).
    `max_examples` caps the weight of a reply. `statistics` of BatchNorm layers are refused ("refuse"), accepted within
    bounds ("bounded": variances at least 0, means and standard deviations move by at most `max_change` standard
    deviations), or accepted if finite ("accept").
    """

    def __init__(
        self,
        strategy: Strategy,
        trainable: Sequence[str] | None = None,
        *,
        metrics: Sequence[str] = (),
        max_norm: Ceiling = None,
        max_ratio: Ceiling = None,
        max_examples: Ceiling = None,
        statistics: Accepted = "bounded",
        max_change: float = 1e4,
    ) -> None:
        """Wrap a strategy."""
        self.strategy = strategy
        self.trainable = trainable
        self.bounds = Bounds(max_norm, max_ratio, max_examples, statistics, max_change)
        self.needed = NeededMetrics.of(strategy, metrics, max_examples)
        self.refusals: list[Refusal] = []
        """Every reply that was not aggregated."""
        self._asked: dict[int, tuple[str, ArrayRecord]] = {}
        self._evaluating: set[int] = set()
        self._round = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Mark the inner strategy's messages, and remember the model that each node is sent."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._round, self._asked = server_round, {}
        for message in messages:
            message.content[MARK] = mark(server_round)
            name, sent = only_arrays(message.content, "message")
            if name == RECORD:
                raise fail("strategy.arrayrecord_key", f"is '{RECORD}', the name of the metrics", "choose another name")
            self._asked[message.metadata.dst_node_id] = name, sent
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies, and let the inner strategy aggregate the accepted ones."""
        answers = list(replies)
        failed = [reply for reply in answers if reply.has_error()]
        decoded_replies = list(self._decode(reply for reply in answers if not reply.has_error()))
        large = dict(self.bounds.outliers([one.norm for one in decoded_replies]))
        for index, reason in large.items():
            self._refuse(decoded_replies[index].reply.metadata.src_node_id, reason)
        accepted = [one for index, one in enumerate(decoded_replies) if index not in large]
        for one, shared in zip(accepted, shared_metrics(self._round, [one.metrics for one in accepted]), strict=True):
            one.reply.content = RecordDict({one.name: one.arrays, RECORD: shared})
        kept = [one.reply for one in accepted]
        if len(kept) + len(failed) < len(answers):
            number = len(answers) - len(failed) - len(kept)
            LOG.warning("round %d: %d of %d replies were refused", server_round, number, len(answers))
        if not kept and len(answers) > len(failed):
            LOG.error("round %d: no reply was accepted, the model stays as it was", server_round)
            return None, None
        _, before = next(iter(self._asked.values()), ("", ArrayRecord()))
        arrays, metrics = self.strategy.aggregate_train(server_round, [*kept, *failed])
        after = None if arrays is None else _as_before(arrays, before)
        if after is not None and not all(np.isfinite(array.numpy()).all() for array in after.values()):
            LOG.error("round %d: the aggregate is not finite, the model stays as it was", server_round)
            after = None
        return after, metrics

    def _decode(self, replies: Iterable[Message]) -> Iterator[_Accepted]:
        """Decode each reply, and refuse those that fail a check."""
        unanswered = dict(self._asked)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in unanswered:
                    raise fail("reply", "was not asked for, or comes a second time", "find out who sends it")
                yield self._decoded(reply, *unanswered.pop(node))
            except GradveilError as error:
                self._refuse(node, str(error))

    def _decoded(self, reply: Message, name: str, sent: ArrayRecord) -> _Accepted:
        """Rebuild the reply of an app without a defence, in a record of the same name as the one it was sent."""
        content = reply.content
        if (number := marked(content)) != self._round:
            raise fail("reply", f"answers round {number}, not {self._round}", "leave this reply out: it is outdated")
        metrics = self.needed.read(content)
        received = tensors(sent)
        update = decoded(unpacked(content), trained(received, self.trainable), received)
        after = {n: value - update[n] if n in update else value for n, value in received.items()}
        refuse([*finite(update, after)] or [*self.bounds.problems(received, update)])
        return _Accepted(reply, name, record(after), metrics, norm(update))

    def _refuse(self, node: int, reason: str) -> None:
        LOG.warning("round %d: the reply of node %d is refused: %s", self._round, node, reason)
        self.refusals.append(Refusal(self._round, node, reason))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy, and remember which nodes are asked."""
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._evaluating = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate the accepted metrics; the arrays of a reply are dropped."""
        answers = list(replies)
        failed = [reply for reply in answers if reply.has_error()]
        needed = NeededMetrics.of(self.strategy, (), self.bounds.max_examples, training=False)
        unanswered, kept, values = set(self._evaluating), list[Message](), list[Metrics]()
        for reply in (reply for reply in answers if not reply.has_error()):
            node = reply.metadata.src_node_id
            try:
                if node not in unanswered:
                    raise fail("reply", "was not asked for, or comes a second time", "find out who sends it")
                unanswered.remove(node)
                values.append(needed.read(reply.content))
                kept.append(reply)
            except GradveilError as error:
                self._refuse(node, str(error))
        for reply, metrics in zip(kept, shared_metrics(server_round, values), strict=True):
            reply.content = RecordDict({RECORD: metrics})
        if not kept and len(answers) > len(failed):
            return None
        return self.strategy.aggregate_evaluate(server_round, [*kept, *failed])

    def summary(self) -> None:
        """Log the settings."""
        LOG.info("\t├──> Gradveil: only marked updates are aggregated, by %s", type(self.strategy).__name__)
        self.strategy.summary()


def _as_before(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Give the aggregate the dtypes of the sent model: some strategies widen them, and turn counts into floats."""
    kept: dict[str, Array] = {}
    for name, array in arrays.items():
        values, dtype = array.numpy(), np.dtype(before[name].dtype if name in before else array.dtype)
        whole = np.rint(values) if dtype.kind in "iu" else values
        kept[name] = array if values.dtype == dtype else Array(np.asarray(whole.astype(dtype)))
    return ArrayRecord(kept)
