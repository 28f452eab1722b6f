"""The client: one gradient, per-example gradients, local steps, public messages, state on disk."""

from gradveil.client.client import Client, looped_updates
from gradveil.client.local_training import BatchDefences, LazyNoise, Local
from gradveil.client.pipeline import Pipeline, Task, finite_or_before
from gradveil.client.public_messages import announced, proposer, scheduled, speakers, takes_turns
from gradveil.client.seeded_update import ClientTask, drawn_update, drawn_updates, first_gradient, idle_update
from gradveil.client.simulated_client import cosine_distances, kept_direction, layer_statistics, transformed_batch
from gradveil.client.state_file import load_state, save_state
from gradveil.gradients.objective import cross_entropy, is_cross_entropy, usual_loss

__all__ = [
    "BatchDefences",
    "Client",
    "ClientTask",
    "LazyNoise",
    "Local",
    "Pipeline",
    "Task",
    "announced",
    "cosine_distances",
    "cross_entropy",
    "drawn_update",
    "drawn_updates",
    "finite_or_before",
    "first_gradient",
    "idle_update",
    "is_cross_entropy",
    "kept_direction",
    "layer_statistics",
    "load_state",
    "looped_updates",
    "proposer",
    "save_state",
    "scheduled",
    "speakers",
    "takes_turns",
    "transformed_batch",
    "usual_loss",
]
