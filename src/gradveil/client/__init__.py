"""The client: one gradient, per-example gradients, local steps, public messages, state on disk."""

from gradveil.client.client import Client
from gradveil.client.drawn import Task, drawn_update, drawn_updates, first_gradient
from gradveil.client.gradient import cross_entropy
from gradveil.client.local import Local
from gradveil.client.messages import announced, proposer, scheduled, speakers
from gradveil.client.state import load_state, save_state
from gradveil.client.steady import steady
from gradveil.client.summed import summed

__all__ = [
    "Client",
    "Local",
    "Task",
    "announced",
    "cross_entropy",
    "drawn_update",
    "drawn_updates",
    "first_gradient",
    "load_state",
    "proposer",
    "save_state",
    "scheduled",
    "speakers",
    "steady",
    "summed",
]
