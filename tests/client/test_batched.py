"""Batched per-target gradients equal a loop over targets, to the last digits, and so do their derivatives."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.client import Client, cross_entropy, looped_updates
from gradveil.core.noise import Key, Noise, Normal
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.gradients.objective import Objective
from gradveil.gradients.per_client import obstacle, per_client_gradients, reference_gradients
from gradveil.nn.models import MODELS, build
from gradveil.nn.normalisation import FrozenNorm, InstanceNorm, LayerNorm
from gradveil.nn.stochastic import Stochastic, model_noise, penalise
from gradveil.nn.stochastic_layers import Dropout, with_dropout

OF_IMAGES = [name for name, entry in MODELS.items() if "channels" in entry.takes]

SMALL = {"width": 8, "blocks": 1, "heads": 2, "mlp": 8}


def looped(
    objective: Objective, trained: Tensors, frozen: Tensors, batch: Batch, noise: Mapping[str, Tensor]
) -> Tensors:
    """The plain loop of every existing tool: ordinary reverse mode, one target client after the other."""
    rows: list[tuple[Tensor, ...]] = []
    live = {name: value.detach().requires_grad_() for name, value in trained.items()}
    for v in range(batch.inputs.shape[0]):
        row = {name: value[v] for name, value in noise.items()}
        value = objective.value({**live, **frozen}, Batch(batch.inputs[v], batch.targets[v]), row)
        result = torch.autograd.grad(value, list(live.values()), create_graph=True, allow_unused=True)
        rows.append(
            tuple(g if g is not None else torch.zeros_like(p) for g, p in zip(result, live.values(), strict=True))
        )
    return dict(zip(live, (torch.stack(column) for column in zip(*rows, strict=True)), strict=True))


def assert_agrees(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    frozen: frozenset[str] = frozenset(),
    soft: bool = False,
) -> None:
    """Compare gradients, and their derivatives with respect to inputs, soft targets and noise."""
    model = model.double()
    target_clients, examples = shape[:2]
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(0.1 * torch.rand(buffer.shape, generator=g) + 0.05)
        for parameter in model.parameters():  # norms start at 1 and 0, which would hide mistakes
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
    inputs = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 4, (target_clients, examples), generator=g)
    if soft:
        targets = torch.rand((target_clients, examples, 4), generator=g, dtype=torch.float64).requires_grad_()
    spec = model_noise(model, inputs[0]).to(torch.float64)
    rows = [spec.sample(Key(0, ("victim", v))) for v in range(target_clients)]
    noise = {name: torch.stack([row[name] for row in rows]).requires_grad_() for name in spec}
    params = {name: value.detach() for name, value in model.named_parameters()}
    trained = {name: value for name, value in params.items() if name not in frozen}
    rest = {name: value for name, value in params.items() if name in frozen}
    objective, batch = Objective(model, loss), Batch(inputs, targets)

    result = per_client_gradients(objective, trained, rest, batch, noise)
    expected = looped(objective, trained, rest, batch, noise)
    leaves = [inputs, *noise.values(), *([targets] if soft else [])]
    directions = {n: torch.randn(v.shape, generator=g, dtype=torch.float64) for n, v in expected.items()}

    def derivative(gradients: Tensors) -> tuple[Tensor, ...]:
        value = torch.stack([(gradients[n] * d).sum() for n, d in directions.items()]).sum()
        return torch.autograd.grad(value, leaves)

    assert list(result) == list(expected)
    size = max(float(value.detach().abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-12 * max(1, size), msg=name)
    for one, other in zip(derivative(result), derivative(expected), strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))
    with torch.no_grad():
        assert obstacle(objective, trained, rest, batch, noise) is None


def small(name: str, **options: object) -> nn.Module:
    selected = {key: value for key, value in SMALL.items() if key in MODELS[name].defaults}
    return build(
        name, channels=3, size=32, classes=4, generator=torch.Generator().manual_seed(1), **{**selected, **options}
    )


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=["one-image", "batch"])
def test_per_client_gradients_of_every_model_equal_the_loop(name: str, shape: tuple[int, int]) -> None:
    assert_agrees(small(name).eval(), (*shape, 3, 32, 32))


@pytest.mark.parametrize("name", [name for name in MODELS if "norm" in MODELS[name].defaults])
def test_per_client_gradients_with_group_norm_equal_the_loop(name: str) -> None:
    if MODELS[name].defaults["norm"] == "group":
        assert_agrees(small(name, norm="none"), (2, 1, 3, 32, 32))
    else:
        assert_agrees(small(name, norm="group"), (2, 1, 3, 32, 32))


class KL(Stochastic):
    """A bottleneck of its own: noise, and a penalty that is a mean over the examples."""

    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.declare("eps")

    def noise(self, x: Tensor) -> dict[str, Noise]:
        return {"eps": Noise(tuple(x.shape), Normal())}

    def forward(self, x: Tensor) -> Tensor:
        penalise(0.1 * x.square().sum(1).mean())
        eps = self.supplied("eps")
        return x if eps is None else x + 0.5 * x.abs() * eps


class Twice(nn.Module):
    """One layer used twice, a parameter of its own by views and by broadcasting, a learnable scale, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.layer.weight
        self.token = nn.Parameter(torch.ones(1, 1, 6))
        self.shift = nn.Parameter(torch.ones(6))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = torch.tanh(self.layer(torch.tanh(self.layer(x)))) * self.scale
        return self.head((self.tied(x) + self.shift[None, None] - 2 * x).square().mean(1))


