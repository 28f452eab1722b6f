"""Building models by name and by import path: what comes out, and what is said when nothing can."""

import pytest
import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.nn.models import MODELS, build

HERE = "tests.nn.users_models"


def make(name: str, seed: int = 0, **options) -> nn.Module:
    settings = {"channels": 3, "size": 32, "classes": 10} | options
    return build(name, generator=torch.Generator().manual_seed(seed), **settings)


def test_users_factory_gets_what_it_accepts() -> None:
    model = make(f"{HERE}:plain", hidden=7, classes=3)
    assert isinstance(model, nn.Sequential)
    assert (model[1].out_features, model[3].out_features) == (7, 3)
    assert model.input_shape == (3, 32, 32)


def test_users_factory_draws_from_the_generator() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (make(f"{HERE}:varied", seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    changed = [key for key in first if not torch.equal(first[key], other[key])]
    constant = ["2.in_proj_bias", "2.out_proj.bias"]
    assert sorted(set(first) - set(changed)) == constant


BAD = [
    (
        "scheliga-cn",
        {},
        r"model.name: unknown model 'scheliga-cn' -> did you mean 'scheliga-cnn'\?.*`gradveil list models`",
    ),
    (
        "zzz",
        {},
        r"unknown model 'zzz' -> All are listed by `gradveil list models`; .* hf:NAME.*; or give your own as",
    ),
    (
        "lenet-zhu",
        {"nrom": "group"},
        r"model.nrom: is not an option of this model -> did you mean 'norm'\? allowed: act",
    ),
    ("lenet-zhu", {"norm": "layer"}, r"model.norm: unknown name 'layer' -> choose one of: batch, group, none"),
    ("lenet-zhu", {"norm": "group", "groups": 5}, r"model.groups: 5 groups do not divide 12 channels -> .*1, 2, 3, 4"),
    ("lenet-zhu", {"activation": "relo"}, r"model.activation: unknown name 'relo' -> choose one of: relu"),
    ("scheliga-cnn", {"size": 28}, r"model.size: scheliga-cnn cannot take 28x28 images -> .*at least 29x29"),
    ("vgg11", {"size": 28}, r"model.size: vgg11 cannot take 28x28 images -> resize them to at least 32x32"),
    ("vit", {"size": 30}, r"model.patch: patches of 4 do not tile 30x30 images"),
    ("vit", {"heads": 7}, r"model.heads: 7 heads do not divide the width 256"),
    ("resnet18", {"stem": "mnist"}, r"model.stem: unknown name 'mnist' -> choose one of: cifar, imagenet, no-pool"),
    ("lenet-zhu", {"classes": 0}, r"model.classes: is 0 -> give a whole number of at least 1"),
    (":factory", {}, r"model :factory: is not an import path -> write 'pkg.module:factory'"),
    ("no_such_module:make", {}, r"there is no module 'no_such_module'"),
    (f"{HERE}:plane", {}, r"has no 'plane' -> did you mean 'plain'\?"),
    (f"{HERE}:NOT_A_FACTORY", {}, r"'NOT_A_FACTORY' is a int, not a factory"),
    (f"{HERE}:raises", {}, r"raised ValueError: no weights for 10 classes -> it was called with classes=10"),
    (f"{HERE}:raises_its_own", {}, r"raised OwnError: no licence -> it was called with "),
    (f"{HERE}:a_model", {}, r"'a_model' is a model, not a factory.* -> write a function that builds and returns it"),
    (
        f"{HERE}:needs",
        {},
        r"(?s)needs 'depth'.* classes=10 -> .*options.depth=.*needs 'width'",
    ),
    ("builtins:dict", {}, r"'dict' does not say what it takes -> wrap it in a function"),
    (f"{HERE}:number", {}, r"returned int, not a torch.nn.Module"),
    (f"{HERE}:plain", {"hiden": 3}, r"model.hiden: is not an option of this model -> did you mean 'hidden'\?"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_requests_are_explained(name: str, options: dict, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        make(name, **options)


def test_problems_are_reported_together() -> None:
    with pytest.raises(GradveilError) as caught:
        make("lenet-zhu", channels=0, size=-1, nrom="batch")
    assert [problem.where for problem in caught.value.problems] == ["model.channels", "model.size", "model.nrom"]


def test_entries_say_what_they_are() -> None:
    for name, entry in MODELS.items():
        assert entry.description, name
        assert entry.citation, name
        assert {*entry.takes, *(() if name == "small-decoder" else ("classes",))} <= set(entry.defaults)
        assert entry.takes in ({"channels", "size"}, {"columns"}, {"vocabulary", "length", "padding"})
