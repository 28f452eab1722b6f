"""What a defence does to the entries of an update: noise, zeros, and the order of magnitudes that zeros reveal.

The simulated client defends gradients of normal random numbers, as large as those observed. All of their entries are
nonzero, so that every zero it sends is the defence's, and every difference that is no common factor is noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.chain import split
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch

_DRAWS = 4
_QUIET = 1e-4
"""Errors below this share of the entries are rounding."""
_ORDERED = 0.01
"""Largest share of unsent entries between the sent ones up to which magnitudes decide what is sent."""


@dataclass(frozen=True)
class SentEntries:
    """The treatment of the entries of one parameter."""

    noise: float = 0.0
    """Standard deviation of the error of a sent entry."""
    most: int = 0
    """Most entries that are sent: all, if none are set to zero."""
    largest: int = 0
    """Entries that are set to zero because they are the largest."""
    ordered: bool = False
    """Whether other entries are set to zero because they are smaller than those sent."""

    def masked(self, size: int) -> bool:
        """Return whether entries are set to zero."""
        return self.most < size


def sent_entries(client: Client, seen: Observation, shape: tuple[int, ...], key: Key) -> dict[str, SentEntries]:
    """Learn the treatment of each parameter from gradients of random numbers that the client defends."""
    client, like = seen.believed(client), next(iter(seen.params.values()))
    batch = Batch(like.new_zeros(1, *shape), torch.zeros(1, dtype=torch.long, device=like.device))
    spec, state = client.noise_spec(seen.params, batch), client.init(seen.params)
    each, _ = split(client.step)
    pairs = list[tuple[Tensors, Tensors]]()
    for number in range(_DRAWS):
        mine = key.child(Stream.DISTURBANCE, number)
        generator = mine.generator()
        dense = {
            name: _size(value) * torch.randn(value.shape[1:], generator=generator).to(value)
            for name, value in seen.update.items()
        }
        noise = {name: value.to(like.device) for name, value in spec.sample(mine).items()}
        # A step for single examples expects their axis in front.
        given = {name: value.unsqueeze(0) for name, value in dense.items()} if each is not None else dense
        with torch.no_grad():
            sent, _ = client.pipeline.of_gradient(seen.params, given, batch, noise, state)
        pairs.append((dense, {name: sent[name] for name in dense}))
    return {name: _of([(dense[name].flatten(), sent[name].flatten()) for dense, sent in pairs]) for name in pairs[0][0]}


def _size(values: Tensor) -> Tensor:
    """Return the root mean square of sent entries."""
    return (values.square().sum() / (values != 0).sum().clamp_min(1)).sqrt().clamp_min(1e-12)


def _of(pairs: list[tuple[Tensor, Tensor]]) -> SentEntries:
    """Compare random gradients with what was sent of them."""
    errors, kept, large, small, between = list[float](), list[int](), list[int](), list[int](), 0
    for dense, sent in pairs:
        mask = sent != 0
        kept.append(int(mask.sum()))
        if not kept[-1]:
            return SentEntries()
        # A clip or another common factor is no noise: it is fitted, and only the rest counts.
        scale = (dense[mask] * sent[mask]).sum() / dense[mask].square().sum()
        error = (sent[mask] - scale * dense[mask]).square().mean().sqrt()
        errors.append(float(error) if error > _QUIET * _size(sent) else 0.0)
        sizes, magnitude = dense[mask].abs(), dense[~mask].abs()
        large.append(int((magnitude >= sizes.max()).sum()))
        small.append(int((magnitude <= sizes.min()).sum()))
        between += len(magnitude) - large[-1] - small[-1]
    unsent = sum(large) + sum(small) + between
    by_size = unsent > 0 and between <= _ORDERED * unsent
    constant = by_size and len(set(large)) == 1
    noise = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    return SentEntries(noise, max(kept), large[0] if constant else 0, by_size and any(small))
