"""A client in a Flower app looks at its own update before it is stored or sent."""

import logging

import pytest

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.defences import parse
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


@pytest.mark.parametrize("name", ["some_quantiles", "running_mean"])
def test_update_that_singles_out_examples_is_neither_stored_nor_sent(name, tmp_path):
    """No inspection of the weights finds these two."""
    made = CRAFTED[name](32)
    own = Client(made.honest)
    with pytest.raises(GradveilError, match=r"update\.first: malice: singles out"):
        answer(asking(made.model), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")
    assert not list((tmp_path / "partition-0" / "run-77").iterdir())
    answer(asking(made.honest), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")
    with pytest.raises(GradveilError, match=r"malice|jump"):
        answer(asking(made.model, 2), context(), own, BATCH, folder=tmp_path, guard="refuse", leak="ignore")


def test_leak_warns_by_default_refuses_by_policy_and_is_silent_with_the_guard(tmp_path, caplog):
    few, net = Batch(BATCH.inputs[:6], BATCH.targets[:6]), perceptron()
    with caplog.at_level(logging.WARNING, "flwr"):
        answer(asking(net), context(), Client(net), few, folder=tmp_path / "a", guard="ignore")
        assert not caplog.messages
        answer(asking(net), context(), Client(net), few, folder=tmp_path / "b", guard="refuse")
        assert "leak: 6 of 6 examples" in caplog.text
    with pytest.raises(GradveilError, match="leak: 6 of 6 examples"):
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