class Norms(nn.Module):
    """Torch's own norms and ours, with the in-place activation that would overwrite a recorded output."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=(2, 1), padding=(0, 2), dilation=(1, 2))
        self.norms = nn.Sequential(*norms)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norms(self.conv(x)), inplace=True).mean((2, 3)))


def named_twice(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.Tanh(), module, nn.Tanh(), nn.Linear(6, 4))


class Words(nn.Module):
    """Rows of a table, chosen by the signs of what comes in; some twice, and one that padding leaves out."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 6, padding_idx=padding), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach()[..., 0] > 0).long() + (x.detach()[..., 1] > 0).long()
        return self.head((self.table(ids) * x).sum(1).tanh())


HAND_MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "used twice, tied, broadcast": (Twice, (3, 2, 5, 6)),
    "one module under two names": (lambda: named_twice(nn.Linear(6, 6)), (3, 2, 6)),
    "group norm": (lambda: Norms(nn.GroupNorm(2, 4)), (2, 2, 3, 7, 6)),
    "layer norm": (lambda: Norms(nn.LayerNorm((3, 6))), (2, 2, 3, 7, 6)),
    "own layer norm": (lambda: Norms(LayerNorm((3, 6))), (2, 2, 3, 7, 6)),
    "instance norm": (lambda: Norms(nn.InstanceNorm2d(4, affine=True)), (2, 2, 3, 7, 6)),
    "own instance norm": (lambda: Norms(InstanceNorm(4)), (2, 2, 3, 7, 6)),
    "frozen norm": (lambda: Norms(FrozenNorm(4)), (2, 2, 3, 7, 6)),
    "batch norm, evaluation": (lambda: Norms(nn.BatchNorm2d(4)).eval(), (2, 2, 3, 7, 6)),
    "large images, one convolution a target client": (lambda: Norms(nn.Conv2d(4, 4, 1)), (2, 1, 3, 60, 60)),
    "embedding": (lambda: Words(None), (3, 2, 5, 6)),
    "embedding, padded": (lambda: Words(1), (3, 2, 5, 6)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 5), Dropout(0.5), nn.Tanh(), nn.Linear(5, 4)), (3, 2, 6)),
    "penalty": (lambda: nn.Sequential(nn.Linear(6, 5), KL(), nn.Tanh(), nn.Linear(5, 4)), (3, 2, 6)),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_per_client_gradients_of_small_models_equal_the_loop(case: str) -> None:
    model, shape = HAND_MADE[case]
    assert_agrees(model(), shape)


def test_per_client_gradients_of_large_convolutions_equal_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.gradients.convolution._OWN_FLOP", 0)
    monkeypatch.setattr("gradveil.gradients.convolution._OWN_POSITIONS", 0)
    assert_agrees(small("scheliga-cnn", norm="group"), (3, 2, 3, 32, 32))


def test_per_client_gradients_with_dropout_soft_targets_and_frozen_parameters_equal_the_loop() -> None:
    model = with_dropout(small("scheliga-cnn"), 0.25)
    assert_agrees(model, (2, 2, 3, 32, 32), soft=True, frozen=frozenset({"body.block0.conv.weight", "head.bias"}))


def test_per_client_gradients_of_scalar_losses_equal_the_loop() -> None:
    assert_agrees(small("lenet-zhu"), (3, 2, 3, 32, 32), loss=nn.CrossEntropyLoss())


def test_per_client_gradients_without_grad_build_no_graph(generator: torch.Generator) -> None:
    model = small("lenet-zhu")
    params = {name: value.detach() for name, value in model.named_parameters()}
    batch = Batch(torch.randn((2, 1, 3, 32, 32), generator=generator), torch.tensor([[0], [1]]))
    with torch.no_grad():
        result = per_client_gradients(Objective(model, cross_entropy), params, {}, batch, {})
    assert not any(value.requires_grad for value in result.values())
    expected = reference_gradients(Objective(model, cross_entropy), params, {}, batch, {})
    torch.testing.assert_close(result, expected)


class Augmented(nn.Module):
    """The residual connection as it is usually written: `+=` on what a layer returned, and on what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += x
        y += self.second(torch.tanh(y))
        y *= 0.5
        return self.head(torch.tanh(y))


def test_per_client_gradients_with_augmented_assignments_equal_the_loop(generator: torch.Generator) -> None:
    model = Augmented()
    assert_agrees(model, (3, 2, 6))
    client = Client(model)
    inputs = torch.randn((4, 2, 6), generator=generator, dtype=torch.float64)
    batch = Batch(inputs, torch.randint(4, (4, 2), generator=generator))
    result, _ = client.updates(client.params(), batch, {}, {})
    expected, _ = looped_updates(client, client.params(), batch, {}, {})
    assert client.pipeline.obstacle(client.params(), batch, {}) is None
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
