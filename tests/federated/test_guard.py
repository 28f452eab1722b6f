"""Inspection of weights: every family of manipulated models is caught, and honest ones raise no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation
from gradveil.federated.model_inspection import guarded, inspect
from gradveil.nn.models import MODELS, build
from gradveil.nn.surgery import prepare
from tests.federated.manipulations import (
    GENERATOR,
    SIZES,
    Perceptron,
    broken,
    class_fishing,
    class_fishing_by_biases,
    class_fishing_in_noise,
    dead,
    dead_by_biases,
    feature_fishing,
    feature_fishing_in_noise,
    huge,
    imprint,
    imprint_in_a_few_rows,
    imprint_in_noise,
    imprint_with_jitter,
    jump,
    model,
    nearly_dead,
    params,
    tiny,
    trap,
    trap_with_jitter,
)

OF_IMAGES = [name for name, entry in MODELS.items() if "channels" in entry.takes]


@pytest.mark.parametrize(
    ("change", "family", "where"),
    [
        (imprint, "imprint", "first.weight"),
        (imprint_in_noise, "imprint", "first.weight"),
        (imprint_in_a_few_rows, "imprint", "first.weight"),
        (imprint_with_jitter, "imprint", "first.weight"),
        (trap, "trap", "first.weight"),
        (trap_with_jitter, "trap", "first.weight"),
        (nearly_dead, "extreme", "second.weight"),
        (dead, "extreme", "second.weight"),
        (dead_by_biases, "extreme", "second.bias"),
        (huge, "extreme", "first.weight"),
        (tiny, "extreme", "second.weight"),
        (class_fishing, "fishing", "head.weight"),
        (class_fishing_by_biases, "fishing", "head.bias"),
        (feature_fishing, "fishing", "head.weight"),
        (class_fishing_in_noise, "fishing", "head.weight"),
        (feature_fishing_in_noise, "fishing", "head.weight"),
        (jump, "jump", "second.weight"),
        (broken, "not finite", "second.bias"),
    ],
)
def test_inspect_finds_every_family_of_manipulation(
    change: Callable[[dict[str, Tensor]], None], family: str, where: str
) -> None:
    net = Perceptron()
    before = params(net)
    small = {name: 1e-3 * value for name, value in before.items()}
    assert inspect(net, before, before, small) == []
    received = dict(before)
    change(received)
    result = inspect(net, received, before, small)
    assert (family, where) in {(finding.family, finding.where) for finding in result}
    told_last = dict(reversed(received.items()))
    numbered = {str(number): value for number, value in enumerate(received.values())}
    for without in (inspect(net, received), inspect(None, received), inspect(None, told_last)):
        assert ((family, where) in {(f.family, f.where) for f in without}) is (family != "jump")
    if where.endswith("weight") and family != "jump":  # arrays without names, as a list of NumPy arrays becomes
        assert family in {result.family for result in inspect(None, numbered)}


def test_inspect_converts_integer_parameters() -> None:
    net = Perceptron()
    received = params(net)
    imprint(received)
    whole = received | {name: (64 * received[name]).round().int() for name in ("first.weight", "first.bias")}
    assert ("imprint", "first.weight") in {(f.family, f.where) for f in inspect(net, whole)}
    beside = params(net) | {"index": torch.ones(64, 64, dtype=torch.long)}
    assert inspect(net, beside) == inspect(None, beside) == []


def test_inspect_finds_a_norm_out_of_scale() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8, 10))
    received = params(net)
    assert inspect(net, received) == []
    received["1.weight"] = 1e4 * received["1.weight"]
    assert [(f.family, f.where) for f in inspect(net, received)] == [("extreme", "1.weight")]


@pytest.mark.parametrize("model_known", [True, False])
def test_inspect_finds_manipulated_parametrised_weights(model_known: bool) -> None:
    """Their names end in `original1`, and with other layers called `weight` beside them nothing looked at these."""
    layers = [nn.Linear(256, 64), nn.Linear(64, 10)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5, generator=GENERATOR)
    net = nn.Sequential(weight_norm(layers[0]), nn.GroupNorm(2, 64), nn.ReLU(), layers[1])
    known, received = net if model_known else None, params(net)
    assert inspect(known, received) == []
    name = "0.parametrizations.weight.original1"
    received[name][:8] = received[name][0]
    assert inspect(known, received | {"0.bias": torch.ones(64)}) == []
    graded = received | {"0.bias": torch.linspace(-1, 1, 64)}
    assert [(f.family, f.where) for f in inspect(known, graded)] == [("imprint", name)]


def test_inspect_finds_a_jump_across_missed_rounds() -> None:
    net = Perceptron()
    before = params(net)
    small = {name: 1e-3 * value for name, value in before.items()}
    drifted = {
        name: value * (1 + 0.08 * torch.randn(value.shape, generator=GENERATOR)) for name, value in before.items()
    }
    assert inspect(net, drifted, before, small, rounds=9) == []
    jump(drifted)
    assert [(f.family, f.where) for f in inspect(net, drifted, before, small, rounds=9)] == [("jump", "second.weight")]


def test_inspect_allows_larger_changes_over_more_rounds() -> None:
    """Twenty of one's own updates, and two thirds of the size: a jump in one round, none in four."""
    before = params(Perceptron())
    moved = {name: value + 0.65 * value.roll(1) for name, value in before.items()}
    update = {name: 0.65 / 20 * value for name, value in before.items()}
    assert {f.family for f in inspect(None, moved, before, update, rounds=1)} == {"jump"}
    assert inspect(None, moved, before, update, rounds=4) == []
    few = {name: 0.65 / 50 * value for name, value in before.items()}
    assert {f.family for f in inspect(None, moved, before, few, rounds=4)} == {"jump"}


