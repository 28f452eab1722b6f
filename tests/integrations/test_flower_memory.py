"""A client's files: identity, repeated rounds without new noise, and the state after a crash."""

import logging
import os
import re
import stat
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.private_files import locked
from gradveil.core.types import Batch
from gradveil.integrations.flower import answer, client_memory, protect
from gradveil.integrations.flower.client_memory import identity, opened
from gradveil.integrations.flower.flower_records import MARK, Question, mark, record
from gradveil.wire.codec import Layout, decode
from tests.integrations.flower_in_process import BATCH, asked, bits, client, context, ledger


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"gradveil-identity": "hospital-a", "partition-id": 3}, "hospital-a"),
        ({"partition-id": 3}, "partition-3"),
        ({"gradveil-identity": 7}, "7"),
    ],
)
def test_identity_comes_from_the_node_configuration(config, name):
    assert identity(Context(1, 99, config, RecordDict(), {})) == name


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".hidden", "a" * 101, "-x", "a b"])
def test_identity_cannot_be_a_path(name):
    with pytest.raises(GradveilError, match="no name for a file"):
        identity(Context(1, 99, {"gradveil-identity": name}, RecordDict(), {}))


def test_node_without_identity_raises_with_a_fix():
    with pytest.raises(GradveilError, match="--node-config"):
        identity(Context(1, 99, {}, RecordDict(), {}))


def test_folder_can_come_from_the_node_configuration(tmp_path):
    own = client()
    answer(asked(1, own), context(**{"gradveil-folder": str(tmp_path / "own")}), own, BATCH)
    assert (tmp_path / "own" / "partition-0" / "run-77").exists()


def test_repeated_round_gets_the_same_bits_and_changes_nothing(tmp_path):
    own = client()
    first = answer(asked(1, own), context(), own, BATCH, folder=tmp_path, metrics={"loss": 0.25})
    before = files(tmp_path)
    other = Batch(BATCH.inputs + 1, BATCH.targets)
    again = answer(asked(1, own), context(), own, other, folder=tmp_path)
    assert bits(again) == bits(first)
    assert dict(again.content["metrics"]) == {"num-examples": 3, "loss": 0.25}
    assert files(tmp_path) == before
    second = answer(asked(2, own), context(), own, BATCH, folder=tmp_path)
    assert bits(second) != bits(first)


def test_fixed_key_makes_replies_and_files_reproducible(tmp_path):
    ways = []
    for folder in ("a", "b"):
        own = client()
        ways += [
            [bits(answer(asked(n, own), context(), own, BATCH, folder=tmp_path / folder, key=KEY)) for n in (1, 2)]
        ]
    assert ways[0] == ways[1]


KEY = Key(3)


def test_mod_runs_the_app_once_per_round(tmp_path):
    calls = []
    own = client("none")

    def app(message, _context):
        calls.append(message)
        records = {"arrays": message.content["arrays"], "metrics": answered.content["metrics"]}
        return Message(RecordDict(records), reply_to=message)

    answered = answer(asked(1, own), context(), own, BATCH, folder=tmp_path / "other")
    mod = protect("topk(0.5)", folder=tmp_path)
    one, two = (mod(asked(1, own), context(), app) for _ in range(2))
    assert len(calls) == 1
    assert bits(one) == bits(two)
    assert dict(two.content["metrics"]) == {"num-examples": 3}


@pytest.mark.parametrize(
    ("number", "shift", "what"), [(2, 0.0, "round 2, .* 3 has been answered"), (3, 0.1, "another model")]
)
def test_older_round_or_other_model_is_refused(number, shift, what, tmp_path):
    own = client()
    answer(asked(3, own), context(), own, BATCH, folder=tmp_path)
    before = files(tmp_path)
    with pytest.raises(GradveilError, match=what):
        answer(asked(number, own, shift), context(), own, BATCH, folder=tmp_path)
    assert files(tmp_path) == before


