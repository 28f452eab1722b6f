"""Undo a map of single entries that a defence applies to the gradient, as simulated clients show it.

A search that simulates such a defence descends through its derivative, which may be zero, or so uneven that few entries
decide. But whoever can simulate the client has pairs of a gradient's entry and what is sent for it, and reads the map
backwards: no derivative is needed. Where random numbers take part, the pairs show what an entry is on average, given
what was sent for it: noise that hides most entries and leaves others alone shows by its size which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.inversion.simulated_gradients import simulated_pairs
from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors

_CLIENTS = 7
"""Simulated clients: the last one tests what was read off the others."""
_NEAR = 0.3
"""The largest relative error at which the gradient of the tested client is taken for undone."""
_GROUPS, _FEWEST, _MOST = 64, 16, 256
"""Groups of pairs whose mean is read off a map with randomness, as far as each has so many pairs and no more."""
_SOME, _TIMES = 0.03, 2.0
"""Share of the gradient's square that such means have to explain, and how many times what multiples explain."""


def without_map(
    observations: Sequence[Observation], client: Client, key: Key
) -> tuple[list[Observation], Client] | None:
    """Return what would have been seen without the defence of the update, and the client then; None if unknown."""
    seen: list[Observation] = []
    for observation in observations:
        undone = _undone(
            observation.believed(client), observation.params, observation.examples, observation.update, key
        )
        if undone is None:
            return None
        seen.append(replace(observation, update=undone))
    return seen, client.undefended_update()


def is_map_of_entries(client: Client, examples: int, key: Key) -> bool:
    """Return whether what a client sends shows entries of its gradient, one by one, or what they are on average."""
    return _undone(client, client.params(), examples, {}, key) is not None


def _undone(client: Client, params: Tensors, examples: int, update: Tensors, key: Key) -> Tensors | None:
    """Read the map of each parameter's entries backwards at an update [V, *shape]; None where it does not fit."""
    if client.domain is None or (client.step is None and client.send is None):
        return None
    sent, gradients = simulated_pairs(client, params, examples, _CLIENTS, key)
    pairs = {name: (sent[name][:-1].flatten(), gradients[name][:-1].flatten()) for name in sent}
    maps = {name: _means(*pair) for name, pair in pairs.items()}

    total = sum(float(gradients[name][-1].square().sum()) for name in sent)
    if not total:
        return None

    def error(guessed: Tensors) -> float:
        return sum(float((guessed[name] - gradients[name][-1]).square().sum()) for name in sent) / total

    def read(maps: Mapping[str, tuple[Tensor, Tensor]], update: Tensors) -> Tensors:
        return {name: _backwards(maps[name], value) for name, value in update.items()}

    def within(maps: Mapping[str, tuple[Tensor, Tensor]], update: Tensors) -> Tensors:
        # A mean says nothing of numbers beyond those that it was read off.
        return {name: value.clamp(maps[name][0][0], maps[name][0][-1]) for name, value in update.items()}

    tested = {name: value[-1] for name, value in sent.items()}
    if error(read(maps, tested)) <= _NEAR**2:
        return read(maps, update)
    grouped = {name: _grouped(*pair) for name, pair in pairs.items()}
    slopes = {name: (v @ g) / (v @ v) for name, (v, g) in pairs.items()}
    multiples = {name: (slopes[name] * value).nan_to_num() for name, value in tested.items()}
    explained, by_multiples = (1 - error(guessed) for guessed in (read(grouped, within(grouped, tested)), multiples))
    return read(grouped, within(grouped, update)) if explained >= max(_SOME, _TIMES * by_multiples) else None


def _means(sent: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different numbers that were sent, in order, and the mean entry that each was sent for."""
    values, places = sent.unique(return_inverse=True)
    return values, _of_each(entries, places, len(values))


def _grouped(sent: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of neighbouring numbers that were sent, in order, and of the entries that they were sent for.

    Equal numbers are in one group.
    """
    order = sent.argsort()
    numbers = sent[order]
    size = min(max(len(order) // _GROUPS, _FEWEST), _MOST)
    first = torch.searchsorted(numbers, numbers)  # the place of the first equal number
    _, places = (first // size).unique_consecutive(return_inverse=True)
    count = int(places[-1]) + 1
    return _of_each(numbers, places, count), _of_each(entries[order], places, count)


def _of_each(numbers: Tensor, places: Tensor, count: int) -> Tensor:
    return torch.zeros(count).to(numbers).index_add_(0, places, numbers) / torch.bincount(places, minlength=count)


def _backwards(pairs: tuple[Tensor, Tensor], sent: Tensor) -> Tensor:
    """Interpolate between the pairs, and go on with the slope of the outer tenth beyond them."""
    values, entries = pairs
    if len(values) == 1:
        return entries.expand(sent.shape)
    right = torch.searchsorted(values, sent.contiguous()).clamp(1, len(values) - 1)
    left, tenth = right - 1, max(1, len(values) // 10)
    left = torch.where(sent > values[-1], len(values) - 1 - tenth, left)
    right = torch.where(sent < values[0], tenth, right)
    slope = (entries[right] - entries[left]) / (values[right] - values[left])
    return entries[left] + (sent - values[left]) * slope
