"""Models of table rows: fully connected layers, and a residual network with embeddings of categories."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from gradveil.nn.models.parts import Network, activation_layer, sequence
from gradveil.nn.normalisation import LayerNorm


class ColumnEmbedding(nn.Module):
    """Numbers as they are, each category as a learned vector: its one-hot vector times a matrix."""

    def __init__(self, columns: tuple[int, ...], width: int) -> None:
        """Make a matrix for each category."""
        super().__init__()
        self.widths = [levels or 1 for levels in columns]
        self.categories = [place for place, levels in enumerate(columns) if levels]
        self.tables = nn.ModuleList(nn.Linear(columns[place], width, bias=False) for place in self.categories)
        self.features = len(columns) - len(self.categories) + width * len(self.categories)

    def forward(self, x: Tensor) -> Tensor:
        """Embed rows [B, inputs]."""
        parts = list(x.split(self.widths, -1))
        for place, table in zip(self.categories, self.tables, strict=True):
            parts[place] = table(parts[place])
        return torch.cat(parts, -1)


def tabular_mlp(
    *,
    columns: tuple[int, ...] = (0, 2),
    classes: int = 2,
    activation: str = "relu",
    width: int = 100,
    depth: int = 2,
    embedding: int = 0,
) -> Network:
    """Fully connected layers of the same width, and a linear classifier.

    They take numbers and one-hot categories; with an `embedding`, categories as learned vectors of that length.
    """
    inputs = sum(levels or 1 for levels in columns)
    embed = ColumnEmbedding(columns, embedding) if embedding else None
    widths = (embed.features if embed else inputs, *(width for _ in range(depth)))
    layers = {
        f"layer{i}": sequence(linear=nn.Linear(*pair), act=activation_layer(activation))
        for i, pair in enumerate(pairwise(widths))
    }
    return Network(
        sequence(**({"embed": embed} if embed else {}), **layers),
        nn.Linear(widths[-1], classes),
        input_shape=(inputs,),
        dropout_positions=tuple(f"body.{name}" for name in layers),
        cvb_position="body.layer0",
    )


class ResidualRow(nn.Module):
    """x + linear(relu(linear(norm(x))))."""

    def __init__(self, width: int, activation: str) -> None:
        """Make the block."""
        super().__init__()
        self.inner = sequence(
            norm=LayerNorm(width),
            first=nn.Linear(width, 2 * width),
            act=activation_layer(activation),
            second=nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to its input."""
        return x + self.inner(x)


def tabular_resnet(
    *,
    columns: tuple[int, ...] = (0, 2),
    classes: int = 2,
    activation: str = "relu",
    width: int = 64,
    depth: int = 2,
    embedding: int = 8,
) -> Network:
    """Embeddings of categories, residual blocks with LayerNorm, and a linear classifier."""
    embed = ColumnEmbedding(columns, embedding)
    blocks = {f"block{i}": ResidualRow(width, activation) for i in range(depth)}
    return Network(
        sequence(
            embed=embed,
            enter=nn.Linear(embed.features, width),
            **blocks,
            norm=LayerNorm(width),
            act=activation_layer(activation),
        ),
        nn.Linear(width, classes),
        input_shape=(sum(levels or 1 for levels in columns),),
        dropout_positions=tuple(f"body.{name}" for name in blocks),
        cvb_position="body.enter",
    )
