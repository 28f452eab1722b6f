"""What leaves clients, on disk: as it left, privately, and never believed when it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.federated.engine import train
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.update_records import RECORD, UpdateRecorder, read_recorded
from gradveil.wire.codec import Layout, decode, encode
from tests.federated.small_federations import federation

PARAMS = {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
UPDATE = {"w": torch.eye(2, 3), "b": torch.tensor([0.5, float(2**-30)])}


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def recorded(folder: Path, *clients: str, **settings) -> UpdateRecorder:
    recorder = UpdateRecorder(folder, **settings)
    for client in clients or ("0",):
        recorder.write(1, client, PARAMS, UPDATE, 2, truth=Batch(torch.full((2, 1, 3, 3), 0.625), torch.tensor([1, 0])))
    return recorder


def refused(folder: Path, *patterns: str) -> None:
    with pytest.raises(GradveilError) as caught:
        read_recorded(folder)
    message = [str(problem) for problem in caught.value.problems]
    assert len(message) == len(patterns), message
    assert all(any(pattern in line for line in message) for pattern in patterns), message


def test_record_equals_the_received_updates_and_changes_nothing(tmp_path):
    plain = train(federation("topk(0.2, feedback=true)", participation=0.5), 3)
    watched = federation("topk(0.2, feedback=true)", participation=0.5)
    watched = replace(watched, recorder=UpdateRecorder(tmp_path / "r", rounds=(2,), sends="difference"))
    after = train(watched, 3)
    assert all(torch.equal(after.params[name], value) for name, value in plain.params.items())

    seen = read_recorded(tmp_path / "r")
    assert [one.facts.client for one in seen] == [str(client) for client in after.records[1].clients]
    before = train(replace(watched, recorder=None), 1)
    for one in seen:
        client = int(one.facts.client)
        heard, _ = watched.announced(before, after.records[1].clients, 2)
        sent, _ = watched.local_update(before, client, 2, heard)
        assert {n: v.tolist() for n, v in one.received.items()} == {n: v.tolist() for n, v in before.params.items()}
        assert {n: v.tolist() for n, v in one.update.items()} == {n: v.tolist() for n, v in sent.items()}
        assert one.facts.examples == 20 + client
        assert one.facts.sends == "difference"


def test_record_truth_has_the_examples_of_the_gradient(tmp_path):
    watched = federation(local=None, batch=6, together=False, recorder=UpdateRecorder(tmp_path, truth=True))
    train(watched, 1)
    for one in read_recorded(tmp_path):
        assert one.truth is not None
        assert one.facts.examples == len(one.truth.targets) == 6
        again = watched.client.update(one.received, one.truth, {}, {})[0]
        assert all(torch.equal(again[name], value) for name, value in one.update.items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rounds": 1}, r"record\.rounds: is 1"),
        ({"rounds": ("1",)}, r"record\.rounds: is \('1',\)"),
        ({"clients": "12"}, r"record\.clients: is '12'"),
        ({"clients": (3,)}, r"record\.clients: is \(3,\)"),
        ({"sends": "update"}, r"record\.sends: is 'update'"),
    ],
)
def test_recorder_with_invalid_settings_raises(tmp_path, settings, problem):
    """Of a text each letter would be a client: '12' would record 1, 2 and 12."""
    with pytest.raises(GradveilError, match=problem):
        UpdateRecorder(tmp_path, **settings)


def test_recorder_with_an_unreadable_folder_raises(tmp_path):
    with pytest.raises(GradveilError, match="cannot be used: File name too long"):
        recorded(tmp_path / (300 * "a"))


def test_record_stores_private_examples_only_on_request(tmp_path):
    needle = torch.full((2, 1, 3, 3), 0.625).numpy().tobytes()
    recorded(tmp_path / "without")
    assert not any(needle in file.read_bytes() for file in files(tmp_path / "without"))
    assert read_recorded(tmp_path / "without")[0].truth is None
    recorded(tmp_path / "with", truth=True)
    assert any(needle in file.read_bytes() for file in files(tmp_path / "with"))
    assert read_recorded(tmp_path / "with")[0].truth.targets.tolist() == [1, 0]


def test_record_stores_the_sent_bytes(tmp_path):
    block = encode(UPDATE, values=torch.float16, deflate=True)
    recorder = UpdateRecorder(
        tmp_path, defence="topk(0.5)", local=LocalConfig(lr=0.1, steps=2, batch=1), sends="difference"
    )
    recorder.write(1, "../../x", PARAMS, block, None, {"send.mask.w": torch.ones(2, 3)})
    one = read_recorded(tmp_path)[0]
    assert one.sent == block
    assert all(torch.equal(one.update[n], v) for n, v in decode(block, Layout.of(UPDATE)).items())
    assert one.facts.defence == "topk(0.5)"
    assert one.facts.local == LocalConfig(lr=0.1, steps=2, batch=1)
    assert one.facts.examples is None
    assert one.messages.keys() == {"send.mask.w"}
    assert one.facts.client == "../../x"
    assert all(file.is_relative_to(tmp_path) for file in files(tmp_path))


def test_record_of_encoded_updates_has_tensor_names(tmp_path):
    received = {"frozen": torch.zeros(4), **PARAMS, "b": torch.zeros(2, dtype=torch.float64)}
    update = {**UPDATE, "b": UPDATE["b"].double()}
    block = encode(update, deflate=True)
    UpdateRecorder(tmp_path).write(1, "0", received, block, 2, tensors=list(update))
    one = read_recorded(tmp_path)[0]
    assert one.sent == block
    assert set(one.facts.tensors) == set(update)
    assert all(torch.equal(one.update[name], value) for name, value in update.items())
    with pytest.raises(GradveilError, match=r"is of the layout with the digest .* expected"):
        UpdateRecorder(tmp_path).write(1, "0", received, block, 2)
    refused_names(tmp_path, None, "is no recorded update of version 2: tensors")
    refused_names(tmp_path, ["w"], "is of the layout with the digest")


def refused_names(folder: Path, names: list[str] | None, pattern: str) -> None:
    file = next(folder.glob("round-*"))
    with safe_open(file, "pt") as opened:
        message = json.loads(opened.metadata()["gradveil"]) | {"tensors": names}
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(held, file, {"gradveil": json.dumps(message)})
    refused(folder, pattern)


def test_record_is_private_and_stores_each_model_once(tmp_path):
    recorded(tmp_path / "r", "0", "1", "10", "9")
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(tmp_path / "r"))
    assert len(files(tmp_path / "r" / "models")) == 1
    assert [one.facts.client for one in read_recorded(tmp_path / "r")] == ["0", "1", "9", "10"]


def test_record_of_a_repeated_round_replaces_the_first(tmp_path):
    recorded(tmp_path)
    recorded(tmp_path)
    assert len(read_recorded(tmp_path)) == 1
    recorded(tmp_path, run="other")
    assert [one.facts.run for one in read_recorded(tmp_path)] == ["", "other"]
    assert len(read_recorded(tmp_path, runs=["other"])) == 1


def test_record_selects_rounds_and_clients(tmp_path):
    recorder = UpdateRecorder(tmp_path, rounds=(2, 3), clients=("a",))
    for number in (1, 2, 3):
        for client in ("a", "b"):
            assert (recorder.write(number, client, PARAMS, UPDATE) is None) == (number == 1 or client == "b")
    assert [one.facts.round for one in read_recorded(tmp_path)] == [2, 3]
    assert [one.facts.round for one in read_recorded(tmp_path, rounds=[3], clients=["a"])] == [3]
    with pytest.raises(GradveilError, match="its first are: round 2 of client a"):
        read_recorded(tmp_path, clients=["b"])


def test_recorder_in_a_folder_of_other_files_raises(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(GradveilError, match="no record of updates"):
        recorded(tmp_path)
    assert [file.name for file in files(tmp_path)] == ["thesis.tex"]
    with pytest.raises(GradveilError, match=r"has no recorded\.json"):
        read_recorded(tmp_path)


def test_recorder_may_start_in_several_processes(tmp_path, monkeypatch):
    """Another process makes the folder between a look for the mark and a look for other things."""
    folder, look = tmp_path / "seen", Path.is_dir

    def late(path):
        if path == folder:
            monkeypatch.setattr(Path, "is_dir", look)
            UpdateRecorder(folder).ready()
        return look(path)

    monkeypatch.setattr(Path, "is_dir", late)
    UpdateRecorder(folder).ready()
    assert {file.name for file in folder.iterdir()} == {"recorded.json", "models"}


def test_read_recorded_reports_every_damaged_file(tmp_path):
    recorded(tmp_path, "0", "1", "2", "3")
    zero, one, two, three = (next(tmp_path.glob(f"round-1-client-{i}-*")) for i in range(4))
    zero.write_bytes(zero.read_bytes()[:-5])
    flipped = bytearray(one.read_bytes())
    flipped[-20] ^= 1
    one.write_bytes(flipped)
    rewritten(two, model="../" * 20 + "etc/passwd")
    rewritten(three, version=1)
    refused(tmp_path, f"{zero}: is damaged", f"{one}: is damaged", f"{two}: is no recorded update", f"{three}: is no")


def rewritten(file: Path, tensors=None, **facts) -> None:
    """Write a record again with other facts, or other tensors under a digest that is right."""
    with safe_open(file, "pt") as opened:
        message = json.loads(opened.metadata()["gradveil"]) | facts
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(held if tensors is None else tensors, file, {"gradveil": json.dumps(message)})


def test_recorder_with_an_update_of_another_model_raises(tmp_path):
    other = {"w": torch.zeros(64, 64)}
    with pytest.raises(GradveilError, match=r"update\.w: is float32 \[64, 64\], expected float32"):
        UpdateRecorder(tmp_path).write(1, "0", PARAMS, other, 1)
    with pytest.raises(GradveilError, match="hold one model on both sides"):
        UpdateRecorder(tmp_path).write(1, "0", PARAMS, encode(other), 1)


def test_read_recorded_with_nonfinite_values_raises(tmp_path):
    broken = {**UPDATE, "b": torch.tensor([float("nan"), 0.0])}
    UpdateRecorder(tmp_path).write(1, "0", {**PARAMS, "b": torch.tensor([1.0, float("inf")])}, broken, 1)
    refused(tmp_path, "update.b and 1 more: has values that are not finite", "received b: has values that")


def test_read_recorded_with_a_replaced_model_raises(tmp_path):
    recorded(tmp_path)
    file = next((tmp_path / "models").iterdir())
    save_file({name: value + 1 for name, value in PARAMS.items()}, file)
    refused(tmp_path, f"{file}: is damaged")
    file.unlink()
    refused(tmp_path, f"{file}: is missing")


def test_read_recorded_with_a_mismatched_truth_raises(tmp_path):
    UpdateRecorder(tmp_path, truth=True).write(
        1, "0", PARAMS, UPDATE, 3, truth=Batch(torch.zeros(2, 3, 3), torch.zeros(2, dtype=torch.int64))
    )
    refused(tmp_path, "has inputs torch.float32", "has 2 inputs, targets (2,), and 3 examples")


def test_read_recorded_of_another_version_raises(tmp_path):
    recorded(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps({"kind": "gradveil record", "version": 9}))
    refused(tmp_path, "version 9; this program reads")
    with pytest.raises(GradveilError, match="version 9"):
        recorded(tmp_path)
