"""What each row draws for itself: from streams of its own, whoever else is worked on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.core.noise import Key, Noise
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors

Streams = Mapping[int, Generator]
"""Row -> the stream of what it draws afresh, iteration after iteration."""


@dataclass(frozen=True)
class Draws:
    """Draws are addressed by the victim's stable number and the restart."""

    key: Key
    victims: Sequence[int]
    """Their stable numbers."""
    restarts: int
    sampled: Mapping[str, Noise]
    """Random tensors of the client that the attacker samples afresh in every iteration."""
    more: bool
    """Whether rows draw in every iteration though nothing of the client is sampled."""
    device: torch.device

    def key_of(self, row: int) -> Key:
        """Address a row's draws."""
        victim, restart = divmod(row, self.restarts)
        return self.key.child(self.victims[victim], restart)

    def streams(self, rows: Sequence[int]) -> dict[int, Generator]:
        """Open each row's own stream, if anything is drawn from it."""
        if not self.sampled and not self.more:
            return {}
        return {row: self.key_of(row).child(Stream.ITERATIONS).generator() for row in rows}

    def fresh(self, rows: Tensor, streams: Streams) -> Tensors:
        """Draw what the attacker samples afresh each iteration: the next values of each row's stream."""
        if not self.sampled:
            return {}
        drawn: dict[str, list[Tensor]] = {name: [] for name in self.sampled}
        for row in rows.tolist():
            for name, noise in self.sampled.items():
                drawn[name].append(noise.law.sample(noise.shape, noise.dtype, streams[row]))
        return {name: torch.stack(values).to(self.device) for name, values in drawn.items()}

    def normal(
        self, rows: Tensor, streams: Streams, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draw N(0, 1) numbers of this shape for each of these rows."""
        drawn = [torch.randn(shape, dtype=dtype, generator=streams[row]) for row in rows.tolist()]
        return torch.stack(drawn).to(self.device)
