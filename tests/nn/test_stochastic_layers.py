"""Dropout and the bottlenecks: their sums against naive references, their noise, and where the surgeries put them."""

from collections.abc import Callable
from copy import deepcopy
from math import log

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.nn.initial_weights import initialise
from gradveil.nn.keylock import with_keylock
from gradveil.nn.model_outputs import adopted
from gradveil.nn.models import MODELS, build
from gradveil.nn.module_paths import caught_by_linear, downstream, features, last_layer, output_shape
from gradveil.nn.stochastic import collect_penalties, model_noise, noise_names
from gradveil.nn.stochastic_layers import (
    ConvBottleneck,
    Dropout,
    VariationalBottleneck,
    with_cvb,
    with_dropout,
    with_precode,
)


def make(name: str = "scheliga-cnn", **options) -> nn.Module:
    sizes = {key: MODELS[name].defaults[key] for key in ("channels", "size", "classes")}
    return build(name, **sizes, generator=torch.Generator().manual_seed(0), **options)


def images(generator: torch.Generator, model: nn.Module, count: int = 3) -> Tensor:
    return torch.rand(count, *model.input_shape, generator=generator)


def run(model: nn.Module, x: Tensor, noise: dict[str, Tensor]) -> Tensor:
    return functional_call(model, {**dict(model.named_parameters()), **noise}, (x,), strict=True)


DEFENDED = {
    "dropout": lambda model, g: with_dropout(model, 0.25),
    "precode": lambda model, g: with_precode(model, g),
    "cvb": lambda model, g: with_cvb(model, g),
}


def test_dropout_scales_by_the_mask(generator: torch.Generator) -> None:
    x = torch.randn(4, 5, generator=generator)
    mask = (torch.rand(4, 5, generator=generator) < 0.6).float()
    naive = torch.tensor([[v * m / 0.6 for v, m in zip(*rows, strict=True)] for rows in zip(x, mask, strict=True)])
    torch.testing.assert_close(functional_call(Dropout(0.4), {"mask": mask}, (x,)), naive)


def test_dropout_declares_its_mask(generator: torch.Generator) -> None:
    module, x = Dropout(0.3), torch.randn(50, 40, generator=generator)
    noise = module.noise(x)["mask"]
    assert (noise.shape, noise.lower, noise.upper) == ((50, 40), 0.0, 1.0)
    drawn = noise.sample(Key(0))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.mean().item() == pytest.approx(0.7, abs=4 * (0.21 / 2000) ** 0.5)
    torch.testing.assert_close(functional_call(module, {"mask": noise.off()}, (x,)), x)
    assert torch.equal(module(x), x)


def test_channelwise_dropout_drops_whole_channels(generator: torch.Generator) -> None:
    module, x = Dropout(0.5, channelwise=True), torch.rand(8, 6, 3, 3, generator=generator) + 1
    mask = module.noise(x)["mask"].sample(Key(0))
    dropped = functional_call(module, {"mask": mask}, (x,)) == 0
    assert torch.equal(dropped.all((2, 3)), dropped.any((2, 3)))
    assert torch.equal(dropped.all((2, 3)), mask[:, :, 0, 0] == 0)


@pytest.mark.parametrize("p", [1.0, -0.1])
def test_dropout_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(GradveilError, match=r"dropout.p: is .* -> give a probability in \[0, 1\)"):
        Dropout(p)


def test_precode_is_what_the_paper_says(generator: torch.Generator) -> None:
    module = initialise(VariationalBottleneck(6, 4, beta=0.5), generator)
    x, eps = torch.randn(3, 6, generator=generator), torch.randn(3, 4, generator=generator)
    with collect_penalties() as penalties:
        y = functional_call(module, {**dict(module.named_parameters()), "eps": eps}, (x,))
    total = 0.0
    for row, noise, out in zip(x, eps, y, strict=True):
        encoded = module.encoder.weight @ row + module.encoder.bias
        mean, sigma = encoded[:4], torch.log(1 + encoded[4:].exp())
        torch.testing.assert_close(out, module.decoder.weight @ (mean + sigma * noise) + module.decoder.bias)
        normal = torch.distributions.Normal(mean, sigma)
        kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
        total += kl.item() / log(2) / 3
    assert [penalty.item() for penalty in penalties] == [pytest.approx(0.5 * total, rel=1e-5)]


