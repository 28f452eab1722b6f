"""Groups of clients that compute at once in a round, chosen by shapes and sizes.

The rule ignores everything that differs between runs, such as times or free memory: a resumed training computes with
the same groups, and so ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from gradveil.client import Client, ClientTask, drawn_update, drawn_updates
from gradveil.core.chain import split
from gradveil.core.errors import UNFIT
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Batch
from gradveil.core.working_time import working_time
from gradveil.gradients.fused import written_bytes
from gradveil.gradients.objective import mean_gradient

Together = Literal["auto"] | bool
"""When the clients of a round compute at once: if it is faster (`auto`), whenever possible, or never."""
MOST_EXAMPLES = 16
"""Largest number of examples per gradient for which `auto` computes clients at once; see docs/performance.md."""
MOST_WRITTEN = 8 * 2**20
"""Largest number of bytes that a client's gradient may write for `auto`."""
FEWEST = 4
"""Smallest group of clients: smaller ones gain little."""
_BUDGET = {"cpu": 2**28}
"""Bytes that the gradients of a group may write."""
_BUDGET_ELSEWHERE = 2**32
_COPIES = 8
"""Copies of a client's parameters in memory while it trains: parameters, gradient, moments, temporaries."""


class Sent(NamedTuple):
    """One client's result."""

    client: int
    update: Tensors
    state: Tensors
    seconds: float
    """Its share of its group's time: of the processor, or on a GPU until it is done."""


def compute(client: Client, params: Tensors, tasks: Mapping[int, ClientTask], together: Together) -> Iterator[Sent]:
    """Compute every client's update of a round, group by group."""
    device = next(iter(params.values())).device
    for group in groups(client, params, {number: task.batch for number, task in tasks.items()}, together):
        started = working_time(device)
        if len(group) == 1:
            made = [drawn_update(client, params, *tasks[group[0]])]
        else:
            made = drawn_updates(client, params, [tasks[number] for number in group])
        seconds = (working_time(device) - started) / len(group)
        for number, (update, state) in zip(group, made, strict=True):
            yield Sent(number, update, state, seconds)


def groups(client: Client, params: Tensors, batches: Mapping[int, Batch], together: Together) -> list[tuple[int, ...]]:
    """Split the clients of a round, given with their batches, into groups that compute at once.

    Within a group the examples of a gradient have equal shapes, and clients with more local steps come first. The
    memory that gradients may write limits a group's size; groups are about equally large.
    """
    alone = [(number,) for number in batches]
    if not together or client.pipeline.private.layers or len(batches) < FEWEST:
        return alone
    alike: dict[Any, list[int]] = {}
    for number, batch in batches.items():
        alike.setdefault(_shapes(_at_once(client, batch)), []).append(number)
    result: list[tuple[int, ...]] = []
    for numbers in alike.values():
        most = _most(client, params, [batches[number] for number in numbers], together)
        parts = ceil(len(numbers) / most)
        size = ceil(len(numbers) / parts)
        numbers.sort(key=lambda number: -_steps(client, batches[number]))
        if size < FEWEST:
            result += [(number,) for number in numbers]
        else:
            result += [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]
    return result


def _most(client: Client, params: Tensors, batches: Sequence[Batch], together: Together) -> int:
    """Return the largest number of clients with such batches that compute at once."""
    first = _at_once(client, batches[0])
    examples, device = len(first.inputs), first.inputs.device.type
    if together == "auto" and examples > MOST_EXAMPLES:
        return 1
    try:
        written = _written(client, params, first)
    except UNFIT:  # the error is raised when the client computes alone
        return 1
    if together == "auto" and written > MOST_WRITTEN:
        return 1
    size = sum(value.nbytes for value in params.values())
    rows = examples if split(client.step)[0] is not None else 0
    held = max(batch.inputs.nbytes for batch in batches) if client.batch else 0
    per_client = written + (_COPIES + 2 * rows) * size + held
    return max(1, _BUDGET.get(device, _BUDGET_ELSEWHERE) // per_client)


def _at_once(client: Client, batch: Batch) -> Batch:
    """Return the first examples of a client, as many as one gradient uses."""
    count = len(batch.inputs) if client.local is None else client.local.at_once(len(batch.inputs))
    return Batch(batch.inputs[:count], batch.targets[:count])


def _steps(client: Client, batch: Batch) -> int:
    return 1 if client.local is None else client.local.count(len(batch.inputs))


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype, value.device) for value in batch)


def _written(client: Client, params: Tensors, batch: Batch) -> int:
    """Count the bytes that the gradient of these examples writes, cached by shape."""
    known = _WRITTEN.setdefault(client.model, {})
    key = (client.loss, tuple(client.trained()), _shapes(batch))
    if key not in known:
        names = set(client.trained())
        trained = {name: value for name, value in params.items() if name in names}
        frozen = {name: value for name, value in params.items() if name not in names}
        off = select(client.noise_parts(params, batch).step.neutral(), "model")
        noise = {name: value.to(batch.inputs.device) for name, value in off.items()}
        known[key] = written_bytes(lambda: mean_gradient(client.objective, trained, frozen, batch, noise))
    return known[key]


_WRITTEN: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()
