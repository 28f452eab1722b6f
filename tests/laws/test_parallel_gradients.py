"""Clients whose gradients are computed in parallel send what each sends alone, for every defence."""

from dataclasses import replace

import pytest
import torch

from gradveil.client import Client, ClientTask, Local, drawn_update, drawn_updates
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.laws.cases import CLIENTS, TEXTS, B, draw_batch, draw_state

KINDS = {
    "gradient": None,
    "sgd": Local(batch=2, lr=0.02, epochs=2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": Local(batch=2, lr=0.05, epochs=2, optimiser="adam"),
    "poisson": Local(batch=2, lr=0.02, steps=3, sampling="poisson"),
}
ALONE = [text for text in TEXTS if "keylock" in text]
SIZES = (7, 6, 5, 4)
"""Examples of each client, where local trainings may differ in length."""


def tasks(client: Client, kind: str) -> list[ClientTask]:
    found = []
    for number, size in enumerate(SIZES if kind in ("sgd", "adam") else [B] * len(SIZES)):
        key = Key(5, ("client", number))
        several = [draw_batch(key.child("batch", i)) for i in range(-(-size // B))]
        batch = Batch(*(torch.cat(values)[:size] for values in zip(*several, strict=True)))
        state = draw_state(client, client.params(), key.child("state")) if number else client.init(client.params())
        found.append(ClientTask(batch, key.child("noise"), state))
    return found


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in ALONE])
@pytest.mark.parametrize("kind", KINDS)
def test_clients_at_once_send_what_each_sends_alone(text: str, kind: str):
    client = parse(text)(replace(CLIENTS["gradient"], local=KINDS[kind]))
    params, given = client.params(), tasks(client, kind)
    with torch.no_grad():
        together = drawn_updates(client, params, given)
        alone = [drawn_update(client, params, *task) for task in given]
    for (sent, after), (expected, expected_after) in zip(together, alone, strict=True):
        torch.testing.assert_close(sent, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after, expected_after, rtol=1e-9, atol=1e-9)
        assert list(after) == list(expected_after)


@pytest.mark.parametrize("text", ["none", "optimal-noise(std=0.1, probes=3, every=2)", "dgc(keep=0.1, warmup=3)"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_client_came_to_keeps_nobody_elses_in_memory(text: str, kind: str):
    client = parse(text)(replace(CLIENTS["gradient"], local=KINDS[kind]))
    with torch.no_grad():
        found = drawn_updates(client, client.params(), tasks(client, kind))
    for value in (value for sent, after in found for value in (*sent.values(), *after.values())):
        assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("text", ALONE)
def test_clients_with_something_of_their_own_are_alone(text: str):
    client = parse(text)(CLIENTS["gradient"])
    with pytest.raises(AssertionError):
        drawn_updates(client, client.params(), tasks(client, "gradient"))


def test_a_group_of_clients_has_no_draws_of_one():
    client = replace(CLIENTS["gradient"], members=2)
    with pytest.raises(AssertionError):
        drawn_updates(client, client.params(), tasks(client, "gradient"))