@pytest.mark.parametrize(("channels", "k"), [(3, 8), (8, 4), (64, 32)])
def test_cvb_chooses_its_channels(channels: int, k: int) -> None:
    assert ConvBottleneck(channels).k == k


@pytest.mark.parametrize("kl", ["exact", "published_code"])
def test_cvb_is_what_the_paper_says(kl: str, generator: torch.Generator) -> None:
    module = initialise(ConvBottleneck(8, 3, beta=0.1, kl=kl), generator)
    x, eps = 5 * torch.randn(2, 8, 4, 4, generator=generator), torch.randn(2, 4, 4, 4, generator=generator)
    with collect_penalties() as penalties:
        y = functional_call(module, {**dict(module.named_parameters()), "eps": eps}, (x,))
    mean = F.conv2d(x, module.mean.weight, padding="same")
    raw = torch.minimum(
        torch.maximum(F.conv2d(x, module.scale.weight, padding="same"), torch.tensor(-5.0)), torch.tensor(5.0)
    )
    sigma = torch.log(1 + raw.exp())
    torch.testing.assert_close(y, torch.einsum("bkhw,ck->bchw", mean + sigma * eps, module.decoder.weight[:, :, 0, 0]))
    if kl == "exact":
        standard = torch.distributions.Normal(0.0, 1.0)
        divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mean, sigma), standard)
    else:
        divergence = -0.5 * (1 + sigma - mean**2 - sigma.exp())
    assert penalties[0].item() == pytest.approx(0.1 * divergence.sum().item() / (2 * 4 * 4), rel=1e-4)


def test_cvb_takes_tokens_as_square_grids(generator: torch.Generator) -> None:
    module = initialise(ConvBottleneck(5, 3), generator)
    x = torch.randn(2, 5, 9, generator=generator)
    torch.testing.assert_close(module(x), module(x.reshape(2, 5, 3, 3)).reshape(2, 5, 9))
    assert module.noise(x)["eps"].shape == (2, 8, 3, 3)
    with pytest.raises(GradveilError, match=r"cannot take values of shape \(2, 5, 8\) -> place it after feature maps"):
        module(x[:, :, :8])


@pytest.mark.parametrize("defence", DEFENDED)
@pytest.mark.parametrize("name", ["scheliga-cnn", "lenet-zhu", "vit", "resnet18", "mnist-conv"])
def test_surgery_keeps_weights_and_the_given_model(defence: str, name: str, generator: torch.Generator) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shape_before = str(model)
    defended = DEFENDED[defence](model, torch.Generator().manual_seed(3))
    again = DEFENDED[defence](model, torch.Generator().manual_seed(3)).state_dict()
    assert str(model) == shape_before
    state = defended.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all(torch.equal(again[key], value) for key, value in state.items())
    assert (set(state) == set(before)) == (defence == "dropout")
    assert not noise_names(model)
    x = images(generator, model)
    noise = model_noise(defended, x)
    assert set(noise) == noise_names(defended)
    if defence == "dropout":
        assert len(noise) == len(model.dropout_positions)
        torch.testing.assert_close(run(defended, x, noise.neutral()), model(x))
    first, second = (run(defended, x, noise.sample(Key(seed))) for seed in (1, 2))
    assert first.shape == model(x).shape
    assert not torch.allclose(first, second)
    assert torch.equal(first, run(defended, x, noise.sample(Key(1))))


def test_cvb_stands_where_the_study_puts_it() -> None:
    generator = torch.Generator().manual_seed(0)
    cnn = with_cvb(make(), generator).get_submodule("body.block0.cvb")
    resnet = with_cvb(make("resnet18"), generator).get_submodule("body.layer1.cvb")
    vit = with_cvb(make("vit"), generator).get_submodule("body.block0.cvb")
    assert [(m.k, m.mean.kernel_size[0], m.beta) for m in (cnn, resnet, vit)] == [
        (8, 5, 0.1),
        (32, 5, 5e-5),
        (32, 3, 0.1),
    ]


