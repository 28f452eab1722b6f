"""A client in a Flower app looks at its own update before it is stored or sent."""

import logging

import pytest
import torch

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.exposure import exposure
from gradveil.integrations.flower import answer
from gradveil.integrations.flower.records import record
from tests.federated.crafted import CRAFTED, PRIVATE, perceptron
from tests.integrations.scenes import asked, context

BATCH = Batch(PRIVATE.inputs[:32], PRIVATE.targets[:32])


def asking(net, number=1):
    """A message with a server's model in it, buffers included."""
    message = asked(number, Client(net))
    message.content["arrays"] = record({name: value.clone() for name, value in net.state_dict().items()})
    return message


REFUSED = "update: is not sent: the client's guard refuses it"


@pytest.mark.parametrize("name", ["some_quantiles", "running_mean"])
def test_update_that_singles_out_examples_is_neither_stored_nor_sent(name, tmp_path, caplog):
    """No inspection of the weights finds these two. The server gets no count, and the log does."""
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
def test_whether_a_private_reply_comes_does_not_depend_on_one_example(text, scale, tmp_path):
    """A refusal would be a message that no noise covers."""
    made = CRAFTED["some_quantiles"](32)
    inputs = BATCH.inputs.clone()
    inputs[3] *= scale
    own = parse(text)(Client(made.honest, local=Local(batch=32, lr=0.1, steps=1)))
    batch = Batch(inputs, BATCH.targets)
    reply = answer(asking(made.model), context(), own, batch, folder=tmp_path, guard="refuse", leak="refuse")
    assert reply.content.array_records


def test_one_example_out_of_scale_does_not_make_the_others_readable():
    net = perceptron()
    own, inputs = Client(net), BATCH.inputs.clone()
    params = own.params()
    inputs[3] *= 1e3
    batch = Batch(inputs, BATCH.targets)
    noise = {name: torch.randn(p.shape, generator=Key(0, (name,)).generator()) for name, p in params.items()}
    assert exposure(own, params, batch, noise).share < 0.1