def test_inspect_compares_wide_layers_in_blocks() -> None:
    """An imprint in rows 1,000 to 1,499 of 3,000: neither the first block nor the last has it alone."""
    rows = torch.randn(3000, 20, generator=GENERATOR)
    rows[1000:1500] = rows[0]
    received = {
        "wide.weight": rows,
        "wide.bias": torch.randn(3000, generator=GENERATOR),
        "head.weight": torch.eye(3000)[:10],
    }
    assert [f.evidence.split(" rows")[0] for f in inspect(None, received) if f.family == "imprint"] == ["501 of 3000"]


def federation(net: nn.Module, server: Server, size: int) -> Federation:
    images = load("digits", size=size, limit_public=240, limit_private=40)
    inputs, targets = images.public.inputs, images.public.targets
    shares = [ClientShare(Batch(inputs[i::4], targets[i::4])) for i in range(3)]
    local = Local(batch=12, lr=0.01, epochs=1, optimiser="adam")
    test = Batch(images.private.inputs, images.private.targets)
    return Federation(Client(net, local=local), shares, test, server, Key(1))


@pytest.mark.parametrize("name", ["lenet-zhu", "scheliga-cnn", "resnet20", "perceptron"])
def test_inspect_finds_nothing_at_five_stages_of_honest_training(name: str) -> None:
    net = Perceptron() if name == "perceptron" else prepare(model(name), batchnorm="group")[0]
    experiment = federation(net, Server("adam", lr=0.05) if name == "scheliga-cnn" else Server(), SIZES.get(name, 16))
    standing = experiment.start()
    assert inspect(net, standing.params) == []
    for number in range(1, 5):
        with torch.no_grad():
            update, _ = experiment.local_update(standing, 0, number)
        after = experiment.round(standing)
        assert inspect(net, after.params, standing.params, update) == []
        assert inspect(net, after.params, standing.params) == []
        assert inspect(None, after.params, standing.params, update) == []
        standing = after


@pytest.mark.parametrize(
    "server", [Server("adam", lr=0.05), Server("yogi", lr=0.05), Server(momentum=0.9)], ids=["adam", "yogi", "momentum"]
)
def test_inspect_allows_server_momentum_with_vanished_gradients(server: Server) -> None:
    """One client has one class: once it is learned its gradient is nothing, and the model moves on as fast."""
    net = model()
    images = load("digits", size=16, limit_public=240, limit_private=40)
    inputs, targets = images.public.inputs, images.public.targets
    shares = [ClientShare(Batch(inputs[part], targets[part])) for part in targets.argsort(stable=True).tensor_split(6)]
    test = Batch(images.private.inputs, images.private.targets)
    experiment = Federation(Client(net), shares, test, server, Key(1))
    standing, farthest = experiment.start(), 0.0
    for number in range(1, 9):
        with torch.no_grad():
            update, _ = experiment.local_update(standing, 0, number)
        after = experiment.round(standing)
        moved = {name: float((value - standing.params[name]).norm()) for name, value in after.params.items()}
        farthest = max([farthest, *(moved[name] / float(update[name].norm()) for name in moved)])
        assert inspect(net, after.params, standing.params, update) == []
        standing = after
    assert farthest > 10


