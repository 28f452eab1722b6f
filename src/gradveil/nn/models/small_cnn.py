"""Small convolutional networks of the studies, sigmoid LeNets included."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from gradveil.core.errors import fail
from gradveil.nn.models.parts import Flatten, Network, activation_layer, conv_block, sequence, side_after


def lenet_zhu(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "none",
    groups: int = 2,
    activation: str = "sigmoid",
    weights: str = "wide",
) -> Network:
    """Three 5x5 convolutions of 12 channels, padding 2, strides 2, 2, 1; one linear layer.

    Initial `weights`: "wide" is U(-0.5, 0.5), as in the study; "default" is PyTorch's law.
    """
    if weights not in ("wide", "default"):
        raise fail("weights", f"unknown name '{weights}'", "choose one of: wide, default")
    side = side_after("lenet-zhu", size, (5, 2, 2), (5, 2, 2), (5, 1, 2))
    blocks = [
        conv_block((wide, 12), 5, stride=stride, padding=2, norm=norm, groups=groups, activation=activation)
        for wide, stride in ((channels, 2), (12, 2), (12, 1))
    ]
    shape = (channels, size, size)
    return _sigmoid_network(blocks, 12 * side * side, shape, classes, 0.5 if weights == "wide" else None)


def mnist_cnn_glaus(
    *,
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    norm: str = "none",
    groups: int = 2,
    activation: str = "sigmoid",
) -> Network:
    """Three valid 5x5 convolutions of 10, 20 and 10 channels; one linear layer."""
    side = side_after("mnist-cnn-glaus", size, (5, 1, 0), (5, 1, 0), (5, 1, 0))
    widths = (channels, 10, 20, 10)
    blocks = [conv_block(pair, 5, norm=norm, groups=groups, activation=activation) for pair in pairwise(widths)]
    return _sigmoid_network(blocks, 10 * side * side, (channels, size, size), classes)


def _sigmoid_network(
    blocks: list[nn.Sequential],
    features: int,
    shape: tuple[int, int, int],
    classes: int,
    weight_range: float | None = 0.5,
) -> Network:
    named = {f"block{i}": block for i, block in enumerate(blocks)}
    return Network(
        sequence(**named, flatten=Flatten()),
        nn.Linear(features, classes),
        input_shape=shape,
        dropout_positions=tuple(f"body.{name}" for name in named),
        cvb_position="body.block0",
        weight_range=weight_range,
    )


def scheliga_cnn(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "none",
    groups: int = 2,
    activation: str = "relu",
) -> Network:
    """Three valid 5x5 convolutions of stride 2 with 16, 32 and 64 channels; one linear layer (64 inputs at 32x32)."""
    side = side_after("scheliga-cnn", size, (5, 2, 0), (5, 2, 0), (5, 2, 0))
    widths = (channels, 16, 32, 64)
    blocks = {
        f"block{i}": conv_block(pair, 5, stride=2, norm=norm, groups=groups, activation=activation)
        for i, pair in enumerate(pairwise(widths))
    }
    return Network(
        sequence(**blocks, flatten=Flatten()),
        nn.Linear(64 * side * side, classes),
        input_shape=(channels, size, size),
        dropout_positions=tuple(f"body.{name}" for name in blocks),
        cvb_position="body.block0",
    )


def cnn6(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 1,
    norm: str = "none",
    groups: int = 2,
    activation: str = "leaky-relu-0.2",
) -> Network:
    """Six bias-free convolutions, invertible activations, one bias-free linear layer (one logit in the study)."""
    layers = [(12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)]
    side = side_after("cnn6", size, *[(kernel, stride, padding) for _, kernel, stride, padding in layers])
    blocks: dict[str, nn.Module] = {}
    wide = channels
    for i, (width, kernel, stride, padding) in enumerate(layers):
        blocks[f"block{i}"] = conv_block(
            *((wide, width), kernel),
            stride=stride,
            padding=padding,
            bias=False,
            norm=norm,
            groups=groups,
            activation=activation,
        )
        wide = width
    return Network(
        sequence(**blocks, flatten=Flatten()),
        nn.Linear(128 * side * side, classes, bias=False),
        input_shape=(channels, size, size),
        dropout_positions=tuple(f"body.{name}" for name in blocks),
        cvb_position="body.block0",
    )


def convnet(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "batch",
    groups: int = 2,
    activation: str = "relu",
    width: int = 64,
) -> Network:
    """Eight 3x3 convolutions (64, 128, 128, 256, 256, 256, pool, 256, 256, pool), pooling by 3; one linear layer."""
    side = side_after("convnet", size, (3, 3, 0), (3, 3, 0))
    blocks: dict[str, nn.Module] = {}
    wide = channels
    for i, multiple in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
        blocks[f"block{i}"] = conv_block(
            (wide, width * multiple), 3, padding=1, norm=norm, groups=groups, activation=activation
        )
        wide = width * multiple
        if i in (5, 7):
            blocks[f"pool{i}"] = nn.MaxPool2d(3)
    return Network(
        sequence(**blocks, flatten=Flatten()),
        nn.Linear(wide * side * side, classes),
        input_shape=(channels, size, size),
        dropout_positions=tuple(f"body.{name}" for name in blocks if name.startswith("block")),
        cvb_position="body.block0",
    )


def mnist_conv(
    *,
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    norm: str = "none",
    groups: int = 2,
    activation: str = "leaky-relu",
) -> Network:
    """Two padded 3x3 convolutions of 32 and 64 channels, each pooled by 2; linear layers to 32 and to the classes."""
    side = side_after("mnist-conv", size, (2, 2, 0), (2, 2, 0))
    body = sequence(
        block0=conv_block((channels, 32), 3, padding=1, norm=norm, groups=groups, activation=activation),
        pool0=nn.MaxPool2d(2),
        block1=conv_block((32, 64), 3, padding=1, norm=norm, groups=groups, activation=activation),
        pool1=nn.MaxPool2d(2),
        flatten=Flatten(),
        block2=sequence(linear=nn.Linear(64 * side * side, 32), activation=activation_layer(activation)),
    )
    return Network(
        body,
        nn.Linear(32, classes),
        input_shape=(channels, size, size),
        dropout_positions=("body.block0", "body.block1", "body.block2"),
        cvb_position="body.block0",
    )
