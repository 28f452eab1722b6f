"""Parameters from a file."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.surgery import prepare
from gradveil.nn.weight_files import (
    fingerprint,
    misfits,
    names_in_order,
    once,
    put_weights,
    read_received,
    read_weights,
)


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_state_dict_comes_back_with_its_buffers(tmp_path):
    one, other = net(), net()
    one[1].running_mean += 7
    save_file(one.state_dict(), tmp_path / "a")
    assert put_weights(other, read_weights(tmp_path / "a"))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert set(read_received(tmp_path / "a", other)[0]) == {name for name, _ in other.named_parameters()}


def test_a_prepared_model_keeps_the_running_statistics_of_a_trained_one(tmp_path):
    """Its layers go on using the batch's own: an attacker has them, as the server that trained it."""
    trained = net()
    prepared, fresh = prepare(trained)[0], prepare(net())[0]
    assert names_in_order(prepared) == list(trained.state_dict())
    save_file(trained.state_dict(), tmp_path / "untouched")
    assert put_weights(prepared, read_weights(tmp_path / "untouched"))
    assert running_statistics(prepared) == {}  # nothing has passed: 0 and 1 say nothing
    trained(torch.rand(5, 2, generator=torch.Generator().manual_seed(0)))
    save_file(trained.state_dict(), tmp_path / "a")
    assert put_weights(fresh, read_weights(tmp_path / "a"))
    found = running_statistics(fresh)
    assert torch.equal(found["1.mean"], trained[1].running_mean)
    assert torch.equal(found["1.var"], trained[1].running_var)


def test_read_weights_of_a_training_returns_the_best(tmp_path):
    last, best = {"params.w": torch.zeros(2)}, {"best.w": torch.ones(2)}
    ours = {"gradveil": "{}"}
    save_file(last | best | {"server.m.w": torch.ones(2)}, tmp_path / "a", ours)
    assert read_weights(tmp_path / "a")["w"].tolist() == [1, 1]
    save_file(last, tmp_path / "b", ours)
    assert read_weights(tmp_path / "b")["w"].tolist() == [0, 0]
    save_file(last | best, tmp_path / "theirs")
    assert set(read_weights(tmp_path / "theirs")) == {"params.w", "best.w"}


def test_weights_of_another_model_raise_and_change_nothing(tmp_path):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {**model.state_dict(), "0.weight": torch.zeros(5, 2)}
    del weights["2.bias"]
    told = [str(problem) for problem in misfits(model, weights, "a.safetensors")]
    assert told[0].startswith("a.safetensors, 0.weight: is (5, 2), the model has (3, 2)")
    assert told[1].startswith("a.safetensors, 2.bias: is missing, the model has (2,)")
    assert not put_weights(model, weights)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "a")
    with pytest.raises(GradveilError) as caught:
        read_received(tmp_path / "a", model)
    assert len(caught.value.problems) == 2
    save_file(model.state_dict() | {"imprint.weight": torch.ones(64, 2)}, tmp_path / "more")
    with pytest.raises(GradveilError, match=r"imprint\.weight: is \(64, 2\), and the model has no such tensor"):
        read_received(tmp_path / "more", model)


def test_a_prefix_before_all_names_is_one_problem(tmp_path):
    model = net()
    save_file({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "held")
    with pytest.raises(GradveilError) as caught:
        read_received(tmp_path / "held", model)
    (problem,) = caught.value.problems
    assert "prefix 'module.'" in problem.what
    assert "name.removeprefix('module.')" in problem.remedy
    assert not put_weights(model, read_weights(tmp_path / "held"))
    other = {f"module.{name}": value for name, value in model.state_dict().items() if name != "2.bias"}
    assert len(misfits(model, other, "other")) == 6, "a part is missing too"


def test_unreadable_file_raises(tmp_path):
    (tmp_path / "a").write_bytes(b"no tensors")
    for file in ("a", "b"):
        with pytest.raises(GradveilError, match="cannot be read"):
            read_weights(tmp_path / file)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_named_as_such_and_never_read(tmp_path, zipped):
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(GradveilError, match=r"torch\.save: a pickle.* -> write its parameters once as safetensors"):
        read_weights(tmp_path / "a.pt")


def test_longer_name_is_reported():
    longer = {"net.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    (first, _) = misfits(nn.Linear(2, 2), longer, "a")
    assert "is missing (there is 'net.weight')" in first.what


def test_a_fingerprint_is_of_names_and_values():
    a, b = {"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 1e-30])}
    assert fingerprint(a) == fingerprint({"w": torch.zeros(2)})
    assert fingerprint({"batches": torch.tensor(3)}) != fingerprint({"batches": torch.tensor(4)})
    assert len({fingerprint(a), fingerprint(b), fingerprint({"v": a["w"]}), fingerprint({"w": torch.zeros(2, 1)})}) == 4


def test_a_tensor_that_the_state_dictionary_names_twice_is_read_once(tmp_path):
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.BatchNorm1d(2))
    held = {name: value.clone() for name, value in model.state_dict().items()}
    assert once(model, held).keys() == held.keys() - {"2.weight", "2.bias"}
    held["2.weight"] += 1
    save_file(held, tmp_path / "sent")
    params, rest = read_received(tmp_path / "sent", model)
    assert params.keys() == dict(model.named_parameters()).keys()
    assert rest.keys() == {name for name in held if name.startswith("3.") and name not in params}
    model.load_state_dict(held)
    assert torch.equal(params["0.weight"], inner.weight), "of two values the last counts, as in load_state_dict"
