"""What outweighs the gradient in a client's updates is found on simulated clients, and taken out of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks.inversion.simulated_gradients import found_loud, loudness
from gradveil.core import Key
from gradveil.core.types import Batch
from gradveil.defences import DEFENCES
from tests.attacks.test_undone_entries import client
from tests.laws.cases import LAWS


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


ASKED = [name for name, entry in DEFENCES.items() if {"step", "send"} & {*entry.changes} and name != "adgp"]
"""Defences of updates; `adgp` is `dgp` with the message of another client."""


@pytest.mark.parametrize("name", ASKED)
def test_known_defences_are_not_loud_and_are_not_asked(name: str) -> None:
    for text in LAWS[name].texts:
        sender = client(defence=text)
        assert found_loud(sender, sender.params(), 1, Key(0)) is None
        assert loudness(sender, sender.params(), 1, Key(0)) is None


def test_updates_that_are_not_finite_show_nothing_loud() -> None:
    sender = client(lambda gradient: gradient / 0.0)
    assert loudness(sender, sender.params(), 1, Key(0)) is None
