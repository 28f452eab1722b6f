"""Building blocks of the models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.normalisation import norm_layer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "leaky-relu-0.2": lambda: nn.LeakyReLU(0.2),
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
"""Activations by the names that `activation` takes."""


def activation_layer(name: str) -> nn.Module:
    """Make an activation by name."""
    if name not in ACTIVATIONS:
        raise fail("activation", f"unknown name '{name}'", f"choose one of: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class Network(nn.Module):
    """A classifier: `head(body(x))`, where `body` returns one feature vector per example and `head` is linear.

    `input_shape` is that of one example (C, H, W). Dropout is inserted after the module paths `dropout_positions`, the
    convolutional bottleneck after `cvb_position` with the study's `cvb_kernel` and `cvb_beta`. With a `weight_range` r
    initial weights are U(-r, r) instead of PyTorch's law.
    """

    def __init__(
        self,
        body: nn.Sequential,
        head: nn.Linear,
        *,
        input_shape: tuple[int, ...],
        dropout_positions: tuple[str, ...],
        cvb_position: str,
        cvb_kernel: int = 5,
        cvb_beta: float = 0.1,
        weight_range: float | None = None,
    ) -> None:
        """Join body and head."""
        super().__init__()
        self.body = body
        self.head = head
        self.input_shape = input_shape
        self.dropout_positions = dropout_positions
        self.cvb_position = cvb_position
        self.cvb_kernel = cvb_kernel
        self.cvb_beta = cvb_beta
        self.weight_range = weight_range

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.body(x))


class GlobalMean(nn.Module):
    """Average over all positions: [B, C, H, W] -> [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean((2, 3))


class Flatten(nn.Module):
    """Flatten each example: [B, ...] -> [B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        """Flatten."""
        return x.reshape(x.shape[0], -1)


def conv_block(
    channels: tuple[int, int],
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
    norm: str = "none",
    groups: int = 2,
    activation: str = "relu",
) -> nn.Sequential:
    """Convolution, normalisation (optional), activation."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv"] = nn.Conv2d(*channels, kernel, stride=stride, padding=padding, bias=bias)
    layer = norm_layer(norm, channels[1], groups)
    if layer is not None:
        parts["norm"] = layer
    parts["activation"] = activation_layer(activation)
    return nn.Sequential(parts)


def sequence(**modules: nn.Module) -> nn.Sequential:
    """Run named modules one after the other."""
    return nn.Sequential(OrderedDict(modules))


def side_after(model: str, size: int, *layers: tuple[int, int, int]) -> int:
    """Return the side of a square image after (kernel, stride, padding) layers; raise for images that are too small."""

    def after(side: int) -> int:
        for kernel, stride, padding in layers:
            side = max(0, (side + 2 * padding - kernel) // stride + 1)
        return side

    side = after(size)
    if side < 1:
        smallest = next(n for n in range(size + 1, 4096) if after(n) >= 1)
        raise fail(
            "size", f"{model} cannot take {size}x{size} images", f"resize them to at least {smallest}x{smallest}"
        )
    return side
