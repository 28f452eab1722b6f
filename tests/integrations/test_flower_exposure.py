"""A client in a Flower app inspects its own update before it is stored or sent."""

import json
import logging

import pytest
import torch
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.update_inspection import exposure
from gradveil.integrations.flower import answer, own_update
from gradveil.integrations.flower.flower_records import record
from gradveil.nn.initial_weights import initialise
from tests.federated.malicious_models import CRAFTED, PRIVATE, moved_quantiles, perceptron
from tests.integrations.flower_in_process import asked, bits, context, ledger

BATCH = Batch(PRIVATE.inputs[:32], PRIVATE.targets[:32])


def asking(net, number=1):
    """A message with a server's model in it, buffers included."""
    message = asked(number, Client(net))
    message.content["arrays"] = record({name: value.clone() for name, value in net.state_dict().items()})
    return message


REFUSED = "update: is not sent: the client's guard refuses it"


@pytest.mark.parametrize("name", ["some_quantiles", "running_mean"])
def test_update_that_singles_out_examples_is_neither_stored_nor_sent(name, tmp_path, caplog):
    """No inspection of the weights finds these two. The server gets no count, but the log does."""
    made = CRAFTED[name](32)
    own = Client(made.honest)
    with pytest.raises(GradveilError, match=REFUSED) as caught:
        answer(asking(made.model), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")
    assert not any(character.isdigit() for character in str(caught.value))
    assert "update.first: malice: singles out" in caplog.text
    assert not list((tmp_path / "partition-0" / "run-77").iterdir())
    answer(asking(made.honest), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")
    with pytest.raises(GradveilError, match=f"{REFUSED}|jump"):
        answer(asking(made.model, 2), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")


def test_leak_warns_by_default_refuses_by_policy_and_is_silent_with_the_guard(tmp_path, caplog):
    few, net = Batch(BATCH.inputs[:6], BATCH.targets[:6]), perceptron()
    with caplog.at_level(logging.WARNING, "flwr"):
        answer(asking(net), context(), Client(net), few, folder=tmp_path / "a", guard="ignore")
        assert not caplog.messages
        answer(asking(net), context(), Client(net), few, folder=tmp_path / "b", guard="refuse")
        assert "leak: 6 of 6 examples" in caplog.text
    with pytest.raises(GradveilError, match=REFUSED):
        answer(asking(net), context(), Client(net), few, folder=tmp_path / "c", guard="ignore", leak="refuse")


def test_defence_that_hides_the_examples_is_let_through(tmp_path, caplog):
    made = CRAFTED["some_quantiles"](32)
    own = parse("dp(clip=1, sigma=1)")(Client(made.honest, local=Local(batch=32, lr=0.1, steps=1)))
    with caplog.at_level(logging.WARNING, "flwr"):
        answer(asking(made.model), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="refuse")
    assert not any("malice" in message or "leak" in message for message in caplog.messages)


def test_first_step_of_a_poisson_round_may_be_empty(tmp_path):
    net = perceptron()
    own = Client(net, local=Local(batch=1, lr=0.1, steps=2, sampling="poisson"))
    for number in range(1, 5):
        reply = answer(asking(net, number), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="warn")
        assert reply.content.array_records


@pytest.mark.parametrize("text", ["dp(clip=1, sigma=1)", "user-dp(clip=1, sigma=8)"])
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_private_reply_does_not_depend_on_one_example(text, scale, tmp_path):
    """A refusal would be a message that no noise covers."""
    made = CRAFTED["some_quantiles"](32)
    inputs = BATCH.inputs.clone()
    inputs[3] *= scale
    own = parse(text)(Client(made.honest, local=Local(batch=32, lr=0.1, steps=1)))
    batch = Batch(inputs, BATCH.targets)
    reply = answer(asking(made.model), context(), own, batch, folder=tmp_path, guard="refuse", leak="refuse")
    assert reply.content.array_records


def test_difference_of_two_updates_that_exposes_examples_is_a_leak(tmp_path, caplog):
    """Each of the two rounds alone exposes too few examples: honest rows, and biases that move a little."""
    batch = Batch(PRIVATE.inputs[:64], PRIVATE.targets[:64])
    first, second = moved_quantiles(perceptron(), 64)
    own = Client(perceptron())
    answer(asking(first), context(), own, batch, folder=tmp_path, guard="refuse", leak="refuse")
    with pytest.raises(GradveilError, match=REFUSED):
        answer(asking(second, 2), context(), own, batch, folder=tmp_path, guard="refuse", leak="refuse")
    assert "the difference from the last update shows" in caplog.text
    answer(asking(second), context(), own, batch, folder=tmp_path / "alone", guard="refuse", leak="refuse")


def test_log_names_layers_that_were_not_inspected(tmp_path, caplog):
    net = nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 18 * 18, 10))
    initialise(net, Key(0).generator())
    answer(asking(net), context(), Client(net), BATCH, folder=tmp_path)
    assert "not inspected: 0.weight" in caplog.text
    caplog.clear()
    answer(asking(perceptron()), context(), Client(perceptron()), BATCH, folder=tmp_path / "all")
    assert "not inspected" not in caplog.text


def _broken(*_):
    raise IndexError("position 3 of 32")


@pytest.mark.parametrize("place", ["exposure", "first_gradient", "guarded_update"])
@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_private_reply_is_sent_when_its_inspection_fails(place, policy, tmp_path, caplog, monkeypatch):
    """Such a failure depends on the examples. It is logged after the reply has been counted and stored."""
    monkeypatch.setattr(own_update, place, _broken)
    own = parse("dp(clip=1, sigma=16)")(Client(perceptron(), local=Local(batch=32, lr=0.1, steps=1)))
    file = ledger(tmp_path)
    reply = answer(asking(own.model), context(), own, BATCH, folder=tmp_path, training="lungs", guard=policy)
    assert "IndexError: position 3 of 32" in caplog.text
    assert json.loads(file.read_text())["rounds"] == 1
    again = answer(asking(own.model), context(), own, BATCH, folder=tmp_path, training="lungs", guard=policy)
    assert bits(reply) == bits(again)
    plain = Client(perceptron())
    with pytest.raises(IndexError):
        answer(asking(plain.model), context(), plain, BATCH, folder=tmp_path / "plain", guard=policy)


@pytest.mark.parametrize("inside", [True, False])
def test_norm_behind_convolution_of_sequences_does_not_reveal_members_of_the_batch(inside, tmp_path):
    """One example alone activates a filter: the inspection failed if and only if the batch contained it."""
    draw = Key(0).generator()
    inputs = torch.randn(65, 1, 128, generator=draw)
    net = nn.Sequential(
        nn.Conv1d(1, 8, 25, padding=12), nn.GroupNorm(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 2)
    )
    crafted = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    crafted["0.weight"][0, 0] = inputs[0, 0, 58:83]
    crafted["1.weight"] += 1
    crafted["1.bias"] -= 1e3
    crafted["1.bias"][0] = -3.5
    crafted["4.weight"][0, 70], crafted["4.weight"][1, 70] = 1, -1
    message = asked(1, Client(net))
    message.content["arrays"] = record(crafted)
    rows = slice(0, 64) if inside else slice(1, 65)
    own = parse("dp(clip=1, sigma=1)")(Client(net, local=Local(batch=64, lr=0.1, epochs=1)))
    reply = answer(message, context(), own, Batch(inputs[rows], torch.arange(64) % 2), folder=tmp_path)
    assert reply.content.array_records


def test_one_example_out_of_scale_does_not_expose_the_others():
    net = perceptron()
    own, inputs = Client(net), BATCH.inputs.clone()
    params = own.params()
    inputs[3] *= 1e3
    batch = Batch(inputs, BATCH.targets)
    noise = {name: torch.randn(p.shape, generator=Key(0, (name,)).generator()) for name, p in params.items()}
    assert exposure(own, params, batch, noise).share < 0.1
