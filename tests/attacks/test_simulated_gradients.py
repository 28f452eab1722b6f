"""What outweighs the gradient in a client's updates is found on simulated clients, and taken out of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks.inversion.simulated_gradients import loudness
from gradveil.core import Key
from gradveil.core.types import Batch
from tests.attacks.test_undone_entries import client


def loud_entry(gradient: Tensor) -> Tensor:
    factors = torch.ones_like(gradient).flatten()
    factors[len(factors) // 2] = 1e5
    return gradient * factors.view_as(gradient)


def loud_direction(gradient: Tensor) -> Tensor:
    way = torch.cos(torch.arange(gradient.numel())).view_as(gradient)
    return gradient + 1e5 * (gradient * way).sum() * way / way.square().sum()


LOUD: dict[str, Callable[[Tensor], Tensor]] = {
    "an entry": loud_entry,
    "a direction": loud_direction,
    "a constant": lambda gradient: gradient + 100.0,
}


@pytest.mark.parametrize("name", LOUD)
def test_what_is_loud_is_taken_out_of_updates(name: str) -> None:
    sender = client(LOUD[name])
    params = sender.params()
    found = loudness(sender, params, 1, Key(0))
    assert found is not None
    generator = torch.Generator().manual_seed(5)
    images, labels = torch.rand(2, 1, 1, 8, 8, generator=generator), torch.tensor([[1], [1]])
    sent, _ = sender.updates(params, Batch(images, labels), {}, {})
    gradients, _ = client().updates(params, Batch(images, labels), {}, {})
    quiet = found.quiet(sent)
    for layer in ("1.weight", "3.weight"):
        apart, wanted, loud = (each[layer][0] - each[layer][1] for each in (quiet, gradients, sent))
        alike = torch.cosine_similarity(apart.flatten(), wanted.flatten(), 0)
        before = torch.cosine_similarity(loud.flatten(), wanted.flatten(), 0)
        assert alike > (0.99 if name == "a constant" else before + 0.3)


@pytest.mark.parametrize("defence", ["none", "clip(0.1)", "gaussian(0.1)", "prune(0.9)", "sign", "dgp", "censor"])
def test_known_defences_are_not_loud(defence: str) -> None:
    sender = client(defence=defence)
    assert loudness(sender, sender.params(), 1, Key(0)) is None
