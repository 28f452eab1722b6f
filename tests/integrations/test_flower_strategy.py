"""Replies that the server strategy `Protected` accepts and refuses."""

import logging
import re

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from gradveil.integrations.flower import Protected
from gradveil.integrations.flower.flower_records import MARK, PACKED, encoded, mark, packed, record, tensors
from gradveil.wire.codec import encode
from tests.integrations.flower_in_process import Loopback

START = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)}
UPDATE = {"w": torch.full((2, 3), 0.5), "b": torch.tensor([0.0, -1.0])}


def good(update=UPDATE, number=1, weight=4, **metrics) -> RecordDict:
    values = MetricRecord({"num-examples": weight, **metrics})
    return RecordDict({"arrays": packed(encoded(update)), "metrics": values, MARK: mark(number)})


def changed(name, value) -> RecordDict:
    content = good()
    content[name] = value
    return content


def without(name) -> RecordDict:
    content = good()
    del content[name]
    return content


def damaged() -> RecordDict:
    sent = bytearray(encoded(UPDATE))
    sent[-1] ^= 1
    return changed("arrays", packed(bytes(sent)))


def server(nodes=3, strategy=None, start=START, **settings) -> tuple[Protected, list[Message]]:
    """A strategy that waits for the replies of its first round, and the messages that it sent."""
    everybody = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    protected = Protected(strategy or everybody, **settings)
    asked = protected.configure_train(1, record(start), ConfigRecord(), Loopback(ClientApp(), nodes))
    return protected, sorted(asked, key=lambda message: message.metadata.dst_node_id)


def test_decoded_parameters_are_aggregated():
    protected, asked = server()
    contents = [good(), good({"w": UPDATE["w"] * 3, "b": UPDATE["b"]}, weight=12), good(weight=8)]
    replies = [Message(content, reply_to=message) for content, message in zip(contents, asked, strict=True)]
    arrays, metrics = protected.aggregate_train(1, replies)
    mean = (4 * 0.5 + 12 * 1.5 + 8 * 0.5) / 24
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - mean)
    torch.testing.assert_close(tensors(arrays)["b"], torch.tensor([0.0, 1.0]))
    assert metrics is not None
    assert not protected.refusals


ANOTHER = "is of the layout with the digest .*train the same parameters"
BAD = {
    "another model": (changed("arrays", packed(encode({"w": UPDATE["w"]}))), ANOTHER),
    "unmarked": (without(MARK), "is not marked"),
    "an undefended app": (
        RecordDict({"arrays": record(START), "metrics": MetricRecord({"num-examples": 3})}),
        "is not marked",
    ),
    "marked and plain": (changed("arrays", record(START)), "as one array of type"),
    "another encoding": (
        changed("arrays", ArrayRecord({PACKED: Array("uint8", (3,), "numpy.ndarray", b"abc")})),
        "as one array of type",
    ),
    "one array too many": (
        changed("arrays", ArrayRecord({**packed(encoded(UPDATE)), "w": Array(START["w"].numpy())})),
        "as one array of type",
    ),
    "two records": (changed("more", record(START)), "has 2 ArrayRecords"),
    "of an older round": (good(number=3), "answers round 3, not 1"),
    "no number": (changed(MARK, ConfigRecord({"round": "1"})), "does not give the number of the round"),
    "another shape": (good({"w": torch.ones(3, 2), "b": torch.ones(2)}), ANOTHER),
    "another type": (good({name: value.double() for name, value in UPDATE.items()}), ANOTHER),
    "something missing": (good({"w": UPDATE["w"]}), ANOTHER),
    "something more": (good({**UPDATE, "x": torch.ones(1)}), ANOTHER),
    "damaged": (damaged(), "checksum"),
    "cut off": (changed("arrays", packed(encoded(UPDATE)[:-5])), "bytes"),
    "no bytes": (changed("arrays", packed(b"GV")), "begin|ends"),
    "not finite": (good(loss=float("nan")), "not finite"),
    "no weight": (good(weight=0), "has the weight 0 in the mean"),
    "no number of examples": (good(weight=1e308), "has the weight 1e\\+308 in the mean"),
    "a negative weight": (good(weight=-5), "has the weight -5 in the mean"),
    "many weights": (
        changed("metrics", MetricRecord({"num-examples": [1, 2]})),
        "has the weight \\[1, 2\\] in the mean",
    ),
    "no metrics": (without("metrics"), "lacks the metric 'num-examples'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_reply_is_refused_and_the_others_count(kind, caplog):
    content, reason = BAD[kind]
    protected, asked = server()
    replies = [Message(c, reply_to=message) for c, message in zip([good(), content, good()], asked, strict=True)]
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays, _ = protected.aggregate_train(1, replies)
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 0.5)
    [refusal] = protected.refusals
    assert (refusal.number, refusal.node) == (1, 2)
    assert re.search(reason, refusal.reason)
    assert "1 of 3 replies were refused" in caplog.text
    assert refusal.reason in caplog.text


@pytest.mark.parametrize("others", [{}, {"arrays": ConfigRecord({"a": 1})}])
def test_reply_with_another_record_name_is_accepted(others):
    """Flower drops a whole round for one client who says "other" where the others say "arrays"."""
    protected, asked = server()
    other = RecordDict({**without("arrays"), "other": good()["arrays"], **others})
    replies = [Message(c, reply_to=message) for c, message in zip([good(), other, good()], asked, strict=True)]
    arrays, _ = protected.aggregate_train(1, replies)
    assert arrays is not None
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 0.5)
    assert not protected.refusals


