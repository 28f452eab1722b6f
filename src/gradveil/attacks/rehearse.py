"""How a defence disturbs what is sent: the attacker plays the client himself, with public images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch


class Disturbance(NamedTuple):
    """What a defence does to the entries of a tensor, as mean squares."""

    sent: Tensor
    """What is added to an entry that is sent."""
    unsent: Tensor
    """What an entry that was sent as zero would have held, as a share of the sent entries' own mean square."""


def disturbances(
    client: Client, params: Tensors, batch: Batch, key: Key, parts: Sequence[Callable[[Tensors], Tensor]]
) -> list[Disturbance]:
    """Compare parts of what defended and undefended clients send for the same batches, with the model's noise the same.

    A factor that the parts share (a clip's) is no disturbance.
    """
    plain, one = client.undefended_update(), Batch(batch.inputs[0], batch.targets[0])
    spec, own = (believed.noise_spec(params, one) for believed in (client, plain))
    drawn = stack([spec.sample(key.child(row)) for row in range(batch.inputs.shape[0])])
    noise = {name: value.to(batch.inputs.device) for name, value in drawn.items()}
    defended = _sent(client, params, batch, noise)
    clean = _sent(plain, params, batch, {name: noise[name] for name in own if name in noise})
    pairs = [(part(defended).flatten(1).double(), part(clean).flatten(1).double()) for part in parts]
    whole, alone = (torch.cat(values, 1) for values in zip(*pairs, strict=True))
    alone = torch.where(whole != 0, alone, 0.0)
    tiny = torch.finfo(torch.float64).tiny
    scale = ((whole * alone).sum(1) / alone.square().sum(1).clamp_min(tiny)).unsqueeze(1)
    found = []
    for sent, was in pairs:
        kept = sent != 0
        count = kept.sum(1).clamp_min(1)
        size = sent.square().sum(1) / count
        missing = torch.where(kept, 0.0, scale * was).square().sum(1) / (~kept).sum(1).clamp_min(1)
        added = torch.where(kept, sent - scale * was, 0.0).square().sum(1) / count
        found.append(Disturbance(added.mean(), (missing / size.clamp_min(tiny)).mean()))
    return found


def _sent(client: Client, params: Tensors, batch: Batch, noise: Tensors) -> Tensors:
    count = batch.inputs.shape[0]
    state = {name: value.expand(count, *value.shape) for name, value in client.init(params).items()}
    sent, _ = client.updates(params, batch, noise, state)
    return {name: value.detach() for name, value in sent.items()}
