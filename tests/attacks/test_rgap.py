"""R-GAP is exact if its equations determine the image, and reports the number of open values."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.layer_by_layer import Recursive
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, Prospect, in_words
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models import build
from gradveil.spaces import ImageSpace
from tests.attacks.small_experiments import Scene, observed, pictures, psnr

_ZERO, _ONE = torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)


def _scene(model: nn.Module, side: int = 8, classes: int = 5, target_clients: int = 3, **client) -> Scene:
    """Compute a network's gradients of random images, in double precision."""
    draw = Key(0, ("rgap",)).generator()
    net = initialise(model.double(), draw)
    inputs = torch.rand(target_clients, 1, 1, side, side, dtype=torch.float64, generator=draw)
    targets = torch.randint(0, classes, (target_clients, 1), generator=draw)
    return observed(Client(net, **client), Batch(inputs, targets), classes)


def _attack(scene: Scene, attack: Recursive | None = None):
    return (attack or Recursive())([scene.observation], scene.client, scene.knowledge, Key(0))


def _convolutions(act: type[nn.Module], bias: bool, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 4, stride=2, padding=2, bias=bias),
        act(),
        nn.Conv2d(6, 8, 3, stride=1, padding=1, bias=bias),
        act(),
        nn.Flatten(),
        nn.Linear(200, classes, bias=bias),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.ReLU])
def test_images_are_exact_through_every_invertible_layer(act, bias):
    scene = _scene(_convolutions(act, bias))
    found = _attack(scene)
    assert float((found.inputs - scene.truth.inputs).abs().max()) < 1e-6
    assert float(found.objective.max()) < 1e-10
    assert found.status == ("converged",) * 3
    assert in_words(found.remarks) == ["the equations leave none of the 64 values of the image open"]


def test_fully_connected_layers_need_no_bias():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30, bias=False), nn.LeakyReLU(), nn.Linear(30, 5, bias=False))
    scene = _scene(net)
    assert float((_attack(scene).inputs - scene.truth.inputs).abs().max()) < 1e-8


def test_the_scheliga_cnn_in_single_precision():
    """Its valid convolutions ignore the last three rows and columns of a 32x32 image, which are filled in."""
    scene = pictures("scheliga-cnn", "digits", 2)
    found = _attack(scene)
    assert found.inputs.dtype == torch.float32
    error = (found.inputs - scene.truth.inputs).abs()
    assert float(error[..., :29, :29].max()) < 1e-3, error.amax((0, 1, 2))
    right = psnr(found.inputs, scene.truth.inputs, *scene.knowledge.space.bounds(scene.truth.inputs))
    wrong = psnr(found.inputs, scene.truth.inputs.flip(0), *scene.knowledge.space.bounds(scene.truth.inputs))
    assert bool((right > 22).all()), right
    assert bool((wrong < right - 10).all()), "as good as on the mismatch control"
    assert "of the 1024 values of the image open" in in_words(found.remarks)[0]
    assert min(found.remarks[0].numbers) > 100


@pytest.mark.parametrize("model", ["lenet-zhu", "cnn6"])
def test_the_studies_models_in_single_precision(model):
    data = load("digits").private
    inputs = interpolate(data.inputs[:2], 16).unsqueeze(1)
    net = build(model, channels=1, size=16, classes=10, generator=Key(0).generator())
    lower, upper = data.space.bounds(data.inputs)
    space = ImageSpace((1, 16, 16), data.mean, data.std)
    scene = observed(Client(net), Batch(inputs, data.targets[:2].unsqueeze(1)), 10, space)
    found = _attack(scene)
    assert bool((psnr(found.inputs, scene.truth.inputs, lower, upper) > 40).all())


