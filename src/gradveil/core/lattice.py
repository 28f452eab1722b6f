"""Normal noise on whole numbers, exactly: n = rint(t z), z ~ N(0, 1), for privacy that floating point cannot break.

Numbers of floating point are unevenly spaced, and noise that is added in it leaves marks: which outputs are possible
depends on what the noise was added to (Mironov 2012; Haney et al. 2022). Here z = Phi^-1(u) is found in float64 from a
uniform u, and rounded. Where an error of float64, or the digits of u that were not drawn, could change the whole
number, more digits are drawn and the number is found in 100 decimal digits. So the law of n is that of the rounded
normal number up to 2^-190, whatever the error of `ndtri` is up to `TOLERANCE`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.draws import Source, Words, halves, quantiles, tensor, words
from gradveil.core.errors import fail

TOLERANCE = (2.0**-44, 2.0**-50)
"""What Phi^-1 in float64 may be wrong by, relatively and absolutely, and no digit of n be wrong.

Measured against 60 digits, for 63-bit u as they are drawn: 2^-50.6 relatively, where |z| > 2^-3, and 2^-53 absolutely
below (`benchmarks/secure_noise.py --error`)."""
_FAR = 5.0
"""Beyond it the intervals of u may be wider than the tolerance: there all numbers are found with more digits."""
LARGEST = 2.0**40
"""Above such a t the tolerance would be wider than a whole number."""
_BLOCK = 1 << 14
_MORE = 2
"""Words of further digits of u."""
_PRECISE = Context(prec=110)


@dataclass(frozen=True)
class Rounded:
    """n = rint(scale * z) for z ~ N(0, 1), independently for each entry, as whole numbers."""

    scale: float

    def __post_init__(self) -> None:
        """Refuse noise so much coarser than the grid that float64 has no digits for it."""
        if not 0 < self.scale <= LARGEST:
            what = f"has a standard deviation of {self.scale:.3g} steps of its grid, at most {LARGEST:.3g} can be drawn"
            raise fail("noise", what, "give a smaller sigma")

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU, block by block in the cache."""
        out = np.empty(math.prod(shape), np.int64)
        for start in range(0, len(out), _BLOCK):
            block = out[start : start + _BLOCK]
            drawn = words(len(block), source)
            nearest, unsure = _nearest(drawn, self.scale)
            block[:] = nearest
            for place in unsure.tolist():
                block[place] = _exact(int(drawn[place]), int(nearest[place]), self.scale, words(_MORE, source))
        return tensor(out, shape).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return half the sum of squares in units of the standard deviation, a row: -log density up to a constant."""
        return (value / self.scale).flatten(1).square().sum(1) / 2


class _Found(NamedTuple):
    nearest: NDArray[np.float64]
    unsure: NDArray[np.int64]


def _nearest(drawn: Words, scale: float) -> _Found:
    """Find the whole numbers in float64, and the places where they may be wrong."""
    signs, u = halves(drawn)
    z = quantiles(u)
    z *= signs
    y = z * scale
    nearest = np.rint(y)
    size = np.abs(z, out=z)
    relative, absolute = TOLERANCE
    margin = 0.5 - absolute * scale - (relative * scale) * size
    unsure = np.abs(np.subtract(y, nearest, out=y), out=y) >= margin
    unsure |= size > _FAR
    return _Found(nearest, np.flatnonzero(unsure))


def _exact(drawn: int, guess: int, scale: float, more: Words) -> int:
    """Find the whole number for a word of u and further digits of it: the least |n| with Phi(-(|n| + 1/2) / t) < u."""
    digits = drawn >> 1
    for word in more.tolist():
        digits = (digits << 64) | word
    with localcontext(_PRECISE):
        u = (2 * Decimal(digits) + 1) / 2 ** (65 + 64 * len(more))
        steps = Decimal(scale)

        def reaches(n: int) -> bool:
            return tail((n + Decimal("0.5")) / steps) < u

        low, high, stride = abs(guess) - 1, abs(guess), 1
        while not reaches(high):
            low, high, stride = high, high + stride, 2 * stride
        stride = 1
        while low >= 0 and reaches(low):
            low, high, stride = max(low - stride, -1), low, 2 * stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
    return -high if drawn & 1 else high


def tail(x: Decimal) -> Decimal:
    """Compute Phi(-x) for x >= 0 to the digits of the decimal context, less a few.

    Phi(x) - 1/2 = phi(x) (x + x^3 / 3 + x^5 / (3 * 5) + ...), in which no term is negative.

    >>> with localcontext(_PRECISE):
    ...     round(tail(Decimal(0)), 3), round(tail(Decimal("1.959963984540054")), 16)
    (Decimal('0.500'), Decimal('0.0250000000000000'))
    """
    square, term, total, odd = x * x, x, x, 1
    while term > total * Decimal("1e-105"):
        odd += 2
        term = term * square / odd
        total += term
    return Decimal("0.5") - total * (-square / 2).exp() / _ROOT


_ROOT = Decimal(
    "2.5066282746310005024157652848110452530069867406099383166299235763422936546078419749465958383780572661160099726652038796"
)
"""sqrt(2 pi)."""
