"""Made-up examples, labels and weights for trials of a model that depend neither on data nor on a server.

What a trial finds is kept, and later rounds rely on it. A server whose weights overflow, or a blank first image, would
hide what there is to find, and what is found would tell of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.nn.weight_files import is_statistic


def numbers(like: Tensor, *address: str | int) -> Tensor:
    """Draw numbers of [0, 1) in a tensor's shape; of whole numbers 0 or 1, which every vocabulary has."""
    generator = Key(0, (Stream.CHECK, *address)).generator()
    if like.dtype.is_floating_point:
        return torch.rand(like.shape, dtype=like.dtype, generator=generator).to(like.device)
    return torch.randint(2, like.shape, generator=generator).to(like)


def pair(like: Tensor, *address: str | int) -> tuple[Tensor, Tensor]:
    """Draw two tensors of a tensor's shape that differ in every entry."""
    one, other = (numbers(like, *address, place) for place in range(2))
    return (one / 2, (1 + other) / 2) if like.dtype.is_floating_point else (one, 1 - one)


def parameters(like: Mapping[str, Tensor]) -> Tensors:
    """Draw weights that keep the size of what goes through them, and biases and factors between 1/4 and 3/4."""

    def drawn(name: str, value: Tensor) -> Tensor:
        if value.ndim > 1:
            # Uniform in [-a, a] has variance a^2 / 3: a = sqrt(3 / inputs) gives 1 / inputs.
            return (2 * numbers(value, name) - 1) * sqrt(3 / max(1, value[0].numel()))
        return 0.25 + numbers(value, name) / 2

    return {name: drawn(name, value) if value.is_floating_point() else value for name, value in like.items()}


def statistics(like: Mapping[str, Tensor]) -> Tensors:
    """Return the running statistics among some buffers as they are before any training."""
    return {
        name: torch.ones_like(value) if name.endswith("var") else torch.zeros_like(value)
        for name, value in like.items()
        if is_statistic(name)
    }