def test_precode_follows_a_module_that_is_no_linear_layer(generator: torch.Generator) -> None:
    model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=generator)
    defended = with_precode(model, generator, k=7, position="body.block1")
    x = torch.rand(2, 1, 32, 32, generator=generator)
    before, after = output_shape(model, "body.block1", x), output_shape(defended, "body.block1", x)
    assert before == after
    assert model_noise(defended, x)["body.block1.precode.eps"].shape == (2, 7)
    assert defended(x).shape == (2, 10)
    assert {name for name in downstream(defended, x) if "block1" in name} == {
        f"body.block1.precode.decoder.{part}" for part in ("weight", "bias")
    }


def test_precode_stands_before_the_last_layer(generator: torch.Generator) -> None:
    model = make()
    defended = with_precode(model, generator, k=7)
    assert last_layer(defended) == "head"
    x = images(generator, model)
    torch.testing.assert_close(features(model, x), model.body(x))
    torch.testing.assert_close(features(defended, x), defended.body.precode(model.body(x)))


def users_model() -> nn.Module:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 3)
            self.conv = nn.Conv2d(1, 4, 3)
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.bn(self.conv(x)).relu().flatten(1))

    return initialise(Users(), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("defended", [with_dropout, with_precode])
def test_code_of_a_model_reads_its_layers_beside_those_of_a_defence(
    generator: torch.Generator, defended: Callable[..., nn.Module]
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.head = nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            assert self.head.in_features == self.up.out_features
            return self.head(self.act(self.up(x))) + self.head.weight.sum() * 0

    model = initialise(Tied(), torch.Generator().manual_seed(0))
    changed = defended(model, 0.5, where=["head"]) if defended is with_dropout else defended(model, generator, k=2)
    assert set(noise_names(changed)) & {"head.dropout.mask", "head.precode.eps"}
    assert changed.head.in_features == 8
    assert changed.head.weight is changed.head.inner.weight
    with pytest.raises(AttributeError, match="nothing"):
        _ = changed.head.nothing
    assert deepcopy(changed).head.out_features == 6


def test_surgery_on_a_users_model(generator: torch.Generator) -> None:
    model, x = users_model(), torch.rand(2, 1, 4, 4, generator=generator)
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    assert last_layer(model) == last_layer(model, x) == "fc"
    dropped = with_dropout(model, 0.5, where=["conv"])
    assert noise_names(dropped) == {"conv.dropout.mask"}
    assert torch.equal(dropped.conv.inner.weight, model.conv.weight)
    squeezed = with_precode(model, generator, k=3)
    assert noise_names(squeezed) == {"fc.precode.eps"}
    assert last_layer(squeezed) == "fc.inner"
    cvb = with_cvb(model, generator, position="conv", inputs=x)
    assert noise_names(cvb) == {"conv.cvb.eps"}
    assert squeezed(x).shape == cvb(x).shape == dropped(x).shape == (2, 3)
    assert model.training
    for name, value in model.named_buffers():
        assert torch.equal(value, statistics[name])


def test_last_layer_can_follow_the_execution(generator: torch.Generator) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(3, 2)
            self.first = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    net, x = Backwards(), torch.rand(2, 4, generator=generator)
    assert last_layer(net) == "first"
    assert last_layer(net, x) == "second"
    with caught_by_linear(net) as caught:
        net(x)
    assert [path for path, _ in caught] == ["first", "second"]
    torch.testing.assert_close(caught[-1][1], net.first(x))
    net.input_shape = (4,)
    assert noise_names(with_precode(net, generator, k=3)) == {"second.precode.eps"}


def test_several_surgeries_follow_each_other(generator: torch.Generator) -> None:
    model = with_dropout(with_precode(with_cvb(make(), generator), generator), 0.25)
    twice = with_dropout(model, 0.5, where=["body.block0"])
    assert "body.block0.dropout2.mask" in noise_names(twice)
    assert noise_names(model) == {
        "body.block0.cvb.eps",
        "body.precode.eps",
        *(f"body.block{i}.dropout.mask" for i in range(3)),
    }


class Residual(nn.Module):
    """One activation module that runs twice, as in a residual block of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.start = nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid()
        self.conv, self.relu, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Linear(4, 2)
        self.unused, self.second = nn.Linear(3, 3), nn.Linear(4, 4)
        self.end = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.enter(x))
        x = self.relu(self.conv(self.relu(x)) + x).mean((2, 3))
        logits = self.fc(x)
        self.second(x)
        return self.end(logits)


def test_models_that_declare_no_places_have_them_after_their_activations(generator: torch.Generator) -> None:
    net = Residual()
    known = adopted(net, torch.rand(2, 3, 8, 8, generator=generator))
    assert not hasattr(net, "input_shape")
    assert known.fc is net.fc
    dropped = with_dropout(known)
    assert noise_names(dropped) == {"start.dropout.mask", "relu.dropout.mask"}
    assert dropped.relu.dropout.calls == with_dropout(known, where=["relu"]).relu.dropout.calls == 2
    assert noise_names(with_cvb(known, generator)) == {"start.cvb.eps"}
    assert noise_names(with_precode(known, generator)) == {"fc.precode.eps"}  # `second` says nothing of the logits
    both = with_dropout(with_precode(with_cvb(known, generator), generator))
    assert noise_names(both) == {
        "start.inner.dropout.mask",
        "start.cvb.eps",
        "relu.dropout.mask",
        "fc.precode.eps",
    }


def conv(inner: int = 4) -> nn.Conv2d:
    return nn.Conv2d(3, inner, 3, padding=1)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.fc = conv(), nn.ReLU(), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.act(self.conv(x))).flatten(1))


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.wide, self.fc = nn.ReLU(), nn.Linear(192, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.act(self.wide(x.flatten(1)))))


class Widths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.one, self.fc = nn.ReLU(), conv(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.act(self.one(x)).mean((2, 3))))


class Late(nn.Module):
    """Its first convolution is not the first that is defined, nor is that run."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.first, self.fc = conv(5), conv(), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(x).flatten(1))


SHARED = nn.ReLU()


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (Functional(), "'model' calls relu as a function"),
        (Logits(), "'act' runs after the last linear layer too"),
        (Widths(), "'act' runs 2 times, with different shapes"),
        (nn.Sequential(conv(3), SHARED, conv(3), SHARED), "no activation module runs before a last linear layer"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(192, 2), SHARED, nn.Linear(2, 2), SHARED, nn.Linear(2, 2)),
            "is '4' too",
        ),
        (nn.Sequential(nn.Flatten(0, 1), SHARED, nn.Flatten(), nn.Linear(64, 2)), "do not have the batch first"),
    ],
)
def test_places_that_would_be_a_part_of_a_model_are_left_to_its_owner(net: nn.Module, said: str) -> None:
    known = adopted(net, torch.rand(2, 3, 8, 8))
    with pytest.raises(GradveilError, match=said):
        with_dropout(known)


