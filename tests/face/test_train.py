"""`gradveil.train` from Python: any module, a data set or tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.federated.training_api import TrainResult


def network() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
    return net


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images whose class is the brightest of three rows."""
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return images, images[:, 0, :3].mean(2).argmax(1)


def trained(**changes: Any) -> TrainResult:
    local = gv.Local(batch=4, lr=0.5, epochs=2)
    given: dict[str, Any] = {"rounds": 12, "clients": 4, "local": local, "validation": 0.0, **changes}
    return gv.train(given.pop("model", None) or network(), examples(120, 1), examples(60, 2), **given)


def test_fewer_clients_train_where_nobody_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"rounds": 1, "local": {"lr": 0.1, "epochs": 1, "batch": 16}, "validation": 0.0}
    result = gv.train(network(), examples(60, 1), examples(9, 2), **given)
    assert result.curve["none"][0]["clients"] == [0, 1, 2]
    assert "3 clients instead of 10" in capsys.readouterr().err
    with pytest.raises(gv.GradveilError) as caught:
        gv.train(network(), examples(60, 1), examples(9, 2), clients=6, defences=["none", "topk(0.2)"], **given)
    (problem,) = caught.value.problems
    assert (problem.where, "fewer than 6 clients" in problem.remedy) == ("local.batch", True)


def test_equal_problems_of_modules_are_one() -> None:
    layers = [nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(gv.GradveilError) as caught:
        trained(model=model)
    assert len(caught.value.problems) == 5
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith("model: module '0.1' (BatchNorm2d), module '1.1' (BatchNorm2d)")


def test_training_returns_accuracy_bytes_and_a_curve_for_each_defence() -> None:
    result = trained(defences=["none", gv.Defence("mine", send=gv.parse("topk(0.2)").send)])
    assert list(result.accuracy) == ["none", "mine"]
    assert result.accuracy["none"] > result.curve["none"][0]["accuracy"] > 0.4
    assert [point["number"] for point in result.curve["mine"]] == list(range(1, 13))
    assert result.bytes["mine"] < result.bytes["none"]
    assert "mine" in str(result)
    assert set(result.weights("mine")) == {"1.weight", "1.bias"}


def test_the_model_is_left_as_it_is_and_the_same_call_gives_the_same() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (trained(model=model, rounds=2).weights() for _ in range(2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_kept_training_goes_on_and_another_model_is_refused(tmp_path: Path) -> None:
    trained(rounds=1, out=tmp_path / "run")
    longer = trained(rounds=3, out=tmp_path / "run")
    assert [point["number"] for point in longer.curve["none"]] == [1, 2, 3]
    assert longer.report(tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    other = network()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(gv.GradveilError):
        trained(rounds=3, out=tmp_path / "run", model=other)


def test_own_losses_are_used() -> None:
    def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * nn.functional.cross_entropy(outputs, targets)

    start = network().state_dict()
    usual, twice = (trained(loss=loss, rounds=1, local=None).weights() for loss in (None, doubled))
    assert all(torch.allclose(twice[n] - start[n], 2 * (usual[n] - start[n]), atol=1e-6) for n in start)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"rounds": 0}, {"rounds"}),
        ({"clientz": 3}, {"clientz"}),
        ({"progress": None}, {"progress"}),
        ({"defences": ["nope"], "data_set": 1}, {"defences[0]"}),
        ({"seeds": [1]}, {"seeds"}),
        ({"model": nn.Linear}, {"model"}),
    ],
)
def test_what_is_wrong_is_told_before_any_round(changes: dict[str, Any], places: set[str]) -> None:
    with pytest.raises(gv.GradveilError) as caught:
        trained(**changes)
    assert {problem.where for problem in caught.value.problems} == places


def test_data_without_a_test_and_of_no_images_are_refused_at_once() -> None:
    inputs, targets = examples(8, 1)
    with pytest.raises(gv.GradveilError) as caught:
        gv.train(network(), (inputs.flatten(2), targets), rounds=1)
    assert {problem.where for problem in caught.value.problems} == {"data", "test"}


class TwoHeads(nn.Module):
    """It returns a dictionary, and its head runs before another layer that says nothing of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU())
        self.classifier, self.projection = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"logits": self.classifier(hidden), "projection": self.projection(hidden)}


def test_a_model_that_returns_a_dictionary_is_trained_behind_defences_of_the_model(tmp_path: Path) -> None:
    data = torch.rand(40, 3, 8, 8), torch.arange(40) % 4
    defences = ["none", "dropout", "precode"]
    result = gv.train(TwoHeads(), data, data, rounds=1, clients=2, defences=defences, out=tmp_path / "t")
    assert None not in result.accuracy.values()
    assert any(name.startswith("classifier.precode") for name in result.weights("precode"))
