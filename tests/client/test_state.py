"""A client's state survives the disk, and is nobody else's."""

import json
import stat
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from gradveil.client import Client, Local, load_state, save_state
from gradveil.core.errors import GradveilError
from gradveil.defences import parse
from tests.laws.cases import CLIENTS, TEXTS, draw

KEEPING = [text for text in TEXTS if (client := parse(text)(CLIENTS["gradient"])).init(client.params())]


@pytest.fixture
def written(tmp_path):
    """A client of a later round, its state, and the file it wrote."""
    client = parse("dgp + standin")(CLIENTS["gradient"])
    *_, state = draw(client)
    save_state(tmp_path / "state.safetensors", client, state)
    return client, state, tmp_path / "state.safetensors"


@pytest.mark.parametrize("text", KEEPING)
def test_saved_state_continues_the_client(text: str, tmp_path):
    client = parse(text)(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    save_state(tmp_path / "state.safetensors", client, state)
    again = load_state(tmp_path / "state.safetensors", parse(parse(text).name)(CLIENTS["gradient"]))
    assert list(again) == list(state), "sums over tensors round by their order"
    for part, expected in zip(
        client.update(params, batch, noise, again), client.update(params, batch, noise, state), strict=True
    ):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)


def test_saved_state_is_private(written):
    assert stat.S_IMODE(written[2].stat().st_mode) == 0o600
    assert [file.name for file in written[2].parent.iterdir()] == ["state.safetensors"]


def test_load_state_of_another_defence_raises_with_both(written):
    other = parse("dgp(top=0.1) + standin")(CLIENTS["gradient"])
    with pytest.raises(GradveilError, match=r"another defence: send is .*top=0\.05.* there, .*top=0\.1.* here"):
        load_state(written[2], other)


def test_load_state_of_another_model_raises_with_both(written):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3)).double()
    with pytest.raises(GradveilError) as problem:
        load_state(written[2], parse("none")(Client(model)))
    message = str(problem.value)
    assert "another model: of 6 parameters there and 2 here 8 parameters differ" in message
    assert "another model: of 9 modules there and 2 here 10 modules differ" in message
    assert "'block.0.weight': float64 [3, 1, 3, 3] there, none here" in message
    assert "another defence: send is Chain" in message


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        (
            "dropout(0.5) + dgp",
            "dgp",
            r"'block.dropout': Dropout\(p=0.5\) there, none here",
        ),
        ("precode(k=5) + standin", "precode(k=5, beta=0.9) + standin", r"beta=0\.001\) there, .*beta=0\.9\) here"),
        ("keylock + standin", "keylock(act=tanh) + standin", r"act='sigmoid'\) there, .*act='tanh'\) here"),
        ("mixup + dgp", "dgp", r"batch is \(Mixup\(alpha=1\),\) there, \(\) here"),
        ("mixup(0.3) + standin", "mixup(0.4) + standin", r"batch is .*0\.3.* there, .*0\.4.* here"),
        ("dp(1, 1) + standin", "dp(1, 2) + standin", r"step is .*std=1,.* there, .*std=2,.* here"),
    ],
)
def test_load_state_compares_every_slot(text: str, other: str, message: str, tmp_path):
    client = parse(text)(CLIENTS["gradient"])
    save_state(tmp_path / "state", client, draw(client)[-1])
    with pytest.raises(GradveilError, match=message):
        load_state(tmp_path / "state", parse(other)(CLIENTS["gradient"]))
    load_state(tmp_path / "state", parse(text)(CLIENTS["gradient"]))


def test_load_state_ignores_the_notation_of_numbers(tmp_path):
    client, again = (parse(text)(CLIENTS["gradient"]) for text in ("dp(1, 1) + standin", "dp(1.0, 1.00) + standin"))
    *_, state = draw(client)
    save_state(tmp_path / "state", client, state)
    assert load_state(tmp_path / "state", again).keys() == state.keys()


