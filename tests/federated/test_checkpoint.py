"""A training on disk."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import save_file

from gradveil.core.errors import GradveilError
from gradveil.core.private_files import DamagedError, seal, unseal, write_private
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import train
from gradveil.federated.training_state import load_standing, pack_standing, unpack_standing
from tests.federated.small_federations import federation
from tests.federated.test_engine import same


def save_standing(file, standing, training):
    write_private(file, pack_standing(standing, training))


@pytest.fixture
def standing():
    experiment = federation("adgp", server=Server("adam", weights="angles"))
    return train(experiment, 3)


def test_what_is_read_is_what_was_written(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    save_standing(file, standing, "digest")
    found = load_standing(file, "digest")
    assert found.records == standing.records
    assert (found.best_round, found.moved, found.status) == (standing.best_round, standing.moved, "finished")
    for part in ("params", "server", "mean", "best"):
        assert same(getattr(found, part), getattr(standing, part))
    assert all(same(found.clients[i], standing.clients[i]) for i in (0, 1, 2, 3))
    assert file.stat().st_mode & 0o777 == 0o600
    assert [child.name for child in tmp_path.iterdir()] == [file.name]


def test_tensors_keep_their_order(tmp_path, standing):
    """Clip norms and encoded sizes depend on it in their last bits and bytes; safetensors sorts by name."""
    turned = dict(reversed(standing.params.items()))
    save_standing(tmp_path / "a", replace(standing, params=turned), "digest")
    found = load_standing(tmp_path / "a", "digest")
    assert list(found.params) == list(turned) != sorted(turned)
    assert list(found.clients[0]) == list(standing.clients[0])


def test_the_next_round_from_disk_is_the_next_round(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    save_standing(file, standing, "digest")
    experiment = federation("adgp", server=Server("adam", weights="angles"))
    one = experiment.round(replace(standing, status="running"))
    other = experiment.round(replace(load_standing(file, "digest"), status="running"))
    assert same(one.params, other.params)
    assert same(one.server, other.server)


@pytest.mark.parametrize(
    "text", ["clip-example(1) + gaussian(0.01)", "user-dp", "topk(0.2, feedback=true)", "dgc(0.1)"]
)
def test_a_training_that_is_read_again_every_round_ends_with_the_same_bits(tmp_path, text):
    """Norms are sums over all tensors: their order is part of where a training stands."""
    file, now = tmp_path / "a.safetensors", None
    for rounds in range(1, 6):
        now = train(federation(text, local=None), rounds, now and replace(now, status="running"))
        save_standing(file, now, "digest")
        now = load_standing(file, "digest")
    whole = train(federation(text, local=None), 5)
    assert list(now.params) == list(whole.params)
    assert same(now.params, whole.params)
    assert all(same(now.clients[i], whole.clients[i]) for i in whole.clients)


def test_a_round_in_which_nobody_answers_is_written_as_any_other(tmp_path):
    """Its parameters and the best ones are the same tensors."""
    file, experiment = tmp_path / "a.safetensors", federation(clients=2, absent=0.9)
    before = experiment.round(experiment.start())
    while experiment.chosen(len(before.records) + 1)[0] or not before.records[-1].clients:
        before = experiment.round(before)
    standing = experiment.round(before)
    save_standing(file, standing, "digest")
    assert same(load_standing(file, "digest").best, standing.best)
    assert standing.best


def test_a_loss_that_is_no_number_comes_back_as_that(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    odd = replace(standing.records[0], loss=math.nan, validation_loss=math.inf)
    none = replace(standing.records[1], validation_loss=None, validation_accuracy=None)
    save_standing(file, replace(standing, records=(odd, none), best_round=1), "digest")
    one, other = load_standing(file, "digest").records
    assert math.isnan(one.loss)
    assert math.isnan(one.validation_loss)
    assert other.validation_loss is None


@pytest.mark.parametrize("facts", ["[]", '{"version": 1}', '{"version": 1, "names": [1]}'])
def test_facts_of_another_form_are_damage(tmp_path, standing, facts):
    file = tmp_path / "a.safetensors"
    file.write_bytes(seal(dict(standing.params), {"gradveil": facts}))
    with pytest.raises(DamagedError):
        load_standing(file, "digest")


def test_a_training_that_has_not_begun_has_no_standing(tmp_path):
    assert load_standing(tmp_path / "nothing", "digest") is None


def test_another_trainings_file_is_refused(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    save_standing(file, standing, "digest")
    with pytest.raises(GradveilError, match="other settings"):
        load_standing(file, "another")


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path, standing, keep):
    file = tmp_path / "a.safetensors"
    save_standing(file, standing, "digest")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedError, match="damaged"):
        load_standing(file, "digest")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": [{}]}, "format"),
        ({"best_round": 1e999}, "damaged: best_round"),
        ({"best_round": 7}, "damaged"),
        ({"moved": -1}, "damaged: moved"),
        ({"planned": "3"}, "damaged: planned"),
        ({"start": [1.0, float("nan")]}, "damaged: start"),
        ({"code": {"a": 1}}, "damaged: code"),
        ({"records": [3]}, "damaged: records"),
        ({"records": []}, "finished without a round"),
        ({"names": [[]]}, "damaged"),
        ({"clients": ["0"]}, "damaged: clients"),
        ({"version": 2}, "format 2"),
        ({"records": [{"number": 1}]}, "damaged"),
        ({"status": "asleep"}, "damaged"),
        ({"clients": None}, "damaged"),
        (None, "damaged"),
    ],
)
def test_facts_that_are_not_ours_are_refused(tmp_path, standing, change, told):
    file = tmp_path / "a.safetensors"
    save_standing(file, standing, "digest")
    tensors, metadata = unseal(file.read_bytes(), "file", "")
    said = {"gradveil": json.dumps(json.loads(metadata["gradveil"]) | change)} if change else None
    file.write_bytes(seal(tensors, said))
    with pytest.raises(GradveilError, match=told):
        load_standing(file, "digest")


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_up": 10**400},
        {"bytes_down": -1},
        {"accuracy": float("nan")},
        {"accuracy": 1.5},
        {"seconds": float("inf")},
        {"number": 7},
        {"loss": "x"},
        {"clients": 3},
    ],
)
def test_rounds_with_numbers_that_none_has_are_refused(tmp_path, standing, change):
    file = tmp_path / "a.safetensors"
    tensors, metadata = unseal(pack_standing(standing, "digest"), "file", "")
    facts = json.loads(metadata["gradveil"])
    facts["records"][1] |= change
    file.write_bytes(seal(tensors, {"gradveil": json.dumps(facts)}))
    with pytest.raises(DamagedError, match="damaged"):
        load_standing(file, "digest")


def test_no_flipped_byte_is_read_as_good(standing):
    """Every byte of the header, and many of the tensors."""
    content = pack_standing(standing, "digest")
    draw = np.random.default_rng(0)
    places = [*range(0, 600), *draw.integers(0, len(content), size=400)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(draw.integers(8))
        with pytest.raises(DamagedError):
            unpack_standing(bytes(damaged), "digest")


def test_a_file_without_a_digest_is_refused_with_a_remedy(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    tensors, metadata = unseal(pack_standing(standing, "digest"), "file", "")
    save_file(tensors, file, metadata)
    with pytest.raises(DamagedError, match=r"holds no digest.* -> remove it: the same command"):
        load_standing(file, "digest")
