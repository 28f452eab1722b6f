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
    client = parse("dgp(feedback=true) + standin")(CLIENTS["gradient"])
    *_, state = draw(client)
    save_state(tmp_path / "state.safetensors", client, state)
    return client, state, tmp_path / "state.safetensors"


@pytest.mark.parametrize("text", KEEPING)
def test_a_client_goes_on_where_it_stopped(text: str, tmp_path):
    client = parse(text)(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    save_state(tmp_path / "state.safetensors", client, state)
    again = load_state(tmp_path / "state.safetensors", parse(parse(text).name)(CLIENTS["gradient"]))
    assert list(again) == list(state), "sums over tensors round by their order"
    for part, expected in zip(
        client.update(params, batch, noise, again), client.update(params, batch, noise, state), strict=True
    ):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)


def test_only_its_owner_may_read_it(written):
    assert stat.S_IMODE(written[2].stat().st_mode) == 0o600
    assert [file.name for file in written[2].parent.iterdir()] == ["state.safetensors"]


def test_state_of_another_defence_is_refused_with_both(written):
    other = parse("dgp(top=0.1, feedback=true) + standin")(CLIENTS["gradient"])
    with pytest.raises(GradveilError, match=r"another defence: send is .*top=0\.05.* there, .*top=0\.1.* here"):
        load_state(written[2], other)


def test_state_of_another_model_is_refused_with_both(written):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3)).double()
    with pytest.raises(GradveilError) as told:
        load_state(written[2], parse("none")(Client(model)))
    said = str(told.value)
    assert "another model: of 6 parameters there and 2 here 8 parameters differ" in said
    assert "another model: of 9 modules there and 2 here 10 modules differ" in said
    assert "'block.0.weight': float64 [3, 1, 3, 3] there, none here" in said
    assert "another defence: send is Chain" in said


@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        (
            "dropout(0.5) + dgp(feedback=true)",
            "dgp(feedback=true)",
            r"'block.dropout': Dropout\(p=0.5\) there, none here",
        ),
        ("precode(k=5) + standin", "precode(k=5, beta=0.9) + standin", r"beta=0\.001\) there, .*beta=0\.9\) here"),
        ("keylock + standin", "keylock(act=tanh) + standin", r"act='sigmoid'\) there, .*act='tanh'\) here"),
        ("mixup + dgp(feedback=true)", "dgp(feedback=true)", r"batch is \(Mixup\(alpha=1\),\) there, \(\) here"),
        ("mixup(0.3) + standin", "mixup(0.4) + standin", r"batch is .*0\.3.* there, .*0\.4.* here"),
        ("dp(1, 1) + standin", "dp(1, 2) + standin", r"step is .*std=1,.* there, .*std=2,.* here"),
    ],
)
def test_every_slot_of_the_client_counts(text: str, other: str, said: str, tmp_path):
    client = parse(text)(CLIENTS["gradient"])
    save_state(tmp_path / "state", client, draw(client)[-1])
    with pytest.raises(GradveilError, match=said):
        load_state(tmp_path / "state", parse(other)(CLIENTS["gradient"]))
    load_state(tmp_path / "state", parse(text)(CLIENTS["gradient"]))


def test_how_a_number_is_written_does_not_count(tmp_path):
    client, again = (parse(text)(CLIENTS["gradient"]) for text in ("dp(1, 1) + standin", "dp(1.0, 1.00) + standin"))
    *_, state = draw(client)
    save_state(tmp_path / "state", client, state)
    assert load_state(tmp_path / "state", again).keys() == state.keys()


def test_a_gradients_moments_are_not_those_of_local_steps(tmp_path):
    kinds = {name: parse("standin")(client) for name, client in CLIENTS.items()}
    said = {"gradient": "one gradient", "sgd": "local steps of sgd", "adam": "local steps of adam"}
    for name, client in kinds.items():
        save_state(tmp_path / name, client, draw(client)[-1])
        for other in kinds.keys() - {name}:
            with pytest.raises(GradveilError, match=f"it is {said[name]} there, {said[other]} here"):
                load_state(tmp_path / name, kinds[other])


def test_what_changes_in_the_course_of_a_training_may_change(tmp_path):
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


def test_where_a_module_lies_in_memory_does_not_count(tmp_path):
    client, again = (parse("standin")(Client(torch.nn.Sequential(Shown(2, 2)))) for _ in range(2))
    state = client.init(client.params())
    save_state(tmp_path / "state", client, state)
    assert load_state(tmp_path / "state", again).keys() == state.keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_state_that_is_not_finite_is_neither_written_nor_read(written, tmp_path, value: float, monkeypatch):
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


def test_a_sum_of_clients_has_a_state_of_its_own(written):
    with pytest.raises(GradveilError, match="members is 1 there, 2 here"):
        load_state(written[2], replace(written[0], members=2))


def test_what_is_not_the_clients_state_is_not_written(written, tmp_path):
    client, state, _ = written
    wrong = {**state, "send.prune.residual.head.weight": torch.zeros(2), "more": torch.zeros(1)}
    with pytest.raises(GradveilError) as told:
        save_state(tmp_path / "other", client, wrong)
    assert len(told.value.problems) == 2
    assert "float32 [2], where float64 [3, 16] is expected" in str(told.value)
    assert not (tmp_path / "other").exists()


def test_every_cut_is_refused(written):
    client, _, file = written
    whole = file.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(GradveilError, match="is cut off"):
            load_state(file, client)


def test_a_changed_bit_is_refused(written):
    client, _, file = written
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    with pytest.raises(GradveilError, match="not those that were written"):
        load_state(file, client)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "is no gradveil client state"),
        ({"kind": "gradveil client state", "version": "1"}, "has version 1 of the format, and version 2 can be read"),
    ],
)
def test_foreign_files_are_refused(written, metadata, said):
    client, state, file = written
    save_file(state, file, metadata)
    with pytest.raises(GradveilError, match=said):
        load_state(file, client)


@pytest.mark.parametrize("told", ["{", "[]", json.dumps({"params": {}})])
def test_a_file_that_does_not_say_whose_it_is_is_refused(written, told: str):
    client, state, file = written
    from safetensors import safe_open

    with safe_open(file, framework="pt") as held:
        metadata = {**held.metadata(), "client": told}
    save_file(state, file, metadata)
    with pytest.raises(GradveilError, match="does not say whose state"):
        load_state(file, client)


def test_a_missing_file_is_said_to_be_missing(written):
    with pytest.raises(GradveilError, match="is missing"):
        load_state(written[2].with_name("nothing"), written[0])
