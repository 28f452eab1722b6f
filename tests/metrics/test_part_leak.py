"""Parts that come back are a leak where answers share more with their own examples than with others of the class."""

import pytest
import torch

from gradveil.metrics.part_leak import alike, part_leak

TEXTS, CLIENTS = 40, 8
LABELS = torch.arange(TEXTS) % 2


def leak(shared: torch.Tensor, parts: int, places: torch.Tensor, labels: torch.Tensor, generator: torch.Generator):
    """Test texts of one length."""
    count = shared.shape[-1]
    return part_leak(shared, torch.full_like(shared, 9), torch.full((count,), parts), places, labels, generator)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("batch", [1, 4])
def test_answers_that_ignore_the_examples_are_seldom_a_leak(batch):
    runs, found = 40, 0
    for seed in range(runs):
        generator = drawn(seed)
        shared = torch.randint(0, 4, (CLIENTS, batch, TEXTS), generator=generator) + LABELS * 3  # the class is known
        places = torch.randperm(TEXTS, generator=generator)[: CLIENTS * batch].view(CLIENTS, batch)
        found += leak(shared, 9, places, LABELS, generator).p <= 0.05
    assert found <= 5


@pytest.mark.parametrize("batch", [1, 4])
def test_one_part_of_each_example_is_a_leak_whatever_the_order_of_a_batch(batch):
    generator = drawn(0)
    shared = torch.bernoulli(torch.full((CLIENTS, batch, TEXTS), 0.1), generator=generator)
    places = torch.arange(CLIENTS * batch).view(CLIENTS, batch)
    for client, own in enumerate(places):
        shared[client, torch.arange(batch), own.flip(0)] = 1
    found = leak(shared, 6, places, LABELS, generator)
    assert (found.observed, found.parts) == (CLIENTS * batch, 6 * CLIENTS * batch)
    assert found.p < 0.01
    assert found.expected < found.observed / 1.5


def test_answers_that_know_the_lengths_alone_are_seldom_a_leak():
    found = 0
    for seed in range(60):
        generator = drawn(seed)
        lengths = torch.randint(5, 26, (TEXTS,), generator=generator)
        most = torch.minimum(lengths[:CLIENTS, None], lengths).float()  # answers as long as their own examples
        shared = torch.binomial(most, torch.full_like(most, 0.5), generator=generator)[:, None]
        places, groups = torch.arange(CLIENTS)[:, None], alike(LABELS, lengths)
        found += part_leak(shared, most[:, None], lengths, places, groups, generator).p <= 0.05
    assert found <= 8


def test_what_all_examples_of_a_class_share_is_none():
    shared = (LABELS[:CLIENTS, None, None] == LABELS).float() * 5
    found = leak(shared, 6, torch.arange(CLIENTS)[:, None], LABELS, drawn(0))
    assert (found.observed, found.expected, found.p) == (40, 40, 1)


def test_a_clear_leak_of_wide_batches_stands_among_many_tests():
    """A run of four attackers on several seeds makes some hundred tests, by which Holm multiplies the p-value."""
    generator = drawn(0)
    shared = torch.bernoulli(torch.full((2, 16, 80), 0.02), generator=generator)
    places = torch.arange(32).view(2, 16)
    for client, own in enumerate(places):
        shared[client, torch.arange(16), own] = 1
    assert leak(shared, 6, places, torch.arange(80) % 2, generator).p * 100 < 0.05
