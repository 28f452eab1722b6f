"""Small experiments to attack: a client, its update, and the ground truth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.space import Space
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.nn.models import build
from gradveil.spaces import ImageSpace


@dataclass
class Scene:
    """The inputs of an attack, and the ground truth."""

    client: Client
    observation: Observation
    knowledge: Knowledge
    truth: Batch


def tiny(target_clients: int = 3, examples: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0) -> Scene:
    """Build a smooth network on 1x6x6 inputs with four classes, at milliseconds per iteration."""
    generator = Key(seed, ("tiny",)).generator()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 4)).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.3, generator=generator)
    inputs = torch.rand(target_clients, examples, 1, 6, 6, dtype=dtype, generator=generator)
    targets = torch.randint(0, 4, (target_clients, examples), generator=generator)
    return observed(Client(model), Batch(inputs, targets), 4)


def pictures(model: str, data: str, target_clients: int, examples: int = 1) -> Scene:
    """Use bundled images and an untrained network of the library."""
    dataset = load(data).private
    count = target_clients * examples
    shape = tuple(dataset.inputs.shape[1:])
    net = build(
        model, channels=shape[0], size=32, classes=len(dataset.classes), generator=Key(0).child("model").generator()
    )
    inputs = dataset.inputs[:count].view(target_clients, examples, *shape)
    batch = Batch(inputs, dataset.targets[:count].view(target_clients, examples))
    return observed(Client(net), batch, len(dataset.classes), dataset.space)


def observed(client: Client, batch: Batch, classes: int, space: Space | None = None) -> Scene:
    """Compute and observe the client's update; without a space, inputs are pixels in [0, 1]."""
    space = space or ImageSpace(tuple(batch.inputs.shape[2:]))
    client = replace(client, domain=Domain(space, classes))
    params = client.params()
    sent, _ = client.updates(params, batch, {}, {})
    target_clients, examples = batch.targets.shape
    knowledge = Knowledge(space, classes, targets=batch.targets)
    return Scene(client, Observation(params, sent, examples, tuple(range(target_clients))), knowledge, batch)


def psnr(candidate: Tensor, truth: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each target client with the valid range as the peak."""
    scale = (upper - lower).to(candidate)
    error = ((candidate.clamp(lower.to(candidate), upper.to(candidate)) - truth) / scale).square().flatten(1).mean(1)
    return -10 * torch.log10(error)
