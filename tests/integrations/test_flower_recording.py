"""The mod `record` stores the updates of any Flower app unchanged, and changes nothing of the app."""

import json
import re

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch.nn import functional as F

from gradveil.cli.app import run
from gradveil.core.noise import Key
from gradveil.data import load
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.update_records import read_recorded
from gradveil.integrations.flower import protect
from gradveil.integrations.flower import record as recording
from gradveil.integrations.flower.flower_records import MARK, mark, record, tensors, unpacked
from gradveil.nn.models import build
from tests.integrations.flower_in_process import context

START = {"w": torch.arange(1.0, 9.0), "b": torch.zeros(2), "steps": torch.tensor([3])}
MOVED = {**START, "w": START["w"] - 0.5}


def train_message(number=1, kind="train", marked=False):
    config = {MARK: mark(number)} if marked else {"config": ConfigRecord({"server-round": number})}
    return Message(RecordDict({"arrays": record(START), **config}), dst_node_id=1, message_type=kind)


def app(message, _context):
    metrics = MetricRecord({"num-examples": 5})
    return Message(RecordDict({"arrays": record(MOVED), "metrics": metrics}), reply_to=message)


def test_plain_arrays_are_recorded_as_received_minus_returned_and_pass_as_they_are(tmp_path):
    reply = recording(tmp_path / "seen", rounds=None)(train_message(4), context(2), app)
    assert torch.equal(torch.from_numpy(reply.content["arrays"]["w"].numpy()), MOVED["w"])
    one = read_recorded(tmp_path / "seen")[0]
    assert (one.facts.round, one.facts.client, one.facts.examples, one.facts.sends) == (4, "2", 5, "difference")
    assert torch.equal(one.received["steps"], START["steps"])
    assert {name: value.tolist() for name, value in one.update.items()} == {"w": [0.5] * 8, "b": [0.0] * 2}
    assert one.truth is None


@pytest.mark.parametrize("truth", [lambda *_: {}["images"], lambda *_: torch.zeros(3), lambda *_: None])
def test_failing_truth_does_not_stop_the_training(tmp_path, caplog, truth):
    reply = recording(tmp_path / "seen", truth=truth)(train_message(1), context(), app)
    assert torch.equal(torch.from_numpy(reply.content["arrays"]["w"].numpy()), MOVED["w"])
    assert re.search("not recorded: truth: raised [A-Za-z]+Error", caplog.text)
    assert not (tmp_path / "seen").exists()


def test_an_encoded_update_is_recorded_byte_for_byte(tmp_path):
    protected = protect("prune(0.5)", folder=tmp_path / "state")
    reply = recording(tmp_path / "seen", defence="prune(0.5)")(
        train_message(marked=True), context(), lambda message, here: protected(message, here, app)
    )
    one = read_recorded(tmp_path / "seen")[0]
    assert one.sent == unpacked(reply.content)
    assert one.facts.defence == "prune(0.5)"


def test_partial_update_is_recorded_only_with_trainable(tmp_path, caplog):
    protected = protect("prune(0.5)", folder=tmp_path / "state", trainable=["w"])

    def defended(message, here):
        return protected(message, here, app)

    recording(tmp_path / "unknown")(train_message(marked=True), context(), defended)
    assert "holds other tensors than the trained ones" in caplog.text
    assert not (tmp_path / "unknown").exists()
    reply = recording(tmp_path / "seen", trainable=["w"])(train_message(marked=True), context(), defended)
    one = read_recorded(tmp_path / "seen")[0]
    assert one.sent == unpacked(reply.content)
    assert list(one.update) == ["w"]
    assert {name: value.tolist() for name, value in one.received.items()}.keys() == START.keys()


def test_sent_statistics_are_recorded(tmp_path):
    start = {**START, "n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2)}
    after = {**start, "w": MOVED["w"], "n.running_mean": torch.ones(2)}
    protected = protect("none", folder=tmp_path / "state", statistics="send")
    message = train_message(marked=True)
    message.content["arrays"] = record(start)

    def trains(got, _context):
        metrics = MetricRecord({"num-examples": 5})
        return Message(RecordDict({"arrays": record(after), "metrics": metrics}), reply_to=got)

    recording(tmp_path / "seen")(message, context(), lambda got, here: protected(got, here, trains))
    one = read_recorded(tmp_path / "seen")[0]
    assert {name: value.tolist() for name, value in one.update.items()} == {
        "w": [0.5] * 8,
        "b": [0.0] * 2,
        "n.running_mean": [-1.0] * 2,
        "n.running_var": [0.0] * 2,
    }


def test_other_rounds_and_messages_are_not_recorded(tmp_path):
    mod = recording(tmp_path / "seen")
    mod(train_message(2), context(), app)
    mod(train_message(1, kind="evaluate"), context(), app)
    assert not (tmp_path / "seen").exists()


def test_reply_that_cannot_be_recorded_passes(tmp_path, caplog):
    (tmp_path / "seen").write_text("a file")
    reply = recording(tmp_path / "seen")(train_message(), context(), app)
    assert reply.content["metrics"]["num-examples"] == 5
    assert "not recorded" in caplog.text


@pytest.mark.parametrize("count", [[5], float("inf")])
def test_invalid_number_of_examples_does_not_stop_the_training(tmp_path, caplog, count):
    def odd(message, _context):
        metrics = MetricRecord({"num-examples": count})
        return Message(RecordDict({"arrays": record(MOVED), "metrics": metrics}), reply_to=message)

    assert recording(tmp_path / "seen")(train_message(), context(), odd).has_content()
    assert "not recorded: reply.metrics.num-examples" in caplog.text


def test_recorded_update_of_a_plain_app_reveals_its_image(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A Flower app trains one step on one digit by itself; whoever believes that, recovers the digit."""
    monkeypatch.chdir(tmp_path)
    digits = load("digits", size=16).private
    net = build("lenet-zhu", channels=1, size=16, classes=10, generator=Key(3).generator())
    start = {name: value.detach().clone() for name, value in net.named_parameters()}

    def trains(message, _context):
        net.load_state_dict(tensors(message.content["arrays"]))
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        F.cross_entropy(net(digits.inputs[:1]), digits.targets[:1]).backward()
        optimiser.step()
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record(net.state_dict()), "metrics": metrics}), reply_to=message)

    mod = recording(
        "seen", local=LocalConfig(lr=0.1, steps=1), truth=lambda *_: (digits.inputs[:1], digits.targets[:1])
    )
    config = {"config": ConfigRecord({"server-round": 1})}
    mod(
        Message(RecordDict({"arrays": record(start), **config}), dst_node_id=1, message_type="train"), context(), trains
    )
    images = ["data.name=digits", "data.size=16", "model.name=lenet-zhu"]
    words = ["audit", "--observed", "seen", "--json", "--workers", "1", "--attack", "ig-scheliga(tv=0)"]
    assert run([*words, "--iterations", "250", *(word for image in images for word in ("--set", image))]) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["ssim_mean"] > 0.8
