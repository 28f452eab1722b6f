"""A restarted run has a new id: the state on disk is kept only if the training has a name."""

import json
import logging
import re

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch import nn

from gradveil.client import load_state
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.integrations.flower import answer, protect
from gradveil.integrations.flower.flower_records import record
from gradveil.wire.codec import Layout, decode
from tests.integrations.flower_in_process import BATCH, asked, bits, client, context

SPARSE = "topk(0.3, feedback=true)"


def reply_in_round(folder, number, run, own=None, training="lungs", **settings):
    own = own or client(SPARSE)
    message = asked(number, own)
    return answer(message, context(run=run), own, BATCH, folder=folder, training=training, **settings)


def trains(message, _context):
    """An app that moves every entry differently."""
    arrays = {name: torch.from_numpy(array.numpy()) for name, array in message.content["arrays"].items()}
    moved = {n: value - torch.linspace(0.1, 1, value.numel()).reshape(value.shape) for n, value in arrays.items()}
    metrics = MetricRecord({"num-examples": 3})
    return Message(RecordDict({"arrays": record(moved), "metrics": metrics}), reply_to=message)


def idles(message, _context):
    metrics = MetricRecord({"num-examples": 3})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


def test_named_training_keeps_its_residual_across_runs(tmp_path, caplog):
    one = [reply_in_round(tmp_path / "one", number, run=1) for number in (1, 2, 3)]
    with caplog.at_level(logging.INFO, "flwr"):
        two = [reply_in_round(tmp_path / "two", *turn) for turn in ((1, 1), (2, 1), (1, 2))]
    assert [bits(reply) for reply in one] == [bits(reply) for reply in two]
    assert "continuing with the state of an earlier run: " in caplog.text
    after = [load_state(tmp_path / f, client(SPARSE)) for f in last(("one", 1, 3), ("two", 2, 1))]
    assert any(value.any() for value in after[0].values())
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())


def last(*of):
    return [f"{folder}/partition-0/run-{run}/state-{number}" for folder, run, number in of]


@pytest.mark.parametrize("names", [(None, None), ("lungs", "brains"), ("lungs", None), (None, "lungs")])
def test_without_the_same_name_a_run_starts_with_an_empty_state(names, tmp_path):
    first, second = (reply_in_round(tmp_path, 1, run, training=name) for run, name in zip((1, 2), names, strict=True))
    assert bits(first) == bits(second)


def test_mod_of_named_training_keeps_its_state_across_runs(tmp_path):
    own = client("none")
    settings = {"folder": tmp_path, "guard": "ignore"}
    unnamed, named = protect(SPARSE, **settings), protect(SPARSE, training="lungs", **settings)
    named(asked(1, own), context(run=1), trains)
    layout = Layout.of(own.params())
    nothing = decode(bits(unnamed(asked(1, own), context(run=2), idles)), layout)
    assert not any(value.any() for value in nothing.values())
    held_back = decode(bits(named(asked(1, own), context(run=3), idles)), layout)
    assert all(value.any() for value in held_back.values())


def test_each_run_has_new_noise_and_answers_its_rounds_once(tmp_path):
    own = client("gaussian(0.1)")
    first, second = (reply_in_round(tmp_path, 1, run, own) for run in (1, 2))
    assert bits(first) != bits(second)
    assert bits(reply_in_round(tmp_path, 1, 2, own)) == bits(second)
    reply_in_round(tmp_path, 1, 3, own, training=None, key=Key(1))
    with pytest.raises(GradveilError, match="key: repeats the noise of an earlier run"):
        reply_in_round(tmp_path, 1, 4, own, key=Key(1))


def test_run_that_another_one_has_followed_is_refused(tmp_path):
    for run in (1, 2):
        reply_in_round(tmp_path, 1, run)
    with pytest.raises(GradveilError, match="run-1: is over: training 'lungs' has continued in run-2"):
        reply_in_round(tmp_path, 2, 1)
    reply_in_round(tmp_path, 2, 2)


def jumping(folder, shift, number=1, training="lungs", guard="refuse"):
    """A run, and the next one, which begins with another model."""
    own = client(SPARSE)
    message = asked(1, own)
    answer(message, context(run=1), own, BATCH, folder=folder, training="lungs", guard=guard)
    message = asked(number, own, shift)
    return answer(message, context(run=2), own, BATCH, folder=folder, training=training, guard=guard)


