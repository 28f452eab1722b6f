"""VGG networks (Simonyan, Zisserman, ICLR 2015) with one linear layer, as the CIFAR studies use them."""

from __future__ import annotations

from torch import nn

from gradveil.nn.models.parts import GlobalMean, Network, conv_block, sequence, side_after

_MULTIPLES = (1, 2, 4, 8, 8)


def vgg11(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 64,
) -> Network:
    """VGG-11: 8 convolutions in five pooled stages, linear layer 512 -> classes."""
    return _vgg("vgg11", (1, 1, 2, 2, 2), (channels, size, size), classes, width, norm, groups, activation)


def vgg13(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 64,
) -> Network:
    """VGG-13: 10 convolutions in five pooled stages, linear layer 512 -> classes."""
    return _vgg("vgg13", (2, 2, 2, 2, 2), (channels, size, size), classes, width, norm, groups, activation)


def vgg16(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 64,
) -> Network:
    """VGG-16: 13 convolutions in five pooled stages, linear layer 512 -> classes."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), (channels, size, size), classes, width, norm, groups, activation)


def _vgg(
    name: str,
    depths: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    width: int,
    norm: str,
    groups: int,
    activation: str,
) -> Network:
    side_after(name, shape[1], *[(2, 2, 0)] * 5)
    parts: dict[str, nn.Module] = {}
    positions: list[str] = []
    wide = shape[0]
    for i, (multiple, depth) in enumerate(zip(_MULTIPLES, depths, strict=True), start=1):
        for j in range(depth):
            parts[f"block{i}_{j}"] = conv_block(
                (wide, multiple * width), 3, padding=1, norm=norm, groups=groups, activation=activation
            )
            positions.append(f"body.block{i}_{j}")
            wide = multiple * width
        parts[f"pool{i}"] = nn.MaxPool2d(2)
    return Network(
        sequence(**parts, mean=GlobalMean()),
        nn.Linear(wide, classes),
        input_shape=shape,
        dropout_positions=tuple(positions),
        cvb_position="body.block1_0",
    )
