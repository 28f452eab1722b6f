"""Small federations that learn something in a second."""

import torch
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.engine import ClientShare, Federation


def blobs(count, seed, classes=3):
    """Points around the corners of a triangle in eight dimensions: a linear model tells most of them apart."""
    generator = Key(seed).generator()
    targets = torch.arange(count) % classes
    centres = torch.randn(classes, 8, generator=Key(99).generator(), dtype=torch.float64)
    noise = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return Batch((centres[targets] + 0.7 * noise).view(count, 1, 2, 4), targets)


def net(seed=0):
    """A small classifier of these points."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    generator = Key(seed).generator()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.3, generator=generator)
    return model


def federation(text="none", clients=4, local=Local(batch=5, lr=0.1, epochs=1), validation=True, **settings):  # noqa: B008
    """A federation of clients with 20, 21, 22, ... examples."""
    shares = [ClientShare(blobs(20 + i, 10 + i), blobs(9, 50 + i) if validation else None) for i in range(clients)]
    client = parse(text)(Client(net(), local=local), Key(3))
    settings.setdefault("key", Key(7))
    return Federation(client, shares, blobs(90, 5), **settings)
