"""The models: sizes as described, weights from the generator only, and derivatives that batching does not change."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models import MODELS, build
from gradveil.nn.normalisation import LayerNorm

COUNTS = {
    "lenet-zhu": 15_826,
    "cnn6": 125_456,
    "convnet": 2_904_970,
    "mnist-conv": 119_530,
    "scheliga-cnn": 65_962,
    "mnist-cnn-glaus": 35_900,
    "mlp": 1_841_162,
    "vit": 1_609_216,
    "resnet18": 11_181_642,
    "resnet34": 21_289_802,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
}
IMAGES = [name for name, entry in MODELS.items() if "channels" in entry.takes]
SMALLEST = dict.fromkeys(IMAGES, 32) | {"mnist-conv": 8, "mnist-cnn-glaus": 14, "lenet-zhu": 8, "cnn6": 8}


def make(name: str, seed: int = 0, **options) -> nn.Module:
    sizes = {key: options.pop(key, MODELS[name].defaults[key]) for key in ("channels", "size", "classes")}
    return build(name, **sizes, generator=torch.Generator().manual_seed(seed), **options)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", IMAGES)
def test_parameter_count_is_that_of_the_study(name: str, generator: torch.Generator) -> None:
    model = make(name)
    channels, size, classes = model.input_shape[0], model.input_shape[1], MODELS[name].defaults["classes"]
    assert count(model) == COUNTS[name]
    assert model.eval()(torch.rand(2, channels, size, size, generator=generator)).shape == (2, classes)


@pytest.mark.parametrize("name", IMAGES)
def test_channels_size_classes_norm_and_activation_are_choices(name: str, generator: torch.Generator) -> None:
    model = make(name, channels=2, size=48, classes=7, activation="tanh").eval()
    assert model(torch.rand(1, 2, 48, 48, generator=generator)).shape == (1, 7)
    if "norm" in MODELS[name].defaults:
        kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
        for norm in ("batch", "group", "none"):
            modules = list(make(name, norm=norm).modules())
            for kind, layer in kinds.items():
                assert any(isinstance(module, layer) for module in modules) == (norm == kind)


@pytest.mark.parametrize("name", IMAGES)
def test_weights_come_from_the_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = make(name, 1).state_dict(), make(name, 1).state_dict(), make(name, 2).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["lenet-zhu", "mnist-cnn-glaus"])
def test_sigmoid_networks_start_uniform_in_half(name: str) -> None:
    for parameter in make(name).parameters():
        assert parameter.abs().max() <= 0.5
    flat = torch.cat([parameter.flatten() for parameter in make(name).parameters()])
    assert flat.std().item() == pytest.approx(12**-0.5, rel=0.02)


def test_lenet_may_start_with_the_law_of_pytorch() -> None:
    drawn = build("lenet-zhu", channels=3, size=32, classes=10, generator=Key(0).generator(), weights="default")
    assert float(drawn.head.weight.detach().abs().max()) <= drawn.head.weight.shape[1] ** -0.5
    with pytest.raises(GradveilError, match=r"model.weights: unknown name 'small'"):
        build("lenet-zhu", channels=3, size=32, classes=10, generator=Key(0).generator(), weights="small")


def test_resnet_without_a_pool_has_the_large_first_convolution() -> None:
    parts = {"channels": 3, "size": 64, "classes": 10, "generator": Key(0).generator()}
    pooled, bare = (build("resnet18", **parts, stem=stem, width=8) for stem in ("imagenet", "no-pool"))
    sides = [net.body.stem(torch.zeros(1, 3, 64, 64)).shape[-1] for net in (pooled, bare)]
    assert sides == [16, 32]


def test_default_law_is_that_of_pytorch() -> None:
    model = make("scheliga-cnn")
    conv = model.get_submodule("body.block1.conv")
    bound = (16 * 25) ** -0.5
    for parameter in (conv.weight, conv.bias):
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.8 * bound
    assert conv.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_initialise_names_parameters_it_has_no_law_for(generator: torch.Generator) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(GradveilError, match=r"0: no initial law is known for the parameters scale of Scale"):
        initialise(nn.Sequential(Scale()), generator)


def cosine_distance(model: nn.Module, targets: list[Tensor], label: Tensor, params: dict[str, Tensor], x: Tensor):
    def loss(p: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (x,)), label)

    gradient = list(grad(loss)(params).values())
    dot = sum((g * t).sum() for g, t in zip(gradient, targets, strict=True))
    norms = sum((g * g).sum() for g in gradient) * sum((t * t).sum() for t in targets)
    return 1 - dot / norms.sqrt()


def looped_distance(model: nn.Module, targets: list[Tensor], label: Tensor, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), label)
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    dot = sum((g * t).sum() for g, t in zip(gradient, targets, strict=True))
    norms = sum((g * g).sum() for g in gradient) * sum((t * t).sum() for t in targets)
    return 1 - dot / norms.sqrt()


def assert_batched_equals_looped(model: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> None:
    """vmap(grad), then reverse mode for the inputs, against one target client at a time without torch.func."""
    model = model.double()
    target_clients, examples = 2, 2
    x = torch.rand(target_clients, examples, *shape, generator=generator, dtype=torch.float64)
    label = torch.zeros(examples, dtype=torch.long)
    params = {name: value.detach() for name, value in model.named_parameters()}
    targets = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in params.values()]
    batched_x = x.clone().requires_grad_()
    batched = vmap(partial(cosine_distance, model, targets, label, params))(batched_x)
    (batched_slope,) = torch.autograd.grad(batched.sum(), batched_x)
    for target_client in range(target_clients):
        single = x[target_client].clone().requires_grad_()
        distance = looped_distance(model, targets, label, single)
        (slope,) = torch.autograd.grad(distance, single)
        assert slope.abs().max() > 0
        torch.testing.assert_close(batched[target_client], distance, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(batched_slope[target_client], slope, rtol=1e-7, atol=1e-9 * slope.abs().max().item())


@pytest.mark.parametrize("name", IMAGES)
def test_batched_equals_looped(name: str, generator: torch.Generator) -> None:
    classes = max(2, MODELS[name].defaults["classes"])
    model = make(name, size=SMALLEST[name], classes=classes, **LIGHT.get(name, {})).eval()
    assert_batched_equals_looped(model, model.input_shape, generator)


@pytest.mark.parametrize("name", ["lenet-zhu", "scheliga-cnn"])
def test_batched_equals_looped_with_group_norm(name: str, generator: torch.Generator) -> None:
    model = make(name, size=SMALLEST[name], norm="group")
    assert_batched_equals_looped(model, model.input_shape, generator)


LIGHT: dict[str, dict[str, int]] = {
    "convnet": {"width": 4},
    "vit": {"width": 16, "mlp": 8, "heads": 4, "blocks": 2},
    "resnet18": {"width": 4},
    "resnet34": {"width": 4},
    "vgg11": {"width": 4},
    "vgg13": {"width": 4},
    "vgg16": {"width": 4},
    "resnet20": {"width": 4},
    "resnet32": {"width": 2},
}
"""Narrower versions of the wide models, to keep the law test short."""


def test_law_catches_the_layer_norm_of_torch(generator: torch.Generator) -> None:
    def network(norm: nn.Module) -> nn.Module:
        layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), norm, nn.Tanh(), nn.Linear(6, 3))
        for parameter in layers.parameters():
            parameter.data.uniform_(-1, 1, generator=generator)
        return layers

    assert_batched_equals_looped(network(LayerNorm(6)), (3, 2, 2), generator)
    with pytest.raises(AssertionError, match="not close"):
        assert_batched_equals_looped(network(nn.LayerNorm(6)), (3, 2, 2), generator)


@pytest.mark.parametrize(("options", "std"), [({}, 1.0), ({"position_std": 0.02}, 0.02)])
def test_tokens_and_positions_of_the_transformer_start_from_a_normal_law(options: dict[str, float], std: float) -> None:
    model = build("vit", channels=3, size=32, classes=10, generator=torch.Generator().manual_seed(0), **options)
    tokens = model.get_submodule("body.tokens")
    drawn = torch.cat([value.detach().flatten() for value in (tokens.token, tokens.position)])
    assert float(drawn.std()) == pytest.approx(std, rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02 * std)
