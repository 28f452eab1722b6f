"""Flower records of Gradveil: a mark in every message, and an update packed into one `Array`.

The server's messages carry the round's number under `gradveil`; a reply carries the same mark, its metrics, and one
`ArrayRecord` with the encoded update (`gradveil.wire.codec`) as its only entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.tree import Tensors, all_finite
from gradveil.nn.weight_files import is_statistic
from gradveil.wire.codec import Layout, decode, encode, fits
from gradveil.wire.header import location_of

MARK = "gradveil"
"""Name of the `ConfigRecord` that marks a message as one of Gradveil's."""
STYPE = "gradveil.v1"
"""Type of an `Array` that holds an encoded update."""
PACKED = "update"
"""Name of the only entry of a reply's `ArrayRecord`."""
COUNT = "num-examples"
"""The metric of a reply that holds its number of examples."""
Records = Mapping[str, MetricRecord | ConfigRecord]
"""Records of a reply besides the update: its metrics and other records of the app. No defence covers them."""


@dataclass(frozen=True)
class Question:
    """A server's message that asks a client to train in one round."""

    message: Message
    number: int
    """Of the round, counted from 1."""
    name: str
    """Of the `ArrayRecord` that holds the model, in the message and in the reply."""
    received: Tensors

    @staticmethod
    def of(message: Message) -> Question:
        """Read a training message; refuse one from a server that could not read the reply."""
        mark = message.content.config_records.get(MARK)
        if mark is None:
            remedy = "wrap the server's strategy: Protected(FedAvg(...))"
            raise fail("message", "is not marked: this server would mistake an encoded update for a model", remedy)
        name, record = only_arrays(message.content, "message")
        return Question(message, _number(mark, "message"), name, tensors(record))

    def reply(self, sent: bytes, records: Records) -> Message:
        """Reply with an encoded update and the other records."""
        content = RecordDict({self.name: packed(sent), **records, MARK: mark(self.number)})
        return Message(content, reply_to=self.message)


def mark(number: int) -> ConfigRecord:
    """Mark a message of round `number`."""
    return ConfigRecord({"round": number})


def marked(content: RecordDict) -> int:
    """Read the round that a reply answers; an unmarked reply is refused, because it may be undefended."""
    record = content.config_records.get(MARK)
    if record is None:
        remedy = "let the client reply through gradveil.integrations.flower: answer(...) or mods=[protect(...)]"
        raise fail("reply", "is not marked: it may be undefended", remedy)
    return _number(record, "reply")


def _number(record: ConfigRecord, where: str) -> int:
    number = record.get("round")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise fail(f"{where}.{MARK}", "does not give the number of the round", "use the same version on both sides")
    return number


def only_arrays(content: RecordDict, where: str) -> tuple[str, ArrayRecord]:
    """Return the one `ArrayRecord` of a message, with its name."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise fail(where, f"has {len(records)} ArrayRecords", "put the whole model into one")
    return records[0]


def packed(sent: bytes) -> ArrayRecord:
    """Put an encoded update into one `Array`."""
    return ArrayRecord({PACKED: Array("uint8", (len(sent),), STYPE, sent)})


def unpacked(content: RecordDict) -> bytes:
    """Take the encoded update out of a reply; anything else is refused."""
    _, record = only_arrays(content, "reply")
    array = record.get(PACKED)
    if len(record) != 1 or array is None or array.stype != STYPE:
        remedy = "put mods that change arrays after protect(...)"
        raise fail("reply", f"does not hold its update as one array of type '{STYPE}'", remedy)
    return array.data


def encoded(update: Mapping[str, Tensor]) -> bytes:
    """Encode an update as audits count it: sparse where that is smaller, deflated; NaN and infinity are refused."""
    remedy = "lower the step size, or look at the examples; nothing is sent, and the client's state stays as it was"
    refuse(
        [Problem(location_of(n), "is not finite", remedy) for n, value in update.items() if not all_finite({n: value})]
    )
    return encode(update, deflate=True)


def decoded(sent: bytes, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> Tensors:
    """Decode an update of these parameters; statistics of BatchNorm layers may come with it."""
    return decode(sent, layout_of(sent, params, statistics))


def layout_of(sent: bytes, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> Layout:
    """Return the layout of an update of these parameters: with the statistics of BatchNorm layers, or without."""
    more = {name: value for name, value in statistics.items() if name not in params and is_mean(name, value)}
    both = Layout.of({**params, **more})
    return both if more and fits(sent, both) else Layout.of(params)


def tensors(record: ArrayRecord) -> Tensors:
    """Read the arrays of a record."""
    values: Tensors = {}
    for name, array in record.items():
        try:
            values[name] = torch.from_numpy(array.numpy())
        except (TypeError, ValueError) as error:
            raise fail(f"arrays.{name}", f"cannot be read: {error}", "send NumPy arrays of numbers") from error
    return values


def record(values: Mapping[str, Tensor]) -> ArrayRecord:
    """Write tensors as a record that every Flower app reads."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in values.items()})


def is_mean(name: str, value: Tensor) -> bool:
    """Return whether an array is a statistic that can be averaged: a running mean or variance, not a count."""
    return is_statistic(name) and value.is_floating_point()


def trained(received: Mapping[str, Tensor], trainable: Iterable[str] | None) -> Tensors:
    """Select the trained arrays: those that match the patterns, or all of floating point except statistics.

    >>> names = {"w": torch.ones(1), "bn.running_mean": torch.ones(1), "steps": torch.ones(1, dtype=torch.long)}
    >>> list(trained(names, None)), list(trained({"head.w": torch.ones(1), **names}, ["head.*"]))
    (['w'], ['head.w'])
    """
    patterns = None if trainable is None else tuple(trainable)
    unused = [p for p in patterns or () if not any(fnmatchcase(name, p) for name in received)]
    if unused:
        known = ", ".join(received)
        raise GradveilError(Problem("trainable", f"'{p}' matches no array", f"arrays: {known}") for p in unused)
    selected = {
        name: value
        for name, value in received.items()
        if (
            value.dtype.is_floating_point and not is_statistic(name)
            if patterns is None
            else any(fnmatchcase(name, pattern) for pattern in patterns)
        )
    }
    if not selected:
        remedy = "send floating-point parameters, or name the trained ones in `trainable`"
        raise fail("arrays", "hold nothing that is trained", remedy)
    return selected


def number_of_examples(records: Iterable[object], *names: str) -> int | None:
    """Read the number of examples of an update from a reply's metrics, under one of these names; None if missing.

    >>> number_of_examples([MetricRecord({"loss": 0.1, "num-examples": 8})])
    8
    """
    metrics = (values for values in records if isinstance(values, MetricRecord))
    counts = [(name, values[name]) for values in metrics for name in names or (COUNT,) if name in values]
    if not counts:
        return None
    name, count = counts[0]
    if isinstance(count, list) or not (math.isfinite(count) and count >= 1):
        raise fail(f"reply.metrics.{name}", f"is {count}", "give the number of examples that were used, at least 1")
    return int(count)
