"""Models with a problem that `check` reports."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


def model_of(*layers: nn.Module) -> nn.Module:
    """8 inputs behind the layers, 3 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), *layers, nn.Tanh(), nn.Linear(6, 3))


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OnceDifferentiable(Function):
    """A function whose derivative has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope * x.exp()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(self.one(x.flatten(1)).tanh()).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x.flatten(2))[0][:, -1])


def hidden_dropout() -> nn.Module:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x)))

    return model_of(Inner())


def with_nan() -> nn.Module:
    model = model_of()
    model[1].weight.data[0, :3] = torch.nan
    return model


def frozen(*names: str) -> nn.Module:
    model = model_of()
    for name in names or dict(model.named_parameters()):
        model.get_parameter(name).requires_grad_(False)
    return model


def item_loss(outputs: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(outputs, targets).item()


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,), self.weight)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=True)[0]


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()
        self.held = self.inner[1].weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