def test_another_run_starts_with_new_noise(tmp_path):
    own = client("gaussian(0.1)")
    replies = [answer(asked(1, own), context(run=run), own, BATCH, folder=tmp_path) for run in (1, 2)]
    assert bits(replies[0]) != bits(replies[1])
    assert {file.name for file in (tmp_path / "partition-0").iterdir()} == {".lock", "run-1", "run-2"}


def test_crash_before_the_state_is_written_leaves_the_round_unanswered(tmp_path, monkeypatch):
    """Killed between the two files: the next attempt computes the round from the old state, to the same bits."""
    own = client()
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path, key=KEY)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client_memory, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            answer(asked(2, own), context(), own, BATCH, folder=tmp_path, key=KEY)
    assert "partition-0/run-77/answer-2" in files(tmp_path)
    second = answer(asked(2, own), context(), own, BATCH, folder=tmp_path, key=KEY)
    fresh = client()
    alone = [answer(asked(n, fresh), context(), fresh, BATCH, folder=tmp_path / "x", key=KEY) for n in (1, 2)]
    assert bits(second) == bits(alone[1])


def test_only_the_last_round_is_kept_and_readable_by_its_owner_only(tmp_path):
    own = client()
    for number in (1, 2, 5):
        answer(asked(number, own), context(), own, BATCH, folder=tmp_path)
    assert set(files(tmp_path)) == {f"partition-0/{name}" for name in (".lock", "run-77/answer-5", "run-77/state-5")}
    ledger(tmp_path)
    for file in tmp_path.rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0


@pytest.fixture
def common_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("common_umask")
def test_created_parent_folders_are_private_and_existing_ones_stay(tmp_path):
    own, shared = client(), tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for number in (1, 2):
        answer(asked(number, own), context(), own, BATCH, folder=shared / "a" / "b")
    made = ["a", "a/b", "a/b/partition-0", "a/b/partition-0/run-77"]
    assert [stat.S_IMODE((shared / name).stat().st_mode) for name in made] == [0o700] * 4
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (tmp_path / "file").write_text("")
    with pytest.raises(GradveilError, match="cannot be created: Not a directory"):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path / "file" / "a")


def test_two_nodes_with_one_identity_are_refused(tmp_path):
    own = client()
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path)
    with locked(tmp_path / "partition-0"), pytest.raises(GradveilError, match="give every SuperNode"):
        answer(asked(2, own), context(), own, BATCH, folder=tmp_path)


def test_damaged_state_or_state_of_another_defence_is_refused(tmp_path):
    own = client()
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path)
    other = client("topk(0.3, feedback=true)")
    with pytest.raises(GradveilError, match="belongs to another defence"):
        answer(asked(2, other), context(), other, BATCH, folder=tmp_path)
    file = tmp_path / "partition-0" / "run-77" / "state-1"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(GradveilError, match=r"cut off|damaged"):
        answer(asked(2, own), context(), own, BATCH, folder=tmp_path)


def test_damaged_answer_is_refused_with_a_fix(tmp_path):
    own = client()
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path)
    (tmp_path / "partition-0" / "run-77" / "answer-1").write_bytes(b"x")
    with pytest.raises(GradveilError, match="wait for round 2"):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path)


@pytest.mark.parametrize("place", [*(f"{tenth} of 10" for tenth in range(10)), "cut off", "missing"])
def test_answer_with_changed_bytes_is_never_repeated(place, tmp_path):
    own = client()
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path, metrics={"loss": 0.25})
    file = tmp_path / "partition-0" / "run-77" / "answer-1"
    content = bytearray(file.read_bytes())
    if place == "missing":
        file.unlink()
    elif place == "cut off":
        file.write_bytes(content[:-1])
    else:
        content[8 + int(place[0]) * (len(content) - 8) // 10] ^= 1
        file.write_bytes(content)
    before = files(tmp_path)
    with pytest.raises(GradveilError, match=r"answer-1: .* -> wait for round 2"):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path, metrics={"loss": 0.25})
    with pytest.raises(GradveilError, match=r"answer-1: .* -> put a copy of it back, or set guard='ignore'"):
        answer(asked(2, own), context(), own, BATCH, folder=tmp_path)
    assert files(tmp_path) == before


