"""Public messages of a round: what some clients announce before it.

A server that runs a round asks `client.send.speakers()` clients for their proposals, announces the messages made of
them, and lets everybody send with those. It knows no defence: the transforms say what is proposed and announced.

The number of the round is public, too. A transform that follows a schedule is another one in each round (`in_round`):
it needs no state, and whoever knows the defence knows the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gradveil.client.client import Client
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, under
from gradveil.core.types import Batch, Context, HasMessages, Stage, Transform


def speakers(client: Client) -> int:
    """Count the clients who have to speak before a round."""
    return client.send.speakers() if isinstance(client.send, HasMessages) else 0


def takes_turns(client: Client) -> bool:
    """Return whether clients speak in turn, instead of being drawn at random in each round."""
    return isinstance(client.send, HasMessages) and client.send.takes_turns()


def proposer(client: Client) -> Client:
    """Return the same client, except that its update is what it proposes before the round."""
    send = client.send
    return replace(client, messages={}, send=_Proposing(send)) if isinstance(send, HasMessages) else client


def scheduled(client: Client, number: int) -> Client:
    """Return the client as it is in round `number` = 0, 1, ...: its transforms may follow a schedule."""
    step, send = (slot.in_round(number) if slot else None for slot in (client.step, client.send))
    return client if step is client.step and send is client.send else replace(client, step=step, send=send)


def announced(client: Client, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Client:
    """Return the client of round `number` = 0, 1, ..., as it is then: it has heard the messages.

    `proposals` are the updates of `proposer(client)` of `speakers(client)` clients, leading U; `previous` is the mean
    of what all clients sent in the round before, empty in the first.
    """
    client = scheduled(client, number)
    if not isinstance(client.send, HasMessages):
        return client
    return replace(client, messages=under("send", client.send.announce(proposals, previous, number)))


@dataclass(frozen=True)
class _Proposing(Transform):
    """What a client says instead of what it sends."""

    inner: Transform
    stage = Stage.PRUNE

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the state of the client who sends."""
        return self.inner.init(params)

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare what the client who sends draws."""
        return self.inner.noise(params)

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare what the client who sends draws."""
        return self.inner.directions(batch)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Propose; the state stays, since nothing is sent."""
        assert isinstance(self.inner, HasMessages)
        return self.inner.proposal(update, state, noise, context), state