def test_outputs_that_are_overwritten_and_models_without_parameters_raise_nothing_raw(
    generator: torch.Generator,
) -> None:
    net = adopted(nn.Sequential(nn.Flatten(), nn.Linear(192, 2), nn.ReLU(inplace=True)), torch.rand(2, 3, 8, 8))
    assert noise_names(with_precode(net, generator)) == {"1.precode.eps"}
    bare = adopted(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.rand(2, 3, 8, 8))
    for surgery in (
        with_dropout,
        lambda model: with_cvb(model, generator),
        lambda model: with_precode(model, generator),
    ):
        with pytest.raises(GradveilError):
            surgery(bare)


def test_layers_that_do_not_run_and_other_meanings_of_input_shape_are_no_places(generator: torch.Generator) -> None:
    known = adopted(Late(), torch.rand(2, 3, 8, 8))
    assert isinstance(with_keylock(known).first, nn.Sequential)
    odd = Functional()
    odd.input_shape = "RGB"
    with pytest.raises(GradveilError, match="no input_shape"):
        with_dropout(odd)


BAD = [
    (lambda m, u, g: with_dropout(u), r"no dropout_positions, and no input_shape -> give .*, some of: fc, conv, bn"),
    (lambda m, u, g: with_dropout(m, where=["body.block9", "x"]), r"dropout.where body.block9: no such.*\n.*where x:"),
    (lambda m, u, g: with_cvb(u, g), r"declares no cvb_position, and .* -> give a module path, one of: fc, conv, bn"),
    (lambda m, u, g: with_cvb(u, g, position="conv"), r"declares no input_shape -> set model.input_shape"),
    (lambda m, u, g: with_cvb(m, g, position="blk"), r"blk: is not a module of this model -> its modules: body"),
    (lambda m, u, g: with_cvb(m, g, position="head"), r"cannot take values of shape \(1, 10\)"),
    (lambda m, u, g: with_cvb(m, g, kernel=4), r"cvb.kernel: is 4 -> choose an odd number"),
    (lambda m, u, g: with_cvb(m, g, kl="bits"), r"cvb.kl: unknown name 'bits' -> choose one of: exact, published_code"),
    (
        lambda m, u, g: with_precode(u, g, position="conv"),
        r"conv: is a Conv2d -> choose an nn.Linear, for example 'fc'",
    ),
    (lambda m, u, g: with_precode(nn.Flatten(), g), r"has no nn.Linear"),
]