def test_another_model_is_refused_with_its_description(tmp_path):
    own, other = client(), client(model=nn.Linear(4, 2))
    with pytest.raises(GradveilError, match=r"arrays\.0\.weight: is missing, expected float32 \[3, 4\] -> .*params"):
        answer(asked(1, other), context(), own, BATCH, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_received_buffers_are_used_and_not_sent(tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 2)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return self.inner(x + self.shift)

    own = client("none", Shifted())
    plain, moved = asked(1, own), asked(1, own)
    for message, shift in ((plain, 0.0), (moved, 1.0)):
        buffers = record({"shift": torch.full((4,), shift)})
        message.content["arrays"] = ArrayRecord({**message.content["arrays"], **buffers})
    layout = Layout.of(own.params())
    first = decode(bits(answer(plain, context(), own, BATCH, folder=tmp_path / "a")), layout)
    second = decode(bits(answer(moved, context(), own, BATCH, folder=tmp_path / "b")), layout)
    by_hand = own.update(own.params(), Batch(BATCH.inputs + 1, BATCH.targets), {}, {})[0]
    torch.testing.assert_close(second, by_hand)
    assert not torch.equal(first["inner.weight"], second["inner.weight"])


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (client("adgp"), "needs public messages"),
        (client("adgp(selection=previous)"), "needs public messages"),
        (replace(client("none"), members=3), "a node is one client"),
    ],
    ids=["adgp", "adgp(selection=previous)", "a sum of clients"],
)
def test_client_that_flower_rounds_do_not_support_is_refused(own, what, tmp_path):
    with pytest.raises(GradveilError, match=what):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path)


def test_the_guard_warns_refuses_or_stays_silent(tmp_path, caplog):
    own = client("none", nn.Linear(4, 2))
    bad = asked(1, own)
    bad.content["arrays"] = record({**own.params(), "weight": torch.tensor([[1e3] * 4, [0.0] * 4])})
    with pytest.raises(GradveilError, match="fishing"):
        answer(bad, context(), own, BATCH, folder=tmp_path, guard="refuse")
    assert not list((tmp_path / "partition-0" / "run-77").iterdir())
    with caplog.at_level(logging.WARNING, "flwr"):
        answer(bad, context(), own, BATCH, folder=tmp_path / "a", guard="ignore")
        assert not caplog.messages
        answer(bad, context(), own, BATCH, folder=tmp_path / "b")
    assert re.search("fishing", caplog.text)


@pytest.mark.parametrize(
    ("shift", "number", "refused"), [(0.0, 2, False), (10.0, 2, True), (10.0, 3, True), (0.1, 30, False)]
)
def test_jump_between_two_answered_rounds_is_refused(shift, number, refused, tmp_path):
    """A skipped round hides no jump; the threshold grows with the number of rounds."""
    own = client("none")

    def run():
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path, guard="refuse")
        answer(asked(number, own, shift), context(), own, BATCH, folder=tmp_path, guard="refuse")

    if refused:
        with pytest.raises(GradveilError, match="jump: moved"):
            run()
    else:
        run()
        with opened(context(), tmp_path) as kept:
            assert kept.last == number


def test_received_buffers_are_inspected(tmp_path):
    """A model is evaluated with the running statistics that came."""
    own = client("none", nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval())
    bad = asked(1, own)
    running = {"1.running_mean": torch.zeros(3), "1.running_var": torch.tensor([1.0, float("nan"), 1.0])}
    bad.content["arrays"] = record({**own.params(), **running})
    with pytest.raises(GradveilError, match=r"1\.running_var: not finite"):
        answer(bad, context(), own, BATCH, folder=tmp_path, guard="refuse")


def test_unmarked_question_is_refused():
    message = asked(1, client())
    message.content[MARK] = mark(0)
    with pytest.raises(GradveilError, match="does not give the number of the round"):
        Question.of(message)
    del message.content[MARK]
    with pytest.raises(GradveilError, match="is not marked"):
        Question.of(message)