def test_jump_between_two_runs_is_refused(tmp_path):
    for number in (1, 3):
        with pytest.raises(GradveilError, match="jump: moved"):
            jumping(tmp_path / str(number), 10.0, number)
    jumping(tmp_path / "near", 0.0)
    jumping(tmp_path / "other", 10.0, training="brains")
    jumping(tmp_path / "ignored", 10.0, guard="ignore")


def test_damaged_answer_of_the_earlier_run_is_refused(tmp_path):
    reply_in_round(tmp_path, 1, run=1)
    file = tmp_path / "partition-0" / "run-1" / "answer-1"
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(GradveilError, match=r"run-1/answer-1: is damaged: .* -> put a copy of it back"):
        reply_in_round(tmp_path, 1, run=2)
    assert bits(reply_in_round(tmp_path, 1, run=2, guard="ignore")) == bits(second(tmp_path / "other"))


def test_the_state_comes_from_the_last_run_that_left_one(tmp_path, monkeypatch):
    reply_in_round(tmp_path, 1, run=1)
    with monkeypatch.context() as patched:
        patched.setattr("gradveil.integrations.flower.own_update.drawn_update", killed)
        with pytest.raises(KeyboardInterrupt):
            reply_in_round(tmp_path, 1, run=2)
    assert bits(reply_in_round(tmp_path, 1, run=3)) == bits(second(tmp_path / "other"))


def killed(*_):
    raise KeyboardInterrupt


def second(folder):
    reply_in_round(folder, 1, run=1)
    return reply_in_round(folder, 2, run=1)


def test_the_state_of_another_model_or_defence_is_refused(tmp_path):
    reply_in_round(tmp_path, 1, run=1)
    with pytest.raises(GradveilError, match="run-1/state-1: belongs to another defence"):
        reply_in_round(tmp_path, 1, 2, client("topk(0.4, feedback=true)"))
    with pytest.raises(GradveilError, match="run-1/state-1: belongs to another model"):
        reply_in_round(tmp_path, 1, 3, client(SPARSE, nn.Linear(4, 2)))
    assert bits(reply_in_round(tmp_path, 1, run=4)) == bits(second(tmp_path / "other"))


def test_removed_state_or_damaged_list_of_runs_is_refused(tmp_path):
    reply_in_round(tmp_path, 1, run=1)
    home, file = tmp_path / "partition-0", tmp_path / "partition-0" / "training-lungs"
    (home / "run-1").rename(home / "away")
    with pytest.raises(GradveilError, match=r"run-1: is missing: .* 'lungs' -> put it back"):
        reply_in_round(tmp_path, 1, run=2)
    (home / "away").rename(home / "run-1")
    runs = json.loads(file.read_text())
    for bad in ("{", "[]", {**runs, "version": 2}, {**runs, "runs": ["../run-1"]}, {**runs, "runs": ["run-1"] * 2}):
        file.write_text(bad if isinstance(bad, str) else json.dumps(bad))
        with pytest.raises(GradveilError, match=re.escape(str(file))):
            reply_in_round(tmp_path, 1, run=2)
    file.unlink()
    assert bits(reply_in_round(tmp_path, 1, run=2)) == bits(reply_in_round(tmp_path / "other", 1, run=1))


def test_a_run_that_left_its_own_state_needs_no_earlier_one(tmp_path):
    reply_in_round(tmp_path, 1, run=1)
    reply_in_round(tmp_path, 1, run=2)
    (tmp_path / "partition-0" / "run-1").rename(tmp_path / "away")
    replies = [bits(reply_in_round(tmp_path, 2, run=2)), bits(reply_in_round(tmp_path, 1, run=3))]
    other = [bits(reply_in_round(tmp_path / "other", number, run=1)) for number in (1, 2, 3, 4)]
    assert replies == other[2:]


@pytest.mark.parametrize("name", ["", "../a", "a b", ".a", "a" * 101])
def test_name_of_a_training_cannot_be_a_path(name, tmp_path):
    with pytest.raises(GradveilError, match=r"training: is .* no name for a file"):
        reply_in_round(tmp_path, 1, 1, training=name)
    assert not list(tmp_path.iterdir())