def test_open_values_are_counted_and_filled_in_smoothly():
    """A valid convolution of stride 2 ignores the last row and column of an even image."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(72, 5))
    scene = _scene(net)
    found = _attack(scene)
    error = (found.inputs - scene.truth.inputs).abs()[:, 0, 0]
    assert float(error[:, :7, :7].max()) < 1e-6
    filled = found.inputs[:, 0, 0]
    steps = (filled[:, 7, :7] - filled[:, 6, :7]).abs().mean()
    assert float(steps) < 0.6 * float((filled[:, 6, :7] - filled[:, 5, :7]).abs().mean()), "rougher than it need be"
    assert in_words(found.remarks) == ["the equations leave 15 of the 64 values of the image open"]
    assert float(found.objective.max()) < 1e-10, "what is not seen is not in the gradient"


def _narrow(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv2d(6, channels, 3, stride=2, padding=1),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(16 * channels, 5),
    )


def test_equations_of_open_values_determine_nothing():
    """The second layer leaves most of its input open, so that the activation's slope at the first is a guess."""
    scene = _scene(_narrow(2))
    found = _attack(scene)
    error = (found.inputs - scene.truth.inputs).abs().flatten(1).amax(1)
    assert float(error.min()) > 0.5
    opened = dict(zip(("image", "second"), (each.numbers for each in found.remarks), strict=False))
    assert min(opened["image"]) > 40, "it is not known, and must not be called settled"
    # By singular values: 32 outputs and 108 entries of the gradient, four combinations of which are the same.
    assert opened["second"] == pytest.approx((248,) * 3, abs=0.5)


def test_guesses_do_not_change_known_values():
    scene = _scene(_narrow(6))
    found = _attack(scene)
    assert found.remarks[1].numbers == pytest.approx((48,) * 3, abs=0.5)
    assert max(found.remarks[0].numbers) < 0.5
    assert float((found.inputs - scene.truth.inputs).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "net",
    [_convolutions(nn.ReLU, True), nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))],
)
def test_update_of_zeros_determines_nothing(net):
    scene = _scene(net)
    sent = {name: torch.zeros_like(value) for name, value in scene.observation.update.items()}
    found = _attack(replace(scene, observation=replace(scene.observation, update=sent)))
    assert found.remarks[0].numbers == pytest.approx((64,) * 3, abs=0.01)
    assert found.remarks[1].numbers[0] > 8.9


def test_misfit_decides_between_two_scales_of_one_output():
    """With one logit, <W, dW> = -u / (1 + e^u) has two roots where u > 0 (Zhu and Blaschko 2021, section 3.1)."""

    def logistic(outputs, targets):
        margin = (2.0 * targets - 1) * outputs.squeeze(-1)
        return torch.nn.functional.softplus(-margin)

    net = _convolutions(nn.LeakyReLU, False, classes=1)
    scene = _scene(net, classes=2, target_clients=24, loss=logistic)
    found = _attack(scene)
    assert float((found.inputs - scene.truth.inputs).abs().max()) < 1e-5
    assert any("2 scales of the last layer's error fit" in said for said in in_words(found.remarks))


def test_objective_is_zero_only_at_the_ground_truth():
    scene = _scene(_convolutions(nn.Sigmoid, True))
    told = ([scene.observation], scene.client, scene.knowledge, Key(0))
    assert float(Recursive().evaluate(*told, scene.truth.inputs, {}).max()) < 1e-20
    assert float(Recursive().evaluate(*told, scene.truth.inputs.roll(1, 0), {}).min()) > 1e-5


def test_labels_can_be_read_off():
    scene = _scene(_convolutions(nn.Sigmoid, True))
    blind = replace(scene, knowledge=replace(scene.knowledge, targets=None))
    found = _attack(blind, make_attack("r-gap(labels=idlg)"))
    assert torch.equal(found.targets, scene.truth.targets)
    assert float((found.inputs - scene.truth.inputs).abs().max()) < 1e-6


def test_nan_update_affects_one_target_client_only():
    scene = _scene(_convolutions(nn.Sigmoid, True))
    seen = scene.observation
    sent = {name: value.clone() for name, value in seen.update.items()}
    sent["0.weight"][1, 0, 0, 0, 0] = torch.nan
    found = _attack(replace(scene, observation=replace(seen, update=sent)))
    assert found.status == ("converged", "diverged", "converged")
    error = (found.inputs - scene.truth.inputs).abs().flatten(1).amax(1)
    assert float(error[[0, 2]].max()) < 1e-6
    assert bool(found.inputs.isfinite().all())


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_huge_update_terminates(size):
    scene = _scene(_convolutions(nn.ReLU, False))
    sent = {name: value * size for name, value in scene.observation.update.items()}
    found = _attack(replace(scene, observation=replace(scene.observation, update=sent)))
    assert bool(found.inputs.isfinite().all())