def test_update_that_overflows_the_parameters_is_refused():
    """Every value is finite, and so is the model; their difference is not, and would be the mean of all."""
    protected, asked = server(start={**START, "b": torch.full((2,), 3e38)})
    bad = good({**UPDATE, "b": torch.full((2,), -3e38)})
    replies = [Message(c, reply_to=message) for c, message in zip([good(), bad, good()], asked, strict=True)]
    arrays, _ = protected.aggregate_train(1, replies)
    assert bool(tensors(arrays)["b"].isfinite().all())
    assert [(refusal.node, refusal.reason[:15]) for refusal in protected.refusals] == [(2, "reply, update.b")]


@pytest.mark.parametrize("weight", [-5, 0])
def test_wrapped_strategy_gets_no_negative_weight(weight):
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    protected, asked = server(strategy=DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 100.0, 3))
    replies = [Message(c, reply_to=m) for c, m in zip([good(), good(weight=weight), good()], asked, strict=True)]
    arrays, _ = protected.aggregate_train(1, replies)
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 0.5)
    assert [refusal.node for refusal in protected.refusals] == [2]


def test_model_stays_if_no_reply_is_accepted():
    class Untouched(FedAvg):
        def aggregate_train(self, server_round, replies):
            raise AssertionError

    protected, asked = server(strategy=Untouched(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3))
    replies = [Message(without(MARK), reply_to=message) for message in asked]
    assert protected.aggregate_train(1, replies) == (None, None)
    assert len(protected.refusals) == 3


def test_a_client_that_was_not_asked_or_answers_twice_is_refused():
    protected, asked = server()
    twice = [Message(good(), reply_to=asked[0]), Message(good(), reply_to=asked[0])]
    stranger = Message(good(), reply_to=Message(RecordDict(), dst_node_id=99, message_type="train"))
    arrays, _ = protected.aggregate_train(1, [*twice, stranger])
    assert arrays is not None
    assert [(refusal.node, refusal.reason[:24]) for refusal in protected.refusals] == [
        (1, "reply: was not asked for"),
        (99, "reply: was not asked for"),
    ]


def test_failed_replies_are_passed_to_the_inner_strategy():
    protected, asked = server()
    replies = [Message(good(), reply_to=asked[0]), Message(Error(0, "broken"), reply_to=asked[1])]
    arrays, _ = protected.aggregate_train(1, replies)
    assert arrays is not None
    assert not protected.refusals
    assert protected.aggregate_train(1, [Message(Error(0, "broken"), reply_to=asked[1])]) == (None, None)


def test_untrained_arrays_stay_and_may_be_omitted():
    start = {**START, "bn.running_mean": torch.ones(2), "bn.num_batches_tracked": torch.tensor(7)}
    protected, asked = server(start=start)
    contents = [good(), good({**UPDATE, "bn.running_mean": torch.full((2,), 0.5)}), good()]
    replies = [Message(content, reply_to=message) for content, message in zip(contents, asked, strict=True)]
    arrays, _ = protected.aggregate_train(1, replies)
    after = tensors(arrays)
    assert not protected.refusals
    assert after["bn.num_batches_tracked"].dtype == torch.int64
    assert int(after["bn.num_batches_tracked"]) == 7
    torch.testing.assert_close(after["bn.running_mean"], torch.full((2,), 1 - 0.5 / 3))


def test_patterns_select_the_trained_parameters():
    protected, asked = server(trainable=["b"])
    replies = [Message(good({"b": UPDATE["b"]}), reply_to=asked[0]), Message(good(), reply_to=asked[1])]
    arrays, _ = protected.aggregate_train(1, replies)
    assert torch.equal(tensors(arrays)["w"], START["w"])
    assert torch.equal(tensors(arrays)["b"], torch.tensor([0.0, 1.0]))
    [refusal] = protected.refusals
    assert refusal.node == 2
    assert re.search(ANOTHER, refusal.reason)


def test_flowers_own_wrappers_can_be_wrapped():
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    clipping = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 0.1, 3)
    protected, asked = server(strategy=clipping)
    arrays, _ = protected.aggregate_train(1, [Message(good(), reply_to=message) for message in asked])
    moved = torch.cat([(START[name] - value).flatten() for name, value in tensors(arrays).items()])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)
