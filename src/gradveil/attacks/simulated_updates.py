"""Updates that an attack simulates of its answer, and their distance from what was observed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradveil.attacks.inversion.distances import cosine, median_cosine
from gradveil.attacks.noise_likelihood import ADDED, COLUMNS, DRAWS, explained, log_likelihood, sharing
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
        for rows, some in self._shares(batch):
            yield self._send(some, [key.child(row) for row in rows])

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Part batches, so that no more of them are worked on at once than fit."""
        for rows in torch.arange(len(batch.inputs)).split(self.at_once):
            yield rows.tolist(), Batch(batch.inputs[rows], batch.targets[rows])

    def _send(self, batch: Batch, keys: Sequence[Key], drawn: tuple[str, ...] = ("",)) -> Tensors:
        """Let clients send updates, with only that noise drawn whose name starts in one of these ways."""
        one = Batch(batch.inputs[0], batch.targets[0])
        state: Tensors = {}
        sent: Tensors = {}
        for place, (number, params, simulated_client) in enumerate(self.rounds):
            spec = simulated_client.noise_spec(params, one)
            fresh = stack([spec.sample(key.child(Stream.ROUND, number) if number else key) for key in keys])
            off = {n: v.expand(len(keys), *v.shape) for n, v in spec.neutral().items() if not n.startswith(drawn)}
            noise = {name: value.to(batch.inputs.device) for name, value in {**fresh, **off}.items()}
            if not place:
                state = {n: v.expand(len(keys), *v.shape) for n, v in simulated_client.init(params).items()}
            elif "kept.joined" in state:  # what a client keeps to itself it has drawn in its first round
                noise |= simulated_client.pipeline.kept(noise, state)
            sent, state = simulated_client.updates(params, batch, noise, state)
            state = {name: value.detach() for name, value in state.items()}
        return {name: value.detach() for name, value in sent.items()}

    def distance(self, inputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Return 1 - cosine of what images would send and what was observed, and of the median layer: [V, 2].

        It is infinite where it is no number.
        """
        parts = list(self.send(Batch(inputs, targets), key.child(Stream.CHECK)))
        sent = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        value = torch.stack([cosine(sent, self.seen.update), median_cosine(sent, self.seen.update)], 1)
        return torch.where(torch.isfinite(value), value, torch.inf)

    def match(self, inputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Return `Reconstruction.match` of images, with all columns: `distance`, and how noise explains the rest.

        That takes nine simulated updates at most. The images' own draws are the same whatever the images are.
        """
        parts = [
            self._explained(*share, key.child(Stream.DISTURBANCE)) for share in self._shares(Batch(inputs, targets))
        ]
        return torch.cat([self.distance(inputs, targets, key), torch.cat(parts)], 1)

    def _explained(self, rows: Sequence[int], batch: Batch, key: Key) -> Tensor:
        """Return how well images explain what was observed of them [N, COLUMNS], NaN without noise."""
        _, params, simulated_client = self.rounds[-1]
        spec = simulated_client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
        late = [n for n in spec if n.startswith(ADDED)]
        if not spec:
            return batch.inputs.new_full((len(rows), COLUMNS), torch.nan)
        seen = {n: v[rows] for n, v in self.seen.update.items()}
        fresh = [[key.child(row, number) for row in rows] for number in range(DRAWS)]
        quiet, noisy = self._send(batch, fresh[0], ()), [self._send(batch, own) for own in fresh]
        alone = [self._send(batch, own, ADDED) for own in fresh] if late and len(late) < len(spec) else noisy
        numbers = sum(spec[n].off().numel() for n in late)
        shared = sharing(quiet, alone, numbers) if late else torch.zeros(len(rows), device=batch.inputs.device)
        return explained(log_likelihood(quiet, noisy, seen), shared)
