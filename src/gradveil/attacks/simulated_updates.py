"""Simulated updates of reconstructed images, and their distance from the observed updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.inversion.distances import cosine, median_cosine
from gradveil.attacks.noise_likelihood import (
    ADDED,
    COLUMNS,
    DRAWS,
    drawn_again,
    explained,
    log_likelihood,
    reuse,
    sharing,
)
from gradveil.attacks.protocol import Observation
from gradveil.client import Client
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch

_VALUES = 2**26
"""Largest number of update entries that are simulated at once."""


@dataclass(frozen=True)
class Redrawn:
    """Few of all random numbers, drawn again with other keys."""

    keys: Sequence[Key]
    key: Key
    place: int

    def mixed(self, first: Tensors, second: Tensors) -> Tensors:
        """Return the first draw with those numbers of the second."""
        places = {n: drawn_again(v.shape[1:], self.key.child(n).generator())[self.place] for n, v in first.items()}
        return {n: torch.where(places[n], second[n], first[n]) for n in first}


class Simulated:
    """The simulated client of the inverted round; a client with state has been through the rounds before."""

    def __init__(self, simulated_client: Client, observations: Sequence[Observation], every: bool = False) -> None:
        """Simulate the last observed round, and the rounds before it if the client has state, or with `every`."""
        self.seen = observations[-1]
        rounds = observations if every or simulated_client.init(self.seen.params) else observations[-1:]
        self.rounds = [(seen.round, seen.params, seen.believed(simulated_client)) for seen in rounds]
        self.at_once = max(1, _VALUES // sum(value[0].numel() for value in self.seen.update.values()))

    def send(self, batch: Batch, key: Key) -> Iterator[Tensors]:
        """Yield the updates for batches [N, B, ...] with fresh noise, in chunks of the N."""
        for rows, chunk in self._chunks(batch):
            yield self._send(chunk, [key.child(row) for row in rows])

    def send_in_rounds(self, batch: Batch, keys: Sequence[Key]) -> list[Tensors]:
        """Return the updates of every simulated round for batches [N, B, ...], with the noise of these keys."""
        return list(self._rounds(batch, keys))

    def _chunks(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Split batches [N, B, ...] into chunks that fit into memory."""
        for rows in torch.arange(len(batch.inputs)).split(self.at_once):
            yield rows.tolist(), Batch(batch.inputs[rows], batch.targets[rows])

    def _send(
        self, batch: Batch, keys: Sequence[Key], drawn: tuple[str, ...] = ("",), again: Redrawn | None = None
    ) -> Tensors:
        """Simulate updates of the last round, in which only the noise with one of these name prefixes is on."""
        *_, sent = self._rounds(batch, keys, drawn, again)
        return sent

    def _rounds(
        self, batch: Batch, keys: Sequence[Key], drawn: tuple[str, ...] = ("",), again: Redrawn | None = None
    ) -> Iterator[Tensors]:
        """Simulate updates round by round, in which only the noise with one of these name prefixes is on.

        `again` draws some of its numbers again.
        """
        one = Batch(batch.inputs[0], batch.targets[0])
        state: Tensors = {}
        for place, (number, params, simulated_client) in enumerate(self.rounds):
            spec = simulated_client.noise_spec(params, one)
            fresh = self._fresh(spec, keys, number)
            if again is not None:
                fresh = again.mixed(fresh, self._fresh(spec, again.keys, number))
            off = {n: v.expand(len(keys), *v.shape) for n, v in spec.neutral().items() if not n.startswith(drawn)}
            noise = {name: value.to(batch.inputs.device) for name, value in {**fresh, **off}.items()}
            if not place:
                state = {n: v.expand(len(keys), *v.shape) for n, v in simulated_client.init(params).items()}
            elif "kept.joined" in state:  # a client drew its private tensors in its first round
                noise |= simulated_client.pipeline.kept(noise, state)
            sent, state = simulated_client.updates(params, batch, noise, state)
            state = {name: value.detach() for name, value in state.items()}
            yield {name: value.detach() for name, value in sent.items()}

    @staticmethod
    def _fresh(spec: NoiseSpec, keys: Sequence[Key], number: int) -> Tensors:
        return stack([spec.sample(key.child(Stream.ROUND, number) if number else key) for key in keys])

    def distance(self, inputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Return 1 - cosine between simulated and observed update, and the same of the median layer: [V, 2].

        Values that are NaN become infinite.
        """
        parts = list(self.send(Batch(inputs, targets), key.child(Stream.CHECK)))
        sent = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        value = torch.stack([cosine(sent, self.seen.update), median_cosine(sent, self.seen.update)], 1)
        return torch.where(torch.isfinite(value), value, torch.inf)

    def match(self, inputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Return `Reconstruction.match` of images: `distance`, and the likelihood of the rest as noise.

        This takes at most thirteen simulated updates. The draws do not depend on the images.
        """
        parts = [
            self._explained(*chunk, key.child(Stream.DISTURBANCE)) for chunk in self._chunks(Batch(inputs, targets))
        ]
        return torch.cat([self.distance(inputs, targets, key), torch.cat(parts)], 1)

    def _explained(self, rows: Sequence[int], batch: Batch, key: Key) -> Tensor:
        """Return the likelihood of the observed updates given the images [N, COLUMNS], NaN without noise."""
        _, params, simulated_client = self.rounds[-1]
        spec = simulated_client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
        additive = [n for n in spec if n.startswith(ADDED)]
        if not spec:
            return torch.full((len(rows), COLUMNS), torch.nan, device=batch.inputs.device)
        observed = {n: v[rows] for n, v in self.seen.update.items()}
        keys = [[key.child(row, number) for row in rows] for number in range(DRAWS)]
        quiet, noisy = self._send(batch, keys[0], ()), [self._send(batch, draw) for draw in keys]
        only_additive = noisy
        if additive and len(additive) < len(spec):  # other random tensors change many entries at once, as they should
            only_additive = [self._send(batch, draw, ADDED) for draw in keys]
        shared = torch.zeros(len(rows)).to(batch.inputs.device)
        if additive:
            few = (Redrawn(keys[1], key.child(DRAWS), place) for place in range(DRAWS))
            mixed = (self._send(batch, keys[0], ADDED, again) for again in few)
            numbers = sum(spec[n].off().numel() for n in additive)
            shared = torch.maximum(
                sharing(quiet, only_additive, numbers), reuse(quiet, only_additive[0], only_additive[1], mixed)
            )
        return explained(log_likelihood(quiet, noisy, observed), shared)
