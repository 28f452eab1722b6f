"""Clients of a round that compute at once, and how many: a rule of shapes and sizes.

It depends on nothing that differs from one run to the next, such as times or free memory: a training that is taken up
again computes with the same groups, and so ends with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradveil.client import Client, ClientTask, drawn_update, drawn_updates
from gradveil.core.chain import split
from gradveil.core.errors import UNFIT
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Batch
from gradveil.gradients.fused import written_bytes
from gradveil.gradients.objective import mean_gradient

Together = Literal["auto"] | bool
"""Whether the clients of a round compute at once: where it is faster (`auto`), wherever they can, or never."""
MOST_EXAMPLES = 16
"""Examples of a gradient up to which `auto` has clients compute at once; see docs/performance.md."""
MOST_WRITTEN = 8 * 2**20
"""Bytes that a client's gradient may write for that."""
FEWEST = 4
"""Clients of a group: with fewer there is little to gain."""
_BUDGET = {"cpu": 2**28}
"""Bytes that the gradients of a group may write."""
_BUDGET_ELSEWHERE = 2**32
_COPIES = 8
"""Times that a client's parameters are held while it trains: where it is, its gradient, moments, what is between."""


class Sent(NamedTuple):
    """What one client came to."""

    client: int
    update: Tensors
    state: Tensors
    seconds: float
    """Its share of the time of those who computed at once."""


def compute(client: Client, params: Tensors, tasks: Mapping[int, ClientTask], together: Together) -> Iterator[Sent]:
    """Compute every client's update of a round, group by group."""
    for group in groups(client, params, {number: task.batch for number, task in tasks.items()}, together):
        started = time.perf_counter()
        if len(group) == 1:
            made = [drawn_update(client, params, *tasks[group[0]])]
        else:
            made = drawn_updates(client, params, [tasks[number] for number in group])
        seconds = _since(started, made[-1][0]) / len(group)
        for number, (update, state) in zip(group, made, strict=True):
            yield Sent(number, update, state, seconds)


def groups(client: Client, params: Tensors, batches: Mapping[int, Batch], together: Together) -> list[tuple[int, ...]]:
    """Part the clients of a round, named with what each computes with, into those who compute at once.

    Within a group the examples of a gradient have equal shapes; the clients with more local steps come first. A group
    is no larger than its gradients may write; the groups come out about equal.
    """
    alone = [(number,) for number in batches]
    if not together or client.pipeline.private.layers or len(batches) < FEWEST:
        return alone
    alike: dict[Any, list[int]] = {}
    for number, batch in batches.items():
        alike.setdefault(_shapes(_at_once(client, batch)), []).append(number)
    found: list[tuple[int, ...]] = []
    for numbers in alike.values():
        most = _most(client, params, [batches[number] for number in numbers], together)
        parts = ceil(len(numbers) / most)
        size = ceil(len(numbers) / parts)
        numbers.sort(key=lambda number: -_steps(client, batches[number]))
        if size < FEWEST:
            found += [(number,) for number in numbers]
        else:
            found += [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]
    return found


def _most(client: Client, params: Tensors, batches: Sequence[Batch], together: Together) -> int:
    """Say how many clients with such batches compute at once."""
    shown = _at_once(client, batches[0])
    examples, device = len(shown.inputs), shown.inputs.device.type
    if together == "auto" and examples > MOST_EXAMPLES:
        return 1
    try:
        written = _written(client, params, shown)
    except UNFIT:  # one client alone says what does not fit
        return 1
    if together == "auto" and written > MOST_WRITTEN:
        return 1
    size = sum(value.nbytes for value in params.values())
    rows = examples if split(client.step)[0] is not None else 0
    held = max(batch.inputs.nbytes for batch in batches) if client.batch else 0
    each = written + (_COPIES + 2 * rows) * size + held
    return max(1, _BUDGET.get(device, _BUDGET_ELSEWHERE) // each)


def _at_once(client: Client, batch: Batch) -> Batch:
    """Return as many of a client's examples as one gradient is computed of."""
    count = len(batch.inputs) if client.local is None else client.local.at_once(len(batch.inputs))
    return Batch(batch.inputs[:count], batch.targets[:count])


def _steps(client: Client, batch: Batch) -> int:
    return 1 if client.local is None else client.local.count(len(batch.inputs))


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype, value.device) for value in batch)


def _written(client: Client, params: Tensors, shown: Batch) -> int:
    """Count what the gradient of these examples writes; it is computed once for each shape."""
    known = _WRITTEN.setdefault(client.model, {})
    key = (client.loss, tuple(client.trained()), _shapes(shown))
    if key not in known:
        names = set(client.trained())
        trained = {name: value for name, value in params.items() if name in names}
        frozen = {name: value for name, value in params.items() if name not in names}
        off = select(client.noise_parts(params, shown).step.neutral(), "model")
        noise = {name: value.to(shown.inputs.device) for name, value in off.items()}
        known[key] = written_bytes(lambda: mean_gradient(client.objective, trained, frozen, shown, noise))
    return known[key]


_WRITTEN: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()


def _since(started: float, made: Tensors) -> float:
    """Say how long it took to make this; a GPU is waited for."""
    if any(value.is_cuda for value in made.values()):
        torch.cuda.synchronize()
    return time.perf_counter() - started
