"""One round of one client with its noise drawn from a seed: the same streams in the engine and in deployments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.client.client import Client
from gradveil.client.many_clients import Trainee
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
        return client.trained_update(params, *_trainee(client, params, ClientTask(batch, key, state)))


def idle_update(client: Client, params: Tensors, batch: Batch, key: Address, state: Tensors) -> tuple[Tensors, Tensors]:
    """Compute what a client sends in that round if its training comes to zeros; nothing of its examples is used."""
    blank = Batch(*(torch.zeros_like(value) for value in batch))
    task = _trainee(client, params, ClientTask(blank, key, state))
    return client.idle_update(params, blank, task.noise, state)


def first_gradient(client: Client, params: Tensors, task: ClientTask) -> tuple[Batch, Tensors]:
    """Draw again what the model gets for the first gradient of `drawn_update`: its examples, and its noise."""
    batch, once, of_step, of_epoch, state = _trainee(client, params, task)
    return client.first_given(batch, once, of_step, of_epoch, state)


def drawn_updates(client: Client, params: Tensors, tasks: Sequence[ClientTask]) -> list[tuple[Tensors, Tensors]]:
    """Compute `drawn_update` of several clients at once (`Client.abreast`): the same draws, equal but for rounding."""
    with _reasons_of(client, tasks[0].batch):
        return client.abreast(params, [_trainee(client, params, task) for task in tasks])


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


def _trainee(client: Client, params: Tensors, task: ClientTask) -> Trainee:
    """Draw what is drawn once, and say how the rest is drawn when it is asked for."""
    batch, key, state = task
    device = batch.inputs.device
    each = client.step_spec(params, batch)

    def drawn(spec: NoiseSpec, own: Address) -> dict[str, Tensor]:
        return spec.sample(own, device)

    once = drawn(client.round_spec(params, batch), key)
    if client.local is None:
        once |= drawn(each, key)
    epoch = client.epoch_spec(batch)

    def of_step(t: int) -> dict[str, Tensor]:
        return drawn(each, key.child(Stream.STEP, t))

    def of_epoch(e: int) -> dict[str, Tensor]:
        return drawn(epoch, key.child(Stream.EPOCH, e))

    return Trainee(batch, once, of_step, of_epoch, state)