@pytest.mark.parametrize(("surgery", "message"), BAD)
def test_impossible_surgeries_are_explained(surgery, message: str, generator: torch.Generator) -> None:
    with pytest.raises(GradveilError, match=message):
        surgery(make(), users_model(), generator)


@pytest.mark.parametrize("defence", DEFENDED)
def test_batched_equals_looped_with_noise(defence: str, generator: torch.Generator) -> None:
    """The derivative of ||g||^2 with respect to inputs *and* noise, penalties in the loss, in float64."""
    model = DEFENDED[defence](make().double(), generator)
    params = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.rand(2, 1, *model.input_shape, generator=generator, dtype=torch.float64)
    spec = model_noise(model, x[0])
    noise = {name: torch.stack([spec.sample(Key(v))[name] for v in (0, 1)]) for name in spec}
    assert all(value.dtype == torch.float64 for value in noise.values())

    def square(x: Tensor, noise: dict[str, Tensor], differentiate=grad) -> Tensor:
        def loss(p: dict[str, Tensor]) -> Tensor:
            with collect_penalties() as penalties:
                outputs = functional_call(model, {**p, **noise}, (x,), strict=True)
            return F.cross_entropy(outputs, torch.tensor([3])) + sum(penalties)

        return sum(slope.square().sum() for slope in differentiate(loss)(params).values())

    def by_autograd(loss):
        def slopes(p: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
            return dict(zip(leaves, torch.autograd.grad(loss(leaves), leaves.values(), create_graph=True), strict=True))

        return slopes

    inputs = {"x": x.clone().requires_grad_(), **{n: v.clone().requires_grad_() for n, v in noise.items()}}
    total = vmap(lambda d: square(d["x"], {k: v for k, v in d.items() if k != "x"}))(inputs).sum()
    batched = torch.autograd.grad(total, list(inputs.values()))
    for target_client in (0, 1):
        alone = {name: value[target_client].detach().clone().requires_grad_() for name, value in inputs.items()}
        value = square(alone["x"], {k: v for k, v in alone.items() if k != "x"}, by_autograd)
        for one, many in zip(torch.autograd.grad(value, list(alone.values())), batched, strict=True):
            assert one.abs().max() > 0
            torch.testing.assert_close(many[target_client], one, rtol=1e-7, atol=1e-9 * one.abs().max().item())
