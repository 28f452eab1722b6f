"""Clients' updates, their probes and their row norms for tests of optimal noise and pruning."""

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import OptimalNoise, OptimalPruning
from tests.laws.cases import Tiny, draw_batch


def relu_net() -> nn.Module:
    """Two of its units are off for every input of the tests."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    generator = Key(3).generator()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        net[1].bias[:2] = -50.0
    return net


def flat(tensors) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def context_of(client: Client, batch: Batch) -> Context:
    params = client.params()

    def gradient(own: Batch):
        return client.undefended_update().update(params, own, {}, {})[0]

    return Context(params, batch, gradient=gradient)


def setting(defence: OptimalNoise | OptimalPruning, model: nn.Module | None = None):
    """A client's update, its probes and context, and its row norms from one double backward pass a probe."""
    client = Client(model or Tiny())
    batch = draw_batch(Key(1))
    probe = defence.directions(batch).sample(Key(2))["probe"]
    context = context_of(client, batch)
    assert context.gradient is not None
    names = list(client.params())
    total = 0.0
    for direction in probe:
        _, products = torch.autograd.functional.jvp(
            lambda x: tuple(context.gradient(Batch(x, batch.targets))[n] for n in names), batch.inputs, direction
        )
        total = total + torch.cat([value.flatten() for value in products]).square()
    return context.gradient(batch), probe, context, (total / len(probe)).sqrt()


def scales(defence: OptimalNoise, g, probe: Tensor, context: Context):
    return defence.scales(g, defence.squares({}, {"probe": probe}, context))
