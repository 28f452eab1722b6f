"""One round of one client with its noise drawn from a seed: the same streams in the engine and in deployments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gradveil.client.client import Client
from gradveil.client.local_training import LazyNoise
from gradveil.client.pipeline import Task
from gradveil.core.errors import UNFIT, Problem, refuse
from gradveil.core.noise import Address, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.check import check


class ClientTask(NamedTuple):
    """What a client computes an update of besides the parameters: its examples, its noise by address, its state."""

    batch: Batch
    key: Address
    state: Tensors


def drawn_update(
    client: Client, params: Tensors, batch: Batch, key: Address, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Compute what a client sends in the round that `key` addresses, and its next state.

    The noise of a local step is drawn when the step comes: thousands of steps' at once would fill memory. What cannot
    be computed is refused with its reasons, where `gradveil check` knows them.
    """
    with _reasons_of(client, batch):
        return client.pipeline(params, [_drawn(client, params, ClientTask(batch, key, state))])[0]


def idle_update(client: Client, params: Tensors, batch: Batch, key: Address, state: Tensors) -> tuple[Tensors, Tensors]:
    """Compute what a client sends in that round if its training comes to zeros; nothing of its examples is used."""
    blank = Batch(*(torch.zeros_like(value) for value in batch))
    task = _drawn(client, params, ClientTask(blank, key, state))
    return client.pipeline.of_zeros(params, blank, task.noise.once, state)


def first_gradient(client: Client, params: Tensors, task: ClientTask) -> tuple[Batch, Tensors]:
    """Draw again what the model gets for the first gradient of `drawn_update`: its examples, and its noise."""
    return client.pipeline.first_input(_drawn(client, params, task))


def drawn_updates(client: Client, params: Tensors, tasks: Sequence[ClientTask]) -> list[tuple[Tensors, Tensors]]:
    """Compute `drawn_update` of several clients in lockstep: the same draws, equal but for rounding."""
    with _reasons_of(client, tasks[0].batch):
        return client.pipeline(params, [_drawn(client, params, task) for task in tasks])


@contextmanager
def _reasons_of(client: Client, batch: Batch) -> Generator[None]:
    try:
        yield
    except UNFIT:
        refuse(_reasons(client, batch))
        raise


def _reasons(client: Client, batch: Batch) -> list[Problem]:
    """Check the model with a few of the examples, those of the first and the last class among them."""
    inputs, targets = batch
    if targets.ndim == 1 and 0 < len(targets) == len(inputs):
        some = [0, -1, int(targets.argmin()), int(targets.argmax())]
        batch = Batch(inputs[some], targets[some])
    copied = client.objective.copied()  # the own ones would keep what they have seen
    with torch.enable_grad():
        return check(copied.model, batch, copied.loss)


def _drawn(client: Client, params: Tensors, task: ClientTask) -> Task:
    """Draw what is drawn once; steps and epochs draw theirs when they come."""
    batch, key, state = task
    once, step, epoch = client.noise_parts(params, batch)

    def draw(spec: NoiseSpec, own: Address) -> Tensors:
        return spec.sample(own, batch.inputs.device)

    def of_step(t: int) -> Tensors:
        return draw(step, key.child(Stream.STEP, t))

    def of_epoch(e: int) -> Tensors:
        return draw(epoch, key.child(Stream.EPOCH, e))

    noise = draw(once, key) if client.local else draw(once, key) | draw(step, key)
    return Task(batch, LazyNoise(noise, of_step, of_epoch), state)
