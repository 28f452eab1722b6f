"""Residual networks (He, Zhang, Ren, Sun: Deep Residual Learning, CVPR 2016) for ImageNet and for CIFAR."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import fail
from gradveil.nn.models.parts import GlobalMean, Network, activation_layer, conv_block, sequence, side_after
from gradveil.nn.normalisation import norm_layer

STEMS = ("cifar", "imagenet", "no-pool")
"""First layers of a ResNet: a 3x3 convolution, or 7x7 with stride 2, and then max-pooling or none."""


class PadShortcut(nn.Module):
    """Option A of the paper: every `stride`-th position, new channels zero. No parameters."""

    def __init__(self, wide: int, width: int, stride: int) -> None:
        """Go from `wide` to `width` channels."""
        super().__init__()
        self.new = width - wide
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and pad."""
        # Pairs of `pad` go from the last dimension to the first: the third is that of the channels.
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))


class BasicBlock(nn.Module):
    """y = activation(residual(x) + shortcut(x)) with two 3x3 convolutions in the residual."""

    def __init__(
        self, wide: int, width: int, stride: int, *, shortcut: str, norm: str, groups: int, activation: str
    ) -> None:
        """Go from `wide` to `width` channels; `shortcut` "pad" or "project" where the shapes differ."""
        super().__init__()
        bias = norm == "none"
        first = conv_block(
            *((wide, width), 3),
            stride=stride,
            padding=1,
            bias=bias,
            norm=norm,
            groups=groups,
            activation=activation,
        )
        self.residual = sequence(first=first, second=_linear_block(width, width, 3, 1, norm, groups))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide != width:
            if shortcut == "pad":
                self.shortcut = PadShortcut(wide, width, stride)
            else:
                self.shortcut = _linear_block(wide, width, 1, stride, norm, groups)
        self.activation = activation_layer(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual."""
        return self.activation(self.residual(x) + self.shortcut(x))


def resnet18(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "group",
    groups: int = 2,
    activation: str = "relu",
    stem: str = "imagenet",
    width: int = 64,
) -> Network:
    """ResNet-18; `stem` "imagenet" is a 7x7 convolution of stride 2 and a max-pool, "cifar" one 3x3 convolution.

    With "no-pool" the first convolution is that of "imagenet", without the max-pool.
    """
    return _wide_resnet((2, 2, 2, 2), (channels, size, size), classes, stem, width, norm, groups, activation)


def resnet34(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "group",
    groups: int = 2,
    activation: str = "relu",
    stem: str = "imagenet",
    width: int = 64,
) -> Network:
    """ResNet-34; stems as in ResNet-18."""
    return _wide_resnet((3, 4, 6, 3), (channels, size, size), classes, stem, width, norm, groups, activation)


def resnet20(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 16,
) -> Network:
    """ResNet-20 for CIFAR: base width 16 (64 in the wide variant), option-A shortcuts."""
    return _cifar_resnet(3, (channels, size, size), classes, width, norm, groups, activation)


def resnet32(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 16,
) -> Network:
    """ResNet-32 for CIFAR: base width 16 (64 in the wide variant), option-A shortcuts."""
    return _cifar_resnet(5, (channels, size, size), classes, width, norm, groups, activation)


def _wide_resnet(
    depths: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    stem: str,
    width: int,
    norm: str,
    groups: int,
    activation: str,
) -> Network:
    if stem not in STEMS:
        raise fail("stem", f"unknown name '{stem}'", f"choose one of: {', '.join(STEMS)}")
    block = partial(conv_block, bias=norm == "none", norm=norm, groups=groups, activation=activation)
    if stem != "cifar":
        pooled = stem == "imagenet"
        side_after("this stem", shape[1], (7, 2, 3), *([(3, 2, 1)] if pooled else []))
        first = block((shape[0], width), 7, stride=2, padding=3)
        if pooled:
            first.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    else:
        first = block((shape[0], width), 3, padding=1)
    widths = (width, 2 * width, 4 * width, 8 * width)
    return _resnet(first, widths, depths, "project", shape, classes, norm, groups, activation)


def _cifar_resnet(
    depth: int, shape: tuple[int, int, int], classes: int, width: int, norm: str, groups: int, activation: str
) -> Network:
    first = conv_block(
        *((shape[0], width), 3), padding=1, bias=norm == "none", norm=norm, groups=groups, activation=activation
    )
    widths = (width, 2 * width, 4 * width)
    return _resnet(first, widths, (depth,) * 3, "pad", shape, classes, norm, groups, activation)


def _resnet(
    stem: nn.Sequential,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    shortcut: str,
    shape: tuple[int, int, int],
    classes: int,
    norm: str,
    groups: int,
    activation: str,
) -> Network:
    parts: dict[str, nn.Module] = {"stem": stem}
    wide = widths[0]
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(depth):
            stride = 2 if i > 1 and j == 0 else 1
            blocks[f"block{j}"] = BasicBlock(
                wide, width, stride, shortcut=shortcut, norm=norm, groups=groups, activation=activation
            )
            wide = width
        parts[f"layer{i}"] = nn.Sequential(blocks)
    return Network(
        sequence(**parts, mean=GlobalMean()),
        nn.Linear(wide, classes),
        input_shape=shape,
        dropout_positions=tuple(f"body.{name}" for name in parts if name != "stem"),
        cvb_position="body.layer1",
        cvb_beta=5e-5,
    )


def _linear_block(wide: int, width: int, kernel: int, stride: int, norm: str, groups: int) -> nn.Sequential:
    """Convolution and normalisation, no activation."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv"] = nn.Conv2d(wide, width, kernel, stride=stride, padding=kernel // 2, bias=norm == "none")
    layer = norm_layer(norm, width, groups)
    if layer is not None:
        parts["norm"] = layer
    return nn.Sequential(parts)
