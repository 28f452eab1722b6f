"""Random numbers from a source: a torch generator in simulations, a cryptographic stream in deployments.

Laws draw through these functions and through nothing else. From a torch generator each of them draws what torch's own
call of that name draws, to the bit. From a stream each is made of whole 64-bit words.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
"""Uniform 64-bit words."""


class WordSource(Protocol):
    """A source of uniform words that nobody can predict."""

    def words(self, count: int) -> Words:
        """Return the next words."""
        ...


Source = torch.Generator | WordSource
"""Where random numbers come from."""

_BLOCK = 1 << 16


def words(count: int, source: Source) -> Words:
    """Draw uniform 64-bit words."""
    if not isinstance(source, torch.Generator):
        return source.words(count)
    halves = torch.randint(2**32, (count, 2), generator=source).numpy().astype(np.uint64)
    return (halves[:, 0] << np.uint64(32)) | halves[:, 1]


def uniform(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
    """Draw from U[0, 1): multiples of the distance of two numbers below 1 in this dtype."""
    if isinstance(source, torch.Generator):
        return torch.rand(shape, dtype=dtype, generator=source)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    drawn = source.words(math.prod(shape)) >> np.uint64(64 - digits)
    return tensor(drawn.astype(np.float64) * 2.0**-digits, shape).to(dtype)


def chance(shape: tuple[int, ...], probability: float, source: Source) -> Tensor:
    """Draw True with a probability: a multiple of 2^-24 from a generator, of 2^-53 from a stream."""
    if isinstance(source, torch.Generator):
        return torch.rand(shape, generator=source) < probability
    return uniform(shape, torch.float64, source) < probability


def normal(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
    """Draw from N(0, 1).

    torch fills a tensor with uniform numbers and then transforms 16 after the other in place, the last 16 of a size
    that 16 does not divide from other numbers. So blocks agree whose sizes 16 divides, but for the last; a block
    stays in the cache, which is 1.5 times as fast.
    """
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    blocks = max(1, flat.numel() // _BLOCK)
    for i in range(blocks):
        block = flat[i * _BLOCK : (i + 1) * _BLOCK if i + 1 < blocks else flat.numel()]
        if isinstance(source, torch.Generator):
            block.normal_(generator=source)
        else:
            signs, u = halves(source.words(block.numel()))
            block.copy_(tensor(quantiles(u) * signs, block.shape))
    return out


def halves(drawn: Words) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Part words into signs, -1 or 1, and the middles of intervals of length 2^-64 in (0, 1/2): 1 and 63 bits."""
    signs = (drawn & np.uint64(1)).astype(np.float64) * 2 - 1
    return signs, ((drawn >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64


def quantiles(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute Phi^-1."""
    special: Any = torch.special
    return cast("NDArray[np.float64]", special.ndtri(tensor(u, u.shape)).numpy())


def integers(high: int, shape: tuple[int, ...], source: Source) -> Tensor:
    """Draw integers from 0 to high - 1, each as likely."""
    if isinstance(source, torch.Generator):
        return torch.randint(high, shape, generator=source)
    drawn = source.words(math.prod(shape))
    beyond = 2**64 % high  # so many words at the end would favour small remainders
    while beyond and (again := drawn >= np.uint64(2**64 - beyond)).any():
        drawn[again] = source.words(int(again.sum()))
    return tensor((drawn % np.uint64(high)).astype(np.int64), shape)


def permutation(count: int, source: Source) -> Tensor:
    """Draw an order of `count` things, each as likely."""
    if isinstance(source, torch.Generator):
        return torch.randperm(count, generator=source)
    drawn = source.words(count)
    while len(np.unique(drawn)) < count:  # equal words have an order of their own
        drawn = source.words(count)
    return tensor(np.argsort(drawn), (count,))


def tensor(values: NDArray[Any], shape: tuple[int, ...]) -> Tensor:
    """View an array as a tensor of a shape."""
    return torch.from_numpy(values).reshape(shape)  # pyright: ignore[reportUnknownMemberType]
