"""The values of an update as bytes: plain, or each of their bytes as a plane of its own, deflated where that helps.

Mantissas are noise: no code makes them smaller. Signs and exponents, the last byte of every value, are not: of normal
values that byte keeps a third of its size (in float16, where it holds two bits of mantissa, two thirds). Of values that
are all of one magnitude little more than the sign is left.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
"""Encoded bytes."""
Integers = NDArray[np.signedinteger]
"""Values seen as integers of their width, since NumPy has no bfloat16; little-endian."""
_TORCH = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE, _WORTH = 1 << 16, 31 / 32


def as_integers(flat: Tensor) -> Integers:
    """View values on the CPU as integers, little-endian."""
    width = flat.dtype.itemsize
    return flat.contiguous().view(_TORCH[width]).numpy().astype(f"<i{width}", copy=False)


def as_values(bits: Integers, dtype: torch.dtype) -> Tensor:
    """View integers as values again."""
    return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="), copy=False)).view(dtype)


def all_finite(bits: Integers, dtype: torch.dtype) -> bool:
    """Whether no value is NaN or infinite, that is no exponent all ones; eight times as fast as `torch.isfinite`.

    Such values are the largest integers, and with the sign bit set the largest unsigned ones.
    """
    if bits.size == 0:
        return True
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(_TORCH[dtype.itemsize]))
    sign = 1 << 8 * dtype.itemsize - 1
    unsigned = bits.view(bits.dtype.str.replace("i", "u"))
    return int(bits.max()) < infinity and int(unsigned.max()) < sign + infinity


def deflate(bits: Integers) -> tuple[tuple[int, ...], list[Bytes]]:
    """Split values into planes of bytes, the lowest first; return each one's length, 0 if left as it is, and them."""
    parts: list[Bytes] = []
    lengths: list[int] = []
    for plane in bits.view(np.uint8).reshape(-1, bits.dtype.itemsize).T:
        raw = np.ascontiguousarray(plane)
        sample = raw[:_SAMPLE]
        small = raw
        if len(_deflated(sample)) < _WORTH * len(sample):
            small = np.frombuffer(_deflated(raw), np.uint8)
        lengths.append(len(small) if len(small) < len(raw) else 0)
        parts.append(small if len(small) < len(raw) else raw)
    return tuple(lengths), parts


def inflate(content: memoryview, count: int, width: int, lengths: tuple[int, ...]) -> Integers | None:
    """Undo `deflate`, at most one byte too far; None where a plane does not give exactly `count` bytes."""
    planes = np.empty((count, width), np.uint8)
    place = 0
    for plane, length in enumerate(lengths):
        part = content[place : place + (length or count)]
        place += len(part)
        whole: bytes | memoryview = part
        if length:
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                whole = stream.decompress(part, count + 1)
            except zlib.error:
                return None
            if len(whole) != count or not stream.eof or stream.unused_data:
                return None
        planes[:, plane] = np.frombuffer(whole, np.uint8)
    return planes.reshape(-1).view(f"<i{width}")


def _deflated(raw: Bytes) -> bytes:
    """Deflate with codes of bytes and of runs alone: planes of values hold no longer patterns to search for."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return stream.compress(raw.data) + stream.flush()
