"""What an update writes, and so what it takes in memory, grows at most linearly with the model's parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences import chain, parse
from gradveil.gradients.fused import written_bytes
from tests.laws.cases import DOMAIN, TEXTS, Tiny, draw_batch, draw_messages

NARROW, WIDE = 4, 8
"""Widths of networks of 2,059 and 7,571 parameters."""
ALLOWED = 1.05
"""How much faster than the parameters an update may grow: what is quadratic in them grows 3.7 times as fast."""


def parameters(width: int) -> int:
    return sum(p.numel() for p in Tiny(width).parameters())


def built(text: str, width: int) -> Client:
    model = Tiny(width)
    return parse(text)(Client(model, domain=DOMAIN, messages=draw_messages(model)))


def written(client: Client) -> int:
    """Bytes that the third and fourth updates write: shapes are known then, and what is kept over rounds is there."""
    params, state, total = client.params(), client.init(client.params()), 0
    for number in range(4):
        key = Key(0, (number,))
        batch = draw_batch(key)
        noise = client.noise_spec(params, batch).sample(key.child("noise"))
        sent: list[tuple[Tensors, Tensors]] = []
        count = written_bytes(lambda b=batch, n=noise, s=state, out=sent: out.append(client.update(params, b, n, s)))
        state = sent[0][1]
        total += count if number > 1 else 0
    return total


def growth(narrow: Client, wide: Client) -> float:
    """How many times as fast as the parameters an update grows."""
    return written(wide) / written(narrow) / (parameters(WIDE) / parameters(NARROW))


@pytest.mark.parametrize("text", TEXTS)
def test_an_update_writes_at_most_linearly_in_the_parameters(text: str):
    assert growth(built(text, NARROW), built(text, WIDE)) <= ALLOWED


@dataclass(frozen=True)
class AllPairs(Transform):
    """Keeps the larger half, found by comparing every entry with every other."""

    stage: ClassVar[Stage] = Stage.PRUNE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        sizes = torch.cat([value.detach().abs().flatten() for value in update.values()])
        larger = (sizes[:, None] < sizes).sum(1) < len(sizes) // 2
        kept = larger.split([value.numel() for value in update.values()])
        return {n: v * k.reshape(v.shape) for (n, v), k in zip(update.items(), kept, strict=True)}, state


def test_what_compares_all_pairs_is_found():
    quadratic = [replace(built("none", width), send=chain(prune=AllPairs())) for width in (NARROW, WIDE)]
    assert growth(*quadratic) > 2 * ALLOWED