class Transposed(nn.Module):
    """Weights [in, out] beside biases [out], as transposed convolutions and GPT-2 have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(32, 64, 2)
        self.weight, self.bias = nn.Parameter(torch.empty(256, 64)), nn.Parameter(torch.zeros(64))
        self.head = nn.Linear(64, 10)
        nn.init.normal_(self.weight, std=1 / 16, generator=GENERATOR)


@pytest.mark.parametrize("model_known", [True, False])
def test_inspect_finds_the_units_of_transposed_weights(model_known: bool) -> None:
    net = Transposed()
    known = net if model_known else None
    received = params(net)
    assert inspect(known, received) == []
    received["weight"] = received["weight"].clone()
    received["weight"][:, :8] = received["weight"][:, :1]
    received["bias"] = torch.linspace(-1, 1, 64)
    assert [(f.family, f.where) for f in inspect(known, received)] == [("imprint", "weight")]
    received = params(net)
    received["up.bias"] = torch.full((64,), -1000.0)
    assert [(f.family, f.where) for f in inspect(known, received)] == [("extreme", "up.bias")]


def test_inspect_finds_unnamed_biases_behind_the_weights() -> None:
    received = {str(number): value for number, value in enumerate(params(Perceptron()).values())}
    received["0"][:8], received["1"][:8] = received["0"][0], received["1"][0]
    assert inspect(None, received) == [], "units that are copies in everything are no bins"
    received["1"] = torch.linspace(-1, 1, 64)
    assert [(f.family, f.where) for f in inspect(None, received)] == [("imprint", "0")]
    received = {str(number): value for number, value in enumerate(params(Perceptron()).values())}
    received["5"] = torch.full((10,), 1000.0)
    received["5"][3] = 0.0
    assert [(f.family, f.where) for f in inspect(None, received)] == [("fishing", "5")]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_inspect_finds_nothing_in_pruned_models(share: float) -> None:
    """By magnitude, layer by layer: some filters, and the weights of a class, are gone altogether."""
    net = model()
    received = params(net)
    for value in received.values():
        if value.ndim > 1:
            value[value.abs() <= value.abs().quantile(share)] = 0
    received["head.weight"][0] = 0
    assert inspect(net, received) == []
    assert inspect(None, received) == []


@pytest.mark.parametrize(("name", "seed"), [(name, number % 2) for number, name in enumerate(OF_IMAGES)])
def test_inspect_finds_nothing_in_initial_weights(name: str, seed: int) -> None:
    net = build(name, channels=3, size=32, classes=10, generator=Key(seed).generator())
    assert inspect(net, params(net)) == []
    assert inspect(None, params(net)) == []


def test_inspect_allows_few_parallel_or_paired_rows() -> None:
    """Dead or doubled units happen: a trace counts where most of a layer shows it."""
    net = Perceptron()
    received = params(net)
    received["first.weight"][:7] = received["first.weight"][0]
    received["second.weight"][:10] = 0
    assert inspect(net, received) == []


def test_guarded_follows_the_policy() -> None:
    net = Perceptron()
    received = params(net)
    trap(received)
    class_fishing(received)
    problem: list[str] = []
    guarded(net, received, "warn", lambda finding: problem.append(finding.family))
    assert problem[0] == "trap"
    assert "fishing" in problem
    with pytest.raises(GradveilError, match=r"first\.weight: trap: .*do not train on it") as caught:
        guarded(net, received, "refuse", lambda finding: None)
    assert len(caught.value.problems) == len(problem)
    guarded(net, received, "ignore", lambda finding: problem.clear())
    assert problem
    guarded(net, params(net), "refuse", lambda finding: problem.clear())
    assert problem
    with pytest.raises(GradveilError, match="guard: is 'refused' -> give one of: warn, refuse, ignore"):
        guarded(net, params(net), "refused", lambda finding: None)  # type: ignore[arg-type]
