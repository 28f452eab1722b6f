"""Updates that an attack simulates of its answer, and their distance from what was observed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradveil.attacks.inversion.distances import cosine, median_cosine
from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch

_VALUES = 2**26
"""Numbers of updates that are simulated at once."""


class Simulated:
    """The simulated client of the round that is inverted: who keeps something has been in the rounds before it."""

    def __init__(self, simulated_client: Client, observations: Sequence[Observation]) -> None:
        """Simulate the round that was observed last, and those before it where the client keeps something."""
        self.seen = observations[-1]
        keeps = bool(simulated_client.init(self.seen.params))
        rounds = observations if keeps else observations[-1:]
        self.rounds = [(seen.round, seen.params, seen.believed(simulated_client)) for seen in rounds]
        self.at_once = max(1, _VALUES // sum(value[0].numel() for value in self.seen.update.values()))

    def send(self, batch: Batch, key: Key) -> Iterator[Tensors]:
        """Let clients send updates for batches [N, B, ...], with fresh noise: some of the N after the other."""
        rows = torch.arange(len(batch.inputs)).split(self.at_once)
        for some in rows:
            yield self._send(Batch(batch.inputs[some], batch.targets[some]), [key.child(row) for row in some.tolist()])

    def _send(self, batch: Batch, keys: Sequence[Key]) -> Tensors:
        one = Batch(batch.inputs[0], batch.targets[0])
        state: Tensors = {}
        sent: Tensors = {}
        for place, (number, params, simulated_client) in enumerate(self.rounds):
            spec = simulated_client.noise_spec(params, one)
            drawn = stack([spec.sample(key.child(Stream.ROUND, number) if number else key) for key in keys])
            noise = {name: value.to(batch.inputs.device) for name, value in drawn.items()}
            if not place:
                state = {n: v.expand(len(keys), *v.shape) for n, v in simulated_client.init(params).items()}
            elif "kept.joined" in state:  # what a client keeps to itself it has drawn in its first round
                noise |= torch.func.vmap(simulated_client.own)(noise, state)
            sent, state = simulated_client.updates(params, batch, noise, state)
            state = {name: value.detach() for name, value in state.items()}
        return {name: value.detach() for name, value in sent.items()}

    def match(self, inputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Return 1 - cosine of what images would send and what was observed, and of the median layer: [V, 2].

        It is infinite where it is no number.
        """
        parts = list(self.send(Batch(inputs, targets), key.child(Stream.CHECK)))
        sent = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        value = torch.stack([cosine(sent, self.seen.update), median_cosine(sent, self.seen.update)], 1)
        return torch.where(torch.isfinite(value), value, torch.inf)
