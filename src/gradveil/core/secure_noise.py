"""Random numbers for deployments: secret keys, a cryptographic stream, and exact rounded normal noise.

The numbers do not depend on seeds, run ids or rounds, and they are never stored: a repeated request gets the stored
answer. Each stream is ChaCha20 with its own 256-bit key, HMAC-SHA-256 of the stream's address under the secret.

Floating-point noise leaks: numbers are unevenly spaced, so the possible outputs depend on the value to which noise was
added (Mironov 2012; Haney et al. 2022). Here z = Phi^-1(u) is computed in float64 from a uniform u, and rounded. If an
error of float64 or the missing digits of u could change the rounded number n, more digits are drawn and n is computed
with 100 decimal digits. The law of n is therefore that of the rounded normal number up to 2^-190, as long as the error
of `ndtri` is at most `TOLERANCE`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.errors import GradveilError, fail
from gradveil.core.extras import needs
from gradveil.core.noise import Law, Source, Words, halves, quantiles, tensor, words

_FRESH = "make a new SecretKey() for every answer"


class SecretKey:
    """The address of a cryptographic stream below a 256-bit secret that `SecretKey()` draws from the operating system.

    Make one per answer and discard it afterwards. It has `child` and `draw` like `gradveil.core.noise.Key`, but no
    torch generator. It cannot be copied, stored, or used in another process: a fork would draw the same numbers.
    """

    __slots__ = ("_path", "_process", "_root")

    def __init__(self) -> None:
        """Draw a secret."""
        self._root = os.urandom(32)
        self._path: tuple[str | int, ...] = ()
        self._process = os.getpid()

    def child(self, *parts: str | int) -> SecretKey:
        """Return the address of a stream below this one."""
        below = object.__new__(SecretKey)
        below._root, below._path, below._process = self._root, (*self._path, *parts), self._process
        return below

    def draw(self, law: Law, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw a tensor from the stream of this address, on the CPU.

        Raises for a law that needs a torch generator, and for one that draws nothing from the stream: anyone who knows
        its source could subtract the noise. Laws marked `public` may draw nothing.
        """
        stream = self.stream()
        try:
            drawn = law.sample(shape, dtype, stream)
        except TypeError as error:
            problem = f"cannot draw from a cryptographic stream ({str(error).splitlines()[0]})"
            raise self._error(law, problem) from error
        if not stream.count and drawn.numel() and not getattr(law, "public", False):
            raise self._error(law, "draws nothing from the stream it is given, so its numbers come from elsewhere")
        return drawn

    def stream(self) -> CipherStream:
        """Open the stream of this address, from its beginning."""
        if os.getpid() != self._process:
            raise fail("secret key", "was made in another process, which may draw the same numbers", _FRESH)
        return CipherStream(hmac.digest(self._root, json.dumps(self._path).encode(), hashlib.sha256))

    def _error(self, law: Law, problem: str) -> GradveilError:
        where = ".".join(("noise", *map(str, self._path[-1:])))
        remedy = "let it draw by the functions of gradveil.core.noise (uniform, normal, integers, ...)"
        return fail(where, f"its law {type(law).__name__} {problem}", remedy)

    def __repr__(self) -> str:
        """Show the address, not the secret."""
        return f"SecretKey(path={self._path})"

    def __reduce__(self) -> NoReturn:
        """Raise: a key cannot be copied or pickled."""
        raise fail("secret key", "cannot be copied or stored: the same noise would be drawn twice", _FRESH)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise, for every pickle protocol."""
        self.__reduce__()


class CipherStream:
    """Uniform words from ChaCha20 under one key."""

    def __init__(self, key: bytes) -> None:
        """Start at the first word."""
        with needs("flower", "secret key"):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        # The nonce can be constant, because each key has a single stream.
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self.count = 0
        """Words drawn so far."""

    def words(self, count: int) -> Words:
        """Return the next words: up to 2^35 of them, 256 GiB."""
        self.count += count
        # Zeros encrypt to the key stream itself.
        drawn = bytearray(8 * count)
        self._cipher.update_into(drawn, drawn)
        return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False)


TOLERANCE = (2.0**-44, 2.0**-50)
"""Largest relative and absolute error of Phi^-1 in float64 for which n is exact.

