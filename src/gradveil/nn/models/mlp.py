"""The multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from gradveil.nn.models.parts import Flatten, Network, activation_layer, sequence


def mlp(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    activation: str = "relu",
    width: int = 512,
    depth: int = 2,
) -> Network:
    """Fully connected layers of the same width on all pixels, `depth` of them, and a linear classifier."""
    widths = (channels * size * size, *(width for _ in range(depth)))
    layers = {
        f"layer{i}": sequence(linear=nn.Linear(*pair), act=activation_layer(activation))
        for i, pair in enumerate(pairwise(widths))
    }
    return Network(
        sequence(flatten=Flatten(), **layers),
        nn.Linear(widths[-1], classes),
        input_shape=(channels, size, size),
        dropout_positions=tuple(f"body.{name}" for name in layers),
        cvb_position="body.layer0",
    )
