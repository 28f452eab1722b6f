"""Codes of sent entries: positions in Rice code or a bitmap, values plain or deflated by byte planes.

Of k positions p_1 < ... < p_k among n, the gaps g_i = p_i - p_(i-1) - 1 are split at bit l: the lower l bits are in l
planes of k bits, the rest in unary, g_i >> l zeros and a one, in a bitmap of k + sum(g_i >> l) bits. With l = 0 this
is the bitmap of the support. For positions at random at the density d = k/n it takes at most 4.4% more than the
entropy H(d) n while d <= 1/2, and never more than n bits; every step is one operation on whole arrays.

Mantissas are noise, which no code makes smaller. Signs and exponents, the last byte of every value, deflate: of
normally distributed values to a third of that byte (two thirds in float16, where it has two bits of mantissa), of
values of one magnitude to little more than the sign.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
"""Encoded bytes."""
Positions = NDArray[np.int64]
"""Positions of the sent entries, ascending."""


class Coded(NamedTuple):
    """Positions in Rice code: lower bits per gap, bits of the unary bitmap, and the bytes of both."""

    low: int
    unary: int
    content: list[Bytes]


def code(support: NDArray[np.bool_], positions: Positions) -> Coded:
    """Code the positions of the True entries at the cheapest `low`.

    >>> code(np.array([False, True, True]), np.array([1, 2]))
    Coded(low=0, unary=3, content=[array([96], dtype=uint8)])
    """
    count = len(positions)
    if count == 0:
        return Coded(0, 0, [])
    bitmap = int(positions[-1]) + 1
    # A code with l lower bits takes at least l + 1 bits a position.
    if 2 * count >= bitmap:
        return Coded(0, bitmap, [np.packbits(support[:bitmap])])
    # 32 bits hold every gap: a tensor has at most 2^31 entries (`MOST_ENTRIES`).
    gaps = np.empty(count, np.int32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    low, least, candidate = 0, _bytes(bitmap), 1
    while _bytes(count * (candidate + 1)) < least:
        cost = size(count, candidate, count + int((gaps >> candidate).sum(dtype=np.int64)))
        low, least = (candidate, cost) if cost < least else (low, least)
        candidate += 1
    if low == 0:
        return Coded(0, bitmap, [np.packbits(support[:bitmap])])
    # The i-th one (from 0) follows the zeros of the gaps up to its own, and i ones.
    ends = np.cumsum(gaps >> low, dtype=np.int64)
    ends += np.arange(count)
    marks = np.zeros(int(ends[-1]) + 1, dtype=np.bool_)
    marks[ends] = True
    lower = (gaps & (1 << low) - 1).astype(_narrow(low))
    planes = [np.packbits((lower & (1 << bit)) != 0) for bit in range(low)]
    return Coded(low, len(marks), [*planes, np.packbits(marks)])


def size(count: int, low: int, unary: int) -> int:
    """Count the bytes of the coded positions.

    >>> size(count=10, low=3, unary=17)
    9
    """
    return low * _bytes(count) + _bytes(unary)


def longest(entries: int, count: int, low: int) -> int:
    """Bound the unary bitmap: k + (n - k) / 2^l bits, since the gaps sum to at most n - k; 0 for no entry.

    >>> longest(entries=100, count=4, low=2), longest(entries=100, count=0, low=2)
    (28, 0)
    """
    return count + ((entries - count) >> low) if count else 0


def read(content: Bytes, entries: int, count: int, low: int, unary: int) -> Positions | None:
    """Decode positions; None if the content is not what `code` writes for `count` positions among `entries`.

    The caller has compared the length with `size` and `unary` with `longest`. The sum of the first i unary parts is the
    index e_i of the i-th one minus i, so one running sum over the lower bits gives all positions, counted from 0:
    p_i = ((e_i - i) << l) + (sum of the lower bits up to i) + i.
    """
    plane = _bytes(count)
    marks = content[low * plane :]
    ends = np.flatnonzero(np.unpackbits(marks).view(np.bool_))
    # The last bit is a one: a longer bitmap would be a second encoding of the same positions.
    if len(ends) != count or (count and int(ends[-1]) != unary - 1):
        return None
    if low == 0 or count == 0:
        return ends
    lower = np.zeros(count, dtype=_narrow(low))
    for bit in range(low):
        bits = np.unpackbits(content[bit * plane : (bit + 1) * plane])
        if bits[count:].any():
            return None
        lower |= bits[:count].astype(lower.dtype, copy=False) << bit
    order = np.arange(count)
    ends -= order
    ends <<= low
    ends += order
    ends += np.cumsum(lower, dtype=np.int64)
    return ends if int(ends[-1]) < entries else None


def _narrow(bits: int) -> type[np.unsignedinteger]:
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


Integers = NDArray[np.signedinteger]
"""Values viewed as integers of their width, since NumPy has no bfloat16; little-endian."""
_TORCH = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE, _WORTH = 1 << 16, 31 / 32
"""Bytes of a plane that are deflated as a test, and the share of their size at which the whole plane is deflated."""


def as_integers(flat: Tensor) -> Integers:
    """View values on the CPU as integers, little-endian."""
    width = flat.dtype.itemsize
    return flat.contiguous().view(_TORCH[width]).numpy().astype(f"<i{width}", copy=False)


def as_values(bits: Integers, dtype: torch.dtype) -> Tensor:
    """View integers as values again."""
    return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="), copy=False)).view(dtype)


def all_finite(bits: Integers, dtype: torch.dtype) -> bool:
    """Return whether no value is NaN or infinite, eight times as fast as `torch.isfinite`.

    Their exponents are all ones: viewed as integers they are the largest, and with the sign bit the largest unsigned.
    """
    if bits.size == 0:
        return True
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(_TORCH[dtype.itemsize]))
    sign = 1 << 8 * dtype.itemsize - 1
    unsigned = bits.view(bits.dtype.str.replace("i", "u"))
    return int(bits.max()) < infinity and int(unsigned.max()) < sign + infinity


def deflate(bits: Integers) -> tuple[tuple[int, ...], list[Bytes]]:
    """Split values into planes of bytes, the lowest first; return the planes with their lengths, 0 if not deflated."""
    parts: list[Bytes] = []
    lengths: list[int] = []
    for plane in bits.view(np.uint8).reshape(-1, bits.dtype.itemsize).T:
        raw = np.ascontiguousarray(plane)
        sample = raw[:_SAMPLE]
        small = raw
        tried = _deflated(sample)
        if len(tried) < _WORTH * len(sample):
            small = np.frombuffer(tried if len(sample) == len(raw) else _deflated(raw), np.uint8)
        lengths.append(len(small) if len(small) < len(raw) else 0)
        parts.append(small if len(small) < len(raw) else raw)
    return tuple(lengths), parts


def inflate(content: memoryview, count: int, width: int, lengths: tuple[int, ...]) -> Integers | None:
    """Undo `deflate`; None if a plane does not inflate to exactly `count` bytes."""
    planes = np.empty((count, width), np.uint8)
    offset = 0
    for plane, length in enumerate(lengths):
        part = content[offset : offset + (length or count)]
        offset += len(part)
        whole: bytes | memoryview = part
        if length:
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                whole = stream.decompress(part, count + 1)  # one byte more shows a plane that is too long
            except zlib.error:
                return None
            if len(whole) != count or not stream.eof or stream.unused_data:
                return None
        planes[:, plane] = np.frombuffer(whole, np.uint8)
    return planes.reshape(-1).view(f"<i{width}")


def _deflated(raw: Bytes) -> bytes:
    """Deflate with Huffman and run-length codes only: planes of values have no longer patterns."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return stream.compress(raw.data) + stream.flush()
