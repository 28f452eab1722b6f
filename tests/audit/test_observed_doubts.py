"""Records that contradict what is believed of the client, or name its tensors otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradveil.audit.audit_config import RunConfig
from gradveil.audit.recorded.recorded_updates import fitted, settled
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.update_records import UpdateRecorder, read_recorded
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.surgery import prepare
from gradveil.nn.weight_files import put_weights
from gradveil.wire.codec import encode
from tests.audit.recording import UNSEEN, notes, record, simulated, watching


def halved(update: dict[str, Tensor]) -> bytes:
    return encode(update, values=torch.float16)


def test_what_contradicts_the_simulated_client_is_noted(tmp_path: Path) -> None:
    record(simulated(defences=["prune(0.9)"]), tmp_path / "pruned")
    told = notes(tmp_path / "pruned", tmp_path / "a", defences=["none"])
    assert "recorded as sent with the defence 'prune(0.9)', attacked as if with 'none'" in told
    assert "90% of what was sent is zero" in told
    assert "believe a pruning or compressing defence" in told
    record(simulated(), tmp_path / "plain", halved)
    told = notes(tmp_path / "plain", tmp_path / "b", defences=["prune(0.9)"], data=UNSEEN)
    assert "nothing pruned it" in told
    assert "values travelled as float16" in told
    assert "data.mean and data.std were not said" in told
    assert notes(tmp_path / "plain", tmp_path / "c").count("\n") == 0


def test_a_grid_and_a_scale_that_do_not_fit_are_noted(tmp_path: Path) -> None:
    record(simulated(defences=["sign"]), tmp_path / "signs")
    told = notes(tmp_path / "signs", tmp_path / "a", defences=["none"])
    assert "few different values" in told
    record(simulated(), tmp_path / "loud", lambda update: {name: 1e4 * value for name, value in update.items()})
    assert "look at the step size" in notes(tmp_path / "loud", tmp_path / "c")
    assert "nothing quantised it" in notes(record_plain(tmp_path / "plain"), tmp_path / "b", defences=["sign"])


def test_new_minus_old_parameters_are_noted(tmp_path: Path) -> None:
    digits = {"data": {"name": "digits", "size": 16}}
    record(simulated(**digits), tmp_path / "turned", lambda update: {name: -value for name, value in update.items()})
    assert "has the sign of new minus old parameters" in notes(tmp_path / "turned", tmp_path / "a", **digits)
    record(simulated(**digits), tmp_path / "plain")
    assert "sign" not in notes(tmp_path / "plain", tmp_path / "b", **digits)


def record_plain(folder: Path) -> Path:
    record(simulated(), folder, defence=None)
    return folder


def test_a_defence_or_number_of_examples_that_nobody_recorded_is_noted(tmp_path: Path) -> None:
    told = notes(record_plain(tmp_path / "seen"), tmp_path, client={"batch": 2})
    assert "which defence the client has was not recorded: 'none' is believed" in told
    assert "recorded as made from 1 example, attacked as if from 2" in told


def test_positions_are_read_as_the_models_names_and_buffers_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    held = {name: value.clone() for name, value in model.state_dict().items()}
    held["1.running_mean"] += 1
    floats = {name: torch.ones_like(value) for name, value in held.items() if value.is_floating_point()}
    UpdateRecorder(tmp_path / "named").write(1, "a", held, floats, 1)
    order = {name: str(place) for place, name in enumerate(held)}
    numbered = ({order[name]: value for name, value in part.items()} for part in (held, floats))
    UpdateRecorder(tmp_path / "numbered").write(1, "a", *numbered, 1)
    client = Client(model)
    named, counted = (fitted(read_recorded(tmp_path / kind)[0], client) for kind in ("named", "numbered"))
    assert named.left_out == counted.left_out == ("1.running_mean", "1.running_var")
    assert list(named.update) == list(counted.update) == [name for name, _ in model.named_parameters()]
    assert torch.equal(counted.received["1.running_mean"], held["1.running_mean"])
    prepared = Client(prepare(model)[0])  # its layers have no statistics of their own any more, and keep the server's
    ready, placed = (fitted(read_recorded(tmp_path / kind)[0], prepared) for kind in ("named", "numbered"))
    assert ready.left_out == placed.left_out == named.left_out
    assert ready.received.keys() == placed.received.keys() == held.keys()
    assert put_weights(prepared.model, placed.received)
    assert running_statistics(prepared.model) == {}  # nothing had passed
    passed = {**placed.received, "1.num_batches_tracked": torch.tensor(1)}
    assert put_weights(prepared.model, passed)
    assert torch.equal(running_statistics(prepared.model)["1.mean"], held["1.running_mean"])
    shorter = Client(nn.Sequential(*list(model)[:-1]))
    with pytest.raises(GradveilError, match=r"3\.weight: is no parameter of the believed model"):
        fitted(read_recorded(tmp_path / "named")[0], shorter)


def test_a_record_of_a_state_dictionary_that_names_tensors_twice_fits(tmp_path: Path) -> None:
    inner = nn.Linear(4, 4)
    model = nn.Sequential(nn.Flatten(), inner, nn.Tanh(), inner, nn.Linear(4, 3))
    held = {name: value.clone() for name, value in model.state_dict().items()}
    UpdateRecorder(tmp_path / "seen").write(1, "a", held, {n: torch.ones_like(v) for n, v in held.items()}, 1)
    found = fitted(read_recorded(tmp_path / "seen")[0], Client(model))
    assert list(found.update) == list(found.received) == [name for name, _ in model.named_parameters()]
    assert found.left_out == ()


def test_a_batch_that_the_recorded_steps_do_not_fit_into_is_told_with_the_way_out(tmp_path: Path) -> None:
    local = LocalConfig(lr=0.1, batch=4, epochs=1)
    record(simulated(client={"batch": 8, "local": local.model_dump()}), tmp_path / "seen", local=local)
    plain = watching(tmp_path / "seen")
    assert plain.client[0].batch == 8
    raw = {**plain.resolved(), "client": [{"batch": 1}]}
    with pytest.raises(
        GradveilError, match=r"client.batch: is 1, and .* take 4 examples a step -> leave it out \(--set "
    ):
        settled(RunConfig.model_validate(raw))