def test_load_state_of_other_local_training_raises(tmp_path):
    kinds = {name: parse("standin")(client) for name, client in CLIENTS.items()}
    message = {"gradient": "one gradient", "sgd": "local steps of sgd", "adam": "local steps of adam"}
    for name, client in kinds.items():
        save_state(tmp_path / name, client, draw(client)[-1])
        for other in kinds.keys() - {name}:
            with pytest.raises(GradveilError, match=f"it is {message[name]} there, {message[other]} here"):
                load_state(tmp_path / name, kinds[other])


def test_load_state_ignores_settings_that_may_change(tmp_path):
    client = parse("standin")(CLIENTS["sgd"])
    *_, state = draw(client)
    save_state(tmp_path / "state", client, state)
    later = replace(client, local=Local(batch=1, lr=0.01, epochs=1, momentum=0.5), domain=None, messages={})
    with torch.no_grad():
        moved = {name: value + 1 for name, value in client.params().items()}
    later.model.load_state_dict(moved)
    try:
        torch.testing.assert_close(load_state(tmp_path / "state", later), state, rtol=0, atol=0)
    finally:
        later.model.load_state_dict({name: value - 1 for name, value in moved.items()})


class Shown(torch.nn.Linear):
    """A layer whose description says where it lies in memory."""

    def extra_repr(self) -> str:
        return repr(object())


def test_load_state_ignores_memory_addresses(tmp_path):
    client, again = (parse("standin")(Client(torch.nn.Sequential(Shown(2, 2)))) for _ in range(2))
    state = client.init(client.params())
    save_state(tmp_path / "state", client, state)
    assert load_state(tmp_path / "state", again).keys() == state.keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_state_is_neither_saved_nor_loaded(written, tmp_path, value: float, monkeypatch):
    client, state, file = written
    name = "send.prune.residual.head.weight"
    bad = {**state, name: state[name].clone().index_fill_(0, torch.tensor(1), value)}
    with pytest.raises(GradveilError, match=f"'{name}' with 16 values that are not finite"):
        save_state(tmp_path / "other", client, bad)
    assert not (tmp_path / "other").exists()
    with monkeypatch.context() as patched:  # as an earlier version, or another program, may have written it
        patched.setattr("gradveil.client.state_file._not_finite", lambda _: [])
        save_state(file, client, bad)
    with pytest.raises(GradveilError, match=f"'{name}' with 16 values that are not finite"):
        load_state(file, client)


def test_load_state_of_another_aggregation_group_raises(written):
    with pytest.raises(GradveilError, match="members is 1 there, 2 here"):
        load_state(written[2], replace(written[0], members=2))


def test_save_state_of_a_foreign_state_raises(written, tmp_path):
    client, state, _ = written
    wrong = {**state, "send.prune.residual.head.weight": torch.zeros(2), "more": torch.zeros(1)}
    with pytest.raises(GradveilError) as problem:
        save_state(tmp_path / "other", client, wrong)
    assert len(problem.value.problems) == 2
    assert "float32 [2], where float64 [3, 16] is expected" in str(problem.value)
    assert not (tmp_path / "other").exists()


def test_load_state_of_a_truncated_file_raises(written):
    client, _, file = written
    whole = file.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(GradveilError, match="is cut off"):
            load_state(file, client)


def test_load_state_with_a_flipped_bit_raises(written):
    client, _, file = written
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    with pytest.raises(GradveilError, match="not those that were written"):
        load_state(file, client)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "is no gradveil client state"),
        ({"kind": "gradveil client state", "version": "1"}, "has version 1 of the format, and version 2 can be read"),
    ],
)
def test_load_state_of_a_foreign_file_raises(written, metadata, message):
    client, state, file = written
    save_file(state, file, metadata)
    with pytest.raises(GradveilError, match=message):
        load_state(file, client)


@pytest.mark.parametrize("problem", ["{", "[]", json.dumps({"params": {}})])
def test_load_state_without_the_clients_identity_raises(written, problem: str):
    client, state, file = written
    from safetensors import safe_open

    with safe_open(file, framework="pt") as held:
        metadata = {**held.metadata(), "client": problem}
    save_file(state, file, metadata)
    with pytest.raises(GradveilError, match="does not say whose state"):
        load_state(file, client)


def test_load_state_of_a_missing_file_raises(written):
    with pytest.raises(GradveilError, match="is missing"):
        load_state(written[2].with_name("nothing"), written[0])