def test_noise_raises_the_objective():
    """The control: a disturbed gradient gives a useless image, and a high objective."""
    scene = _scene(_convolutions(nn.Sigmoid, True))
    draw, seen = Key(1).generator(), scene.observation
    sent = {n: v + 0.1 * v.std() * torch.randn(v.shape, dtype=v.dtype, generator=draw) for n, v in seen.update.items()}
    found = _attack(replace(scene, observation=replace(seen, update=sent)))
    assert float((found.inputs - scene.truth.inputs).square().mean(dim=(1, 2, 3, 4)).min()) > 1e-3
    assert float(found.objective.min()) > 1e-3


class _Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 5)

    def forward(self, x):
        return self.last((x + self.first(x)).flatten(1))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 5)

    def forward(self, x):
        return self.last(self.first(self.first(x)).flatten(1))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 5)

    def forward(self, x):
        return 2 * self.last(x.flatten(1))


class _Turned(_Scaled):
    def forward(self, x):
        return self.last(x.flip(-1, -2).flatten(1))


class _Clamped(_Scaled):
    def forward(self, x):
        return self.last(x.clamp(0, 1).flatten(1))


class _Named(_Scaled):
    def forward(self, x):
        return self.last(input=x.flatten(1))


class _Both(nn.Module):
    def forward(self, x):
        return x, 2 * x


class _Pair(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.both = _Both()

    def forward(self, x):
        return self.last(self.both(x)[1].flatten(1))


class _Centred(nn.Conv2d):
    def forward(self, input):
        return self._conv_forward(input, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def _tied() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    net[3].bias = net[1].bias
    return net


def test_a_layer_may_take_its_input_by_name():
    scene = _scene(_Named())
    assert float((_attack(scene).inputs - scene.truth.inputs).abs().max()) < 1e-8


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_loss_may_have_any_scale_without_a_bias(size):
    def loss(outputs, targets):
        return size * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    scene = _scene(_convolutions(nn.LeakyReLU, False), loss=loss)
    assert float((_attack(scene).inputs - scene.truth.inputs).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (_Turned(), "last does not take the image"),
        (_Clamped(), "last does not take the image"),
        (_Pair(), "last does not take the output of the module before it"),
        (nn.Sequential(_Centred(1, 4, 3), nn.Flatten(), nn.Linear(144, 5)), "'0' is a _Centred that computes more"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Hardtanh(), nn.Flatten(), nn.Linear(144, 5)), "Hardtanh"),
        (_tied(), "uses the bias of '3' twice"),
        (_Skip(), "last does not take the output of the module before it"),
        (_Twice(), "twice"),
        (_Scaled(), "its answer does not take"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)), "MaxPool2d"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 5)), "GELU"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh()), "does not end with a linear"),
        (nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.Flatten(), nn.Linear(256, 5)), "named padding"),
    ],
)
def test_models_that_are_not_a_chain_raise_with_the_reason(model, word):
    prospect = Prospect(Client(model), (1, 8, 8), 1, 5, 0)
    problems = list(Recursive().problems(prospect))
    assert any(word in problem.what for problem in problems), problems
    blank = {n: torch.zeros(1, *v.shape) for n, v in model.named_parameters()}
    seen = Observation(Client(model).params(), blank, 1, (0,))
    with pytest.raises(GradveilError, match=word):
        Recursive()(
            [seen], Client(model), Knowledge(ImageSpace((1, 8, 8)), 5, targets=torch.zeros(1, 1).long()), Key(0)
        )


def test_batches_local_steps_and_frozen_layers_raise_together():
    net = _convolutions(nn.ReLU, True)
    prospect = Prospect(Client(net, local=Local(lr=0.1, steps=2, batch=2), trainable=("5.*",)), (1, 8, 8), 4, 5, 0)
    where = {(problem.where, problem.what) for problem in Recursive().problems(prospect)}
    assert any("mixes 4" in what for _, what in where)
    assert any("local steps" in what for _, what in where)
    assert any("0.weight is not sent" in what for _, what in where)
    assert any("2.weight is not sent" in what for _, what in where)
