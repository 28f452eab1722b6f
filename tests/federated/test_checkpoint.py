"""A training on disk."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gradveil.core.errors import GradveilError
from gradveil.core.files import DamagedError
from gradveil.federated.aggregate import Server
from gradveil.federated.checkpoint import load_standing, save_standing
from gradveil.federated.engine import train
from tests.federated.scenes import federation
from tests.federated.test_engine import same


@pytest.fixture
def standing():
    scene = federation("adgp", server=Server("adam", weights="angles"))
    return train(scene, 3)


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
    scene = federation("adgp", server=Server("adam", weights="angles"))
    one = scene.round(replace(standing, status="running"))
    other = scene.round(replace(load_standing(file, "digest"), status="running"))
    assert same(one.params, other.params)
    assert same(one.server, other.server)


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
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["gradveil"])
    save_file(load_file(file), file, {"gradveil": json.dumps(facts | change)} if change else None)
    with pytest.raises(GradveilError, match=told):
        load_standing(file, "digest")


def test_a_loss_that_is_no_number_survives(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    last = replace(standing.records[-1], loss=float("nan"), validation_loss=None)
    save_standing(file, replace(standing, records=(last,), status="diverged"), "digest")
    found = load_standing(file, "digest")
    assert torch.tensor(found.records[0].loss).isnan()
    assert found.records[0].validation_loss is None
