"""The small vision transformer of the stochastic-defence studies."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.initial_weights import draw_normal
from gradveil.nn.models.parts import Network, activation_layer, sequence
from gradveil.nn.normalisation import LayerNorm


class Tokens(nn.Module):
    """[B, C, H, W] -> [B, 1 + patches, width]: patches behind a class token, plus position embedding."""

    def __init__(self, channels: int, size: int, patch: int, width: int, position_std: float) -> None:
        """Cut square images of side `size` into patches of side `patch`."""
        super().__init__()
        self.patch = patch
        self.position_std = position_std
        self.embed = nn.Linear(channels * patch * patch, width, bias=False)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))

    def initialise(self, generator: Generator) -> None:
        """Draw the class token and the position embedding from N(0, position_std^2)."""
        draw_normal(self.token, self.position_std, generator)
        draw_normal(self.position, self.position_std, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        batch, channels, height, width = x.shape
        p = self.patch
        # [B, C, rows, p, columns, p] -> [B, rows, columns, C, p, p]: one patch's values stand together.
        cut = x.reshape(batch, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        patches = self.embed(cut.reshape(batch, (height // p) * (width // p), channels * p * p))
        return torch.cat([self.token.expand(batch, -1, -1), patches], dim=1) + self.position


class Attention(nn.Module):
    """Multi-head self-attention, softmax(Q K^T / sqrt(d)) V, with plain products: it can be differentiated twice."""

    def __init__(self, width: int, heads: int) -> None:
        """Split the width over the heads."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every token look at every token."""
        batch, tokens, width = x.shape
        # [B, T, 3, heads, d] -> [3, B, heads, T, d].
        split = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]
        weights = (query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


class Residual(nn.Module):
    """x + inner(norm(x)): the pre-norm residual."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        """Wrap the inner module."""
        super().__init__()
        self.norm = LayerNorm(width)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add the inner module's output."""
        return x + self.inner(self.norm(x))


class ClassToken(nn.Module):
    """Take the class token: [B, T, W] -> [B, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """Take it."""
        return x[:, 0]


def vit(
    *,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    activation: str = "gelu",
    patch: int = 4,
    width: int = 256,
    blocks: int = 4,
    heads: int = 16,
    mlp: int = 256,
    position_std: float = 1.0,
) -> Network:
    """Vision transformer, bias-free but for its LayerNorms (explicit ones; there is no choice of norm).

    The study gives patch 4, width 256, 4 blocks, 16 heads, MLP width 256, GELU and 1,609,216 parameters. A class token,
    a position embedding for it and the 64 patches, a last LayerNorm and a bias-free head give exactly that count.
    Class token and positions start from N(0, position_std^2), the rest from PyTorch's law. The study's text gives no
    initial weights; its authors' earlier programs use a standard deviation of 1, other transformers 0.02.
    """
    if patch < 1 or size % patch:
        raise fail("patch", f"patches of {patch} do not tile {size}x{size} images", "choose a divisor of the size")
    if heads < 1 or width % heads:
        raise fail("heads", f"{heads} heads do not divide the width {width}", "choose a divisor of the width")
    named = {
        f"block{i}": sequence(
            attention=Residual(width, Attention(width, heads)),
            mlp=Residual(
                width,
                sequence(
                    up=nn.Linear(width, mlp, bias=False),
                    activation=activation_layer(activation),
                    down=nn.Linear(mlp, width, bias=False),
                ),
            ),
        )
        for i in range(blocks)
    }
    body = sequence(
        tokens=Tokens(channels, size, patch, width, position_std), **named, norm=LayerNorm(width), first=ClassToken()
    )
    return Network(
        body,
        nn.Linear(width, classes, bias=False),
        input_shape=(channels, size, size),
        dropout_positions=tuple(f"body.{name}" for name in named),
        cvb_position="body.block0",
        cvb_kernel=3,
    )
