"""The client: one gradient, per-example gradients, local steps, public messages, state on disk."""

from gradveil.client.client import Client
from gradveil.client.local_training import Local
from gradveil.client.public_messages import announced, proposer, scheduled, speakers
from gradveil.client.secure_sum import summed
from gradveil.client.seeded_update import ClientTask, drawn_update, drawn_updates, first_gradient, idle_update
from gradveil.client.sending import steady
from gradveil.client.state_file import load_state, save_state
from gradveil.gradients.objective import cross_entropy

__all__ = [
    "Client",
    "ClientTask",
    "Local",
    "announced",
    "cross_entropy",
    "drawn_update",
    "drawn_updates",
    "first_gradient",
    "idle_update",
    "load_state",
    "proposer",
    "save_state",
    "scheduled",
    "speakers",
    "steady",
    "summed",
]
