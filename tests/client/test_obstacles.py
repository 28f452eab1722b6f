"""What stands in the way of the batched sweep is found and named, and what only looks like it is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.client import Client, cross_entropy, looped_updates
from gradveil.core.types import Batch
from gradveil.gradients import per_client
from gradveil.gradients.objective import Objective
from gradveil.gradients.per_client import obstacle, per_client_gradients
from gradveil.gradients.recorder import Unsupported
from gradveil.nn.normalisation import BatchStatistics
from gradveil.nn.stochastic_layers import Dropout


class Clamped(nn.Module):
    """Overwrites what a layer returned (or took), by a function that changes nothing for small values."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.where == "the output":
            y.clamp_(-2, 2)
        if self.where == "a view of it":
            y.view(-1).clamp_(-2, 2)
        if self.where == "by an argument":
            F.hardtanh(y, -2, 2, inplace=True)
        if self.where == "by an argument, between layers":
            y = y * 1
            F.hardtanh(y, -2, 2, inplace=True)
        if self.where == "read again":
            old = y
            y += 1
            y = y + 0 * old
        return self.head(self.second(torch.tanh(y)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "where", ["the output", "a view of it", "by an argument", "by an argument, between layers", "read again"]
)
def test_in_place_change_of_a_recorded_tensor_is_never_silent(where: str, generator: torch.Generator) -> None:
    model = Clamped(where).double()
    client = Client(model)
    inputs = torch.randn((3, 2, 6), generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (3, 2), generator=generator)
    for size in (0.01, 100.0):  # the first call is the one that is compared
        batch = Batch((size * inputs).requires_grad_(), targets)
        result, _ = client.updates(client.params(), batch, {}, {})
        expected, _ = looped_updates(client, client.params(), batch, {}, {})
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12 * size)
    assert client.pipeline.obstacle(client.params(), batch, {}) is not None


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0).double()), nn.CrossEntropyLoss(ignore_index=0)],
    ids=["weighted", "ignored class"],
)
def test_obstacle_of_a_loss_across_target_clients_is_found(loss: nn.Module, generator: torch.Generator) -> None:
    client = Client(nn.Linear(6, 4).double(), loss)
    inputs = torch.randn((4, 2, 6), generator=generator, dtype=torch.float64)
    for targets in (torch.ones(4, 2, dtype=torch.long), torch.tensor([[1, 1], [0, 2], [3, 3], [1, 2]])):
        result, _ = client.updates(client.params(), Batch(inputs, targets), {}, {})
        expected, _ = looped_updates(client, client.params(), Batch(inputs, targets), {}, {})
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert "mixes" in (client.pipeline.obstacle(client.params(), Batch(inputs, targets), {}) or "")


@pytest.mark.parametrize("first", [float("nan"), 3e38, 0.0])
def test_obstacle_depends_on_neither_weights_nor_examples(first: float) -> None:
    """Where nothing is finite, or all is zero, a mean weighted by class looks as if it came apart by target client."""
    client = Client(nn.Linear(6, 4), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1e3, 1.0, 1.0])))
    batch = Batch(torch.full((4, 2, 6), first), torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0]]))
    params = {name: torch.full_like(value, first) for name, value in client.params().items()}
    assert client.pipeline.obstacle(params, batch, {}) is not None
    plain = Client(nn.Linear(6, 4))
    poisoned = {name: torch.full_like(value, first) for name, value in plain.params().items()}
    assert plain.pipeline.obstacle(poisoned, batch, {}) is None


def test_obstacle_of_nonfinite_gradients_is_found() -> None:
    client = Client(nn.Linear(6, 4), lambda outputs, targets: (outputs - outputs).sum() / 0)
    batch = Batch(torch.rand(3, 2, 6), torch.zeros(3, 2, dtype=torch.long))
    assert "not finite" in (client.pipeline.obstacle(client.params(), batch, {}) or "")


