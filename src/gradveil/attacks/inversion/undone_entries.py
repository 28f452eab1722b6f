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

from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch

_CLIENTS = 6
"""Simulated clients whose entries are the pairs; one more tests what was read off them."""
_NEAR = 0.3
"""The largest relative error at which the gradient of the tested client is taken for undone."""


def without_map(
    observations: Sequence[Observation], client: Client, key: Key
) -> tuple[list[Observation], Client] | None:
    """Return what would have been seen without the defence of the update, and the client then; None if unknown."""
    if client.step is None and client.send is None:
        return None
    seen: list[Observation] = []
    for observation in observations:
        believed = observation.believed(client)
        undone = _undone(believed, observation.params, observation.examples, observation.update, key)
        if undone is None:
            return None
        seen.append(replace(observation, update=undone))
    return seen, client.undefended_update()


def is_map_of_entries(client: Client, examples: int, key: Key) -> bool:
    """Return whether what a client sends shows each entry of its gradient, one by one."""
    changed = client.step is not None or client.send is not None
    return changed and _undone(client, client.params(), examples, {}, key) is not None


def _undone(client: Client, params: Tensors, examples: int, update: Tensors, key: Key) -> Tensors | None:
    """Read the map of each parameter's entries backwards at an update [V, *shape]; None where it does not fit."""
    if client.domain is None:  # nobody says what an example is
        return None
    space, classes = client.domain.space, client.domain.classes
    like = next(iter(params.values()))
    lower, upper = space.bounds(like)
    generator = key.child(Stream.CANDIDATES).generator()
    drawn = torch.rand((_CLIENTS + 1, examples, *space.shape), dtype=like.dtype, generator=generator).to(like.device)
    # Gradients of faint images are short, so that small entries are among the pairs; the last client's are not faint.
    contrast = torch.linspace(0.1, 1.0, _CLIENTS + 1, dtype=like.dtype, device=like.device)
    drawn = 0.5 + (drawn - 0.5) * contrast.view(-1, 1, *[1] * len(space.shape))
    labels = torch.randint(classes, (_CLIENTS + 1, examples), generator=generator).to(like.device)
    batch = Batch(lower + (upper - lower) * drawn, labels)
    spec = client.noise_spec(params, Batch(batch.inputs[0], labels[0]))
    noise = stack([spec.sample(key.child(Stream.CANDIDATES, number), like.device) for number in range(_CLIENTS + 1)])
    state = {name: value.expand(_CLIENTS + 1, *value.shape) for name, value in client.init(params).items()}
    bare = client.undefended_update()
    own = bare.noise_spec(params, Batch(batch.inputs[0], labels[0]))
    with torch.no_grad():
        sent, _ = client.updates(params, batch, noise, state)
        gradients, _ = bare.updates(params, batch, {name: noise[name] for name in own}, {})
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