Measured against 60 digits, for 63-bit u: relative error 2^-50.6 where |z| > 2^-3, absolute error 2^-53 below
(`benchmarks/secure_noise.py --error`)."""
_FAR = 5.0
"""|z| above which intervals of u may be wider than the tolerance: all such numbers are computed with more digits."""
LARGEST = 2.0**40
"""Largest `scale`: above it the tolerance would be wider than a whole number."""
_NORMALS_AT_ONCE = 1 << 14
_MORE = 2
"""Words of additional digits of u."""
_PRECISE = Context(prec=110)


@dataclass(frozen=True)
class Rounded:
    """n = rint(scale * z) for z ~ N(0, 1), independently for each entry, as whole numbers."""

    scale: float

    def __post_init__(self) -> None:
        """Raise if the noise is too coarse for the digits of float64."""
        if not 0 < self.scale <= LARGEST:
            deviation = f"has a standard deviation of {self.scale:.3g} steps of its grid"
            raise fail("noise", f"{deviation}, at most {LARGEST:.3g} can be drawn", "give a smaller sigma")

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> Tensor:
        """Draw one tensor on the CPU, block by block in the cache."""
        out = np.empty(math.prod(shape), np.int64)
        for start in range(0, len(out), _NORMALS_AT_ONCE):
            block = out[start : start + _NORMALS_AT_ONCE]
            drawn = words(len(block), source)
            nearest, unsure = _nearest(drawn, self.scale)
            block[:] = nearest
            for i in unsure.tolist():
                block[i] = _exact(int(drawn[i]), int(nearest[i]), self.scale, words(_MORE, source))
        return tensor(out, shape).to(dtype)

    def penalty(self, value: Tensor) -> Tensor:
        """Return half the sum of squares over scale^2 per row: -log density up to a constant."""
        return (value / self.scale).flatten(1).square().sum(1) / 2


class _Nearest(NamedTuple):
    nearest: NDArray[np.float64]
    unsure: NDArray[np.int64]


def _nearest(drawn: Words, scale: float) -> _Nearest:
    """Compute the whole numbers in float64, and the indices at which they may be wrong."""
    signs, u = halves(drawn)
    z = quantiles(u)
    z *= signs
    y = z * scale
    nearest = np.rint(y)
    size = np.abs(z, out=z)
    relative, absolute = TOLERANCE
    # y is wrong by at most scale (absolute + relative |z|). It is safe if it lies farther than that from n + 1/2.
    margin = 0.5 - absolute * scale - (relative * scale) * size
    unsure = np.abs(np.subtract(y, nearest, out=y), out=y) >= margin
    unsure |= size > _FAR
    return _Nearest(nearest, np.flatnonzero(unsure))


def _exact(drawn: int, guess: int, scale: float, more: Words) -> int:
    """Compute n for a word of u and additional digits: the least |n| with Phi(-(|n| + 1/2) / scale) < u."""
    # The word's 63 digits of u as in `halves`, the lowest bit being the sign, and behind them the new ones.
    digits = drawn >> 1
    for word in more.tolist():
        digits = (digits << 64) | word
    with localcontext(_PRECISE):
        # The midpoint (digits + 1/2) of an interval of length 2^-(64 + 64 k), in (0, 1/2).
        u = (2 * Decimal(digits) + 1) / 2 ** (65 + 64 * len(more))
        steps = Decimal(scale)

        def reaches(n: int) -> bool:
            return tail((n + Decimal("0.5")) / steps) < u

        # Bracket |n| in (low, high] by doubling strides from the float64 guess, then bisect.
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
    """Compute Phi(-x) for x >= 0 with nearly all digits of the decimal context.

    Phi(x) - 1/2 = phi(x) (x + x^3 / 3 + x^5 / (3 * 5) + ...), a series without negative terms.

    >>> with localcontext(_PRECISE):
    ...     round(tail(Decimal(0)), 3), round(tail(Decimal("1.959963984540054")), 16)
    (Decimal('0.500'), Decimal('0.0250000000000000'))
    """
    # `term` is x^odd / (1 * 3 * ... * odd).
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