class Mixed(nn.Module):
    """Looks at the other examples of the batch: no target client's gradient comes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def _sum_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum()


REFUSED: dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], str]] = {
    "examples mix": (Mixed(), cross_entropy, "mixes examples"),
    "batch statistics": (nn.Sequential(nn.Linear(6, 4), BatchStatistics(4)), cross_entropy, "mixes examples"),
    "summed loss": (nn.Linear(6, 4), _sum_of_squares, "mixes examples"),
    "weights in a matrix product": (
        nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 6), nn.Flatten()),
        cross_entropy,
        "goes into conv1d, which has no rule",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_updates_with_an_obstacle_fall_back_to_the_loop(case: str, generator: torch.Generator) -> None:
    model, loss, reason = REFUSED[case]
    model = model.double()
    client = Client(model, loss)
    params = client.params()
    batch = Batch(
        torch.randn((3, 2, 6), generator=generator, dtype=torch.float64), torch.randint(4, (3, 2), generator=generator)
    )
    assert reason in (client.pipeline.obstacle(params, batch, {}) or "")
    result, _ = client.updates(params, batch, {}, {})
    expected, _ = looped_updates(client, params, batch, {}, {})
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_parameters_with_grad_are_an_obstacle(generator: torch.Generator) -> None:
    client = Client(nn.Linear(6, 4))
    params = {name: value.requires_grad_() for name, value in client.params().items()}
    batch = Batch(torch.randn((3, 2, 6), generator=generator), torch.randint(4, (3, 2), generator=generator))
    sent, _ = client.updates(params, batch, {}, {})
    assert "differentiated" in (client.pipeline.obstacle(params, batch, {}) or "")
    assert sent["weight"].requires_grad


def test_per_client_gradients_with_hidden_randomness_raise(generator: torch.Generator) -> None:
    batch = Batch(torch.randn((3, 2, 6), generator=generator), torch.randint(4, (3, 2), generator=generator))
    hidden = Client(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)))
    with pytest.raises(RuntimeError, match="randomness"):
        hidden.updates(hidden.params(), batch, {}, {})
    # In evaluation mode nothing is drawn; going back to training mode must be noticed.
    hidden.model.eval()
    assert hidden.pipeline.obstacle(hidden.params(), batch, {}) is None
    hidden.model.train()
    with pytest.raises(RuntimeError, match="randomness"):
        hidden.updates(hidden.params(), batch, {}, {})
    missing = Client(nn.Sequential(nn.Linear(6, 4), Dropout(0.5)))
    with pytest.raises(RuntimeError, match=r"1\.mask"):
        missing.updates(missing.params(), batch, {}, {})


def test_unsupported_use_names_the_parameter(generator: torch.Generator) -> None:
    model = nn.Bilinear(6, 6, 4)
    with pytest.raises(Unsupported, match=r"'inner\.weight' goes into bilinear"):
        per_client_gradients(
            Objective(_Both(model), cross_entropy),
            {"inner.weight": model.weight, "inner.bias": model.bias},
            {},
            Batch(torch.randn((2, 1, 6), generator=generator), torch.zeros((2, 1), dtype=torch.long)),
            {},
        )


class _Both(nn.Module):
    def __init__(self, inner: nn.Bilinear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Single(nn.Module):
    """A layer that computes in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(4, 12))


def test_obstacle_is_mixing_but_not_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which side of a kink a float32 value falls, rounding may decide: float64 has the last word."""
    monkeypatch.setitem(per_client._RELATIVE_ERROR, torch.float32, -1.0)
    g = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(3, 2, 3, 2, 2, generator=g), torch.randint(4, (3, 2), generator=g))
    head = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Flatten())
    for layers, fine in (
        ((nn.Linear(12, 4),), True),
        ((nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, 4)), False),
        ((Single(),), False),
    ):
        model = nn.Sequential(head, *layers)
        params = {name: value.detach() for name, value in model.named_parameters()}
        arguments = Objective(model, cross_entropy), params, {}, batch, {}
        assert per_client._difference(*arguments) is not None, "float32 alone would object"
        assert (obstacle(*arguments) is None) == fine
