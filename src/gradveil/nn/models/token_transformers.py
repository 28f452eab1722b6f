"""Small text models with random weights, in plain torch: an encoder that classifies, and a causal decoder."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.initial_weights import draw_normal
from gradveil.nn.normalisation import LayerNorm
from gradveil.nn.token_layout import TokenLayout, TokenModel, next_token_loss


class WordEmbedding(nn.Embedding):
    """An embedding that starts from N(0, std^2)."""

    def __init__(self, count: int, width: int, std: float) -> None:
        """Hold `count` vectors."""
        super().__init__(count, width)
        self.std = std

    def initialise(self, generator: Generator) -> None:
        """Draw the vectors."""
        draw_normal(self.weight, self.std, generator)


class MaskedAttention(nn.Module):
    """Multi-head attention with an additive mask, as plain products: it can be differentiated twice."""

    def __init__(self, width: int, heads: int) -> None:
        """Split the width over the heads."""
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Let every token look where the mask is 0."""
        batch, length, width = x.shape
        query, key, value = (
            part(x).reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5 + mask).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class TokenBlock(nn.Module):
    """A pre-norm transformer layer: attention, then a multilayer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        """Make a perceptron four times as wide."""
        super().__init__()
        self.before_attention, self.before_mlp = LayerNorm(width), LayerNorm(width)
        self.attention = MaskedAttention(width, heads)
        self.up, self.activation, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add the attention's and the perceptron's outputs."""
        x = x + self.attention(self.before_attention(x), mask)
        return x + self.down(self.activation(self.up(self.before_mlp(x))))


class TextTransformer(TokenModel):
    """Words plus positions, pre-norm layers, a last norm; mean pooling and a linear head, or next-token logits."""

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        padding: int,
        causal: bool,
        std: float,
    ) -> None:
        """Build the layers; `length` is the number of positions."""
        super().__init__()
        if width % heads:
            raise fail("model.heads", f"{heads} heads do not divide the width {width}", "choose a divisor of the width")
        self.words, self.positions = WordEmbedding(vocabulary, width, std), WordEmbedding(length, width, std)
        self.blocks = nn.ModuleList(TokenBlock(width, heads) for _ in range(depth))
        self.norm = LayerNorm(width)
        self.head = nn.Linear(width, vocabulary if causal else classes)
        self.input_shape = (length,)
        self.layout = TokenLayout(
            family="small-decoder" if causal else "small-encoder",
            words="words",
            positions="positions",
            norm="blocks.0.before_attention",
            attention=tuple(f"blocks.{{}}.attention.{part}" for part in ("query", "key", "value")),
            layers=depth,
            causal=causal,
            padding=padding,
            head="head",
            predicts_words=causal,
            heads=heads,
            out="blocks.{}.attention.out",
            middle=tuple(f"blocks.{{}}.{part}" for part in ("before_mlp", "up", "activation")),
            down="blocks.{}.down",
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K], or the mean next-token losses [B]."""
        mask = self.keep_mask(ids)
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        if self.layout.predicts_words:
            return next_token_loss(self.head(x), ids, self.layout.padding)
        kept = (ids != self.layout.padding).to(x.dtype).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp_min(1))


def small_encoder(
    *,
    vocabulary: int = 2048,
    length: int = 32,
    classes: int = 2,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    padding: int = 0,
    std: float = 0.02,
) -> TextTransformer:
    """Classifier of texts: a transformer encoder with mean pooling."""
    return TextTransformer(
        vocabulary=vocabulary, length=length, classes=classes, width=width, depth=depth, heads=heads,
        padding=padding, causal=False, std=std,
    )  # fmt: skip


def small_decoder(
    *,
    vocabulary: int = 2048,
    length: int = 32,
    width: int = 128,
    depth: int = 3,
    heads: int = 4,
    padding: int = 0,
    std: float = 0.02,
) -> TextTransformer:
    """Causal language model with GPT-2's layout, input and output embeddings not tied."""
    return TextTransformer(
        vocabulary=vocabulary, length=length, classes=2, width=width, depth=depth, heads=heads,
        padding=padding, causal=True, std=std,
    )  # fmt: skip
