"""The sigmoid networks of the first gradient inversion studies, with weights U(-0.5, 0.5)."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from gradveil.nn.models.parts import Flatten, Network, conv_block, sequence, side_after


def lenet_zhu(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    norm: str = "none",
    groups: int = 2,
    activation: str = "sigmoid",
) -> Network:
    """Three 5x5 convolutions of 12 channels, padding 2, strides 2, 2, 1; one linear layer."""
    side = side_after("lenet-zhu", size, (5, 2, 2), (5, 2, 2), (5, 1, 2))
    blocks = [
        conv_block((wide, 12), 5, stride=stride, padding=2, norm=norm, groups=groups, activation=activation)
        for wide, stride in ((channels, 2), (12, 2), (12, 1))
    ]
    return _sigmoid_network(blocks, 12 * side * side, (channels, size, size), classes)


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


def _sigmoid_network(blocks: list[nn.Sequential], features: int, shape: tuple[int, int, int], classes: int) -> Network:
    named = {f"block{i}": block for i, block in enumerate(blocks)}
    return Network(
        sequence(**named, flatten=Flatten()),
        nn.Linear(features, classes),
        input_shape=shape,
        dropout_positions=tuple(f"body.{name}" for name in named),
        cvb_position="body.block0",
        weight_range=0.5,
    )
