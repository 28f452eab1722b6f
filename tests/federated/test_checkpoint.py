"""A training on disk."""

import json
import math
from dataclasses import replace

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gradveil.core.errors import GradveilError
from gradveil.core.files import DamagedError, write_private
from gradveil.federated.aggregate import Server
from gradveil.federated.checkpoint import load_standing, pack_standing
from gradveil.federated.engine import train
from tests.federated.scenes import federation
from tests.federated.test_engine import same


def save_standing(file, standing, training):
    write_private(file, pack_standing(standing, training))


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
    file, scene = tmp_path / "a.safetensors", federation(clients=2, absent=0.9)
    before = scene.round(scene.start())
    while scene.chosen(len(before.records) + 1)[0] or not before.records[-1].clients:
        before = scene.round(before)
    standing = scene.round(before)
    save_standing(file, standing, "digest")
    assert same(load_standing(file, "digest").best, standing.best)
    assert standing.best


def test_a_loss_that_is_no_number_comes_back_as_that(tmp_path, standing):
    file = tmp_path / "a.safetensors"
    odd = replace(standing.records[0], loss=math.nan, validation_loss=math.inf)
    none = replace(standing.records[1], validation_loss=None, validation_accuracy=None)
    save_standing(file, replace(standing, records=(odd, none)), "digest")
    one, other = load_standing(file, "digest").records
    assert math.isnan(one.loss)
    assert math.isnan(one.validation_loss)
    assert other.validation_loss is None


@pytest.mark.parametrize("facts", ["[]", '{"version": 1}', '{"version": 1, "names": [1]}'])
def test_facts_of_another_form_are_damage(tmp_path, standing, facts):
    file = tmp_path / "a.safetensors"
    save_file(dict(standing.params), file, {"gradveil": facts})
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
