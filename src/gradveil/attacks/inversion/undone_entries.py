"""Undo a map of single entries that a defence applies to the gradient, as simulated clients show it.

A search that simulates such a defence descends through its derivative, which may be zero, or so uneven that few entries
decide. But whoever can simulate the client has pairs of a gradient's entry and what is sent for it, and reads the map
backwards: no derivative is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return whether what a client sends shows each entry of its gradient, one by one."""
    return _undone(client, client.params(), examples, {}, key) is not None


def _undone(client: Client, params: Tensors, examples: int, update: Tensors, key: Key) -> Tensors | None:
    """Read the map of each parameter's entries backwards at an update [V, *shape]; None where it does not fit."""
    if client.domain is None or (client.step is None and client.send is None):
        return None
    sent, gradients = simulated_pairs(client, params, examples, _CLIENTS, key)
    maps = {name: _pairs(sent[name][:-1], gradients[name][:-1]) for name in sent}
    off = total = 0.0
    for name, pairs in maps.items():
        off += float((_backwards(pairs, sent[name][-1]) - gradients[name][-1]).square().sum())
        total += float(gradients[name][-1].square().sum())
    if not off <= _NEAR**2 * total:
        return None
    return {name: _backwards(maps[name], value) for name, value in update.items()}


def _pairs(sent: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different numbers that were sent, in order, and the mean entry that each was sent for."""
    values, places = sent.flatten().unique(return_inverse=True)
    sums = torch.zeros_like(values).index_add_(0, places, gradients.flatten())
    return values, sums / torch.bincount(places, minlength=len(values))


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
