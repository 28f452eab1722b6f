"""What both sides know: the network, how a client trains and defends itself, and who has which digits."""

from torch import Generator, nn

from gradveil.client import Client, Local
from gradveil.core import Batch
from gradveil.data import iid, load
from gradveil.defences import parse

DEFENCE = "dp(clip=1, sigma=0.5) + topk(0.2, feedback=true)"


def make_client() -> Client:
    """Build the defended client: per-example clipping and noise in every local step, then the largest entries alone."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return parse(DEFENCE)(Client(net, local=Local(batch=16, lr=0.5, epochs=2)))


def examples(number: int, clients: int) -> Batch:
    """Return one client's share of the bundled digits."""
    digits = load("digits", size=8).public
    part = iid(len(digits), clients, Generator().manual_seed(0))[number]
    return Batch(digits.inputs[part], digits.targets[part])


def held_out() -> Batch:
    """Return digits that no client has."""
    digits = load("digits", size=8).private
    return Batch(digits.inputs, digits.targets)
