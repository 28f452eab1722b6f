"""Tensors as bytes: which are coded together, dense or sparse, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.errors import Problem
from gradveil.core.tree import Tensors
from gradveil.federated import positions
from gradveil.federated import values as numbers
from gradveil.federated.header import MOST_TOGETHER, Entry
from gradveil.federated.layout import Layout, WireError, damaged

HEADER_BITS = 48
"""What coding a tensor for itself takes: 4 to 7 bytes of header, and what is missing to whole bytes."""


class Piece(NamedTuple):
    """One tensor's entries that could be sent, as they are on the wire."""

    name: str
    flat: Tensor
    support: NDArray[np.bool_]
    """Which are not zero, and so are sent."""
    entries: int
    """Of the whole tensor, also those outside of a shared mask."""

    @staticmethod
    def of(name: str, flat: Tensor, entries: int) -> Piece:
        """Look at what is sent."""
        return Piece(name, flat, (flat != 0).numpy(), entries)


class _Counts(NamedTuple):
    among: int
    kept: int

    def bits(self, width: int) -> float:
        """Bound the content from below: places at random and values of so many bits, or all values."""
        among, kept = self
        if not 0 < kept < among:
            return kept * width
        places = -kept * math.log2(kept / among) - (among - kept) * math.log2(1 - kept / among)
        return min(places + kept * width, among * width)


def together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group neighbours that take less room together than each for itself, as far as their counts tell.

    Small tensors of about the same density then share a header, and whole bytes; a dense one stands alone.
    """
    run: list[Piece] = []
    before, entries = _Counts(0, 0), 0
    for piece in pieces:
        own = _Counts(piece.flat.numel(), int(np.count_nonzero(piece.support)))
        both = _Counts(before.among + own.among, before.kept + own.kept)
        width = 8 * piece.flat.dtype.itemsize
        alike = bool(run) and run[0].flat.dtype == piece.flat.dtype
        few = entries + piece.entries <= MOST_TOGETHER
        if alike and few and both.bits(width) <= before.bits(width) + own.bits(width) + HEADER_BITS:
            run.append(piece)
            before, entries = both, entries + piece.entries
        else:
            if run:
                yield run
            run, before, entries = [piece], own, piece.entries
    if run:
        yield run


def pack(run: list[Piece], deflate: bool) -> tuple[Entry, list[numbers.Bytes | numbers.Integers]]:
    """Store tensors in the smaller way."""
    flat = run[0].flat if len(run) == 1 else torch.cat([piece.flat for piece in run])
    support = run[0].support if len(run) == 1 else np.concatenate([piece.support for piece in run])
    among, width = flat.numel(), flat.dtype.itemsize
    places = np.flatnonzero(support)
    low, unary, coded = None, 0, []
    if len(places) < among:
        code = positions.code(support, places)
        if positions.size(len(places), code.low, code.unary) < (among - len(places)) * width:
            low, unary, coded = code
    # A dense zero has no sign either.
    bits = numbers.as_integers(flat + 0.0) if low is None else numbers.as_integers(flat)[places]
    planes, parts = numbers.deflate(bits) if deflate else ((), [bits])
    names = tuple(piece.name for piece in run)
    return Entry(names, flat.dtype, among, len(bits), low, unary, planes), [*coded, *parts]


def unpack(
    entry: Entry,
    layout: Layout,
    coded: memoryview,
    content: memoryview,
    within: positions.Positions | None,
    finite: bool,
) -> Tensors:
    """Rebuild tensors from bytes whose number has been checked."""
    width = entry.values.itemsize
    if entry.planes:
        bits = numbers.inflate(content, entry.kept, width, entry.planes)
    else:
        bits = np.frombuffer(content, f"<i{width}")
    if bits is None:
        raise damaged("has values that do not inflate to their number", entry.place)
    if finite and not numbers.all_finite(bits, entry.values):
        raise WireError(Problem(entry.place, "has values that are not finite", "leave this update out"))
    places = within
    if entry.low is not None:
        places = positions.read(np.frombuffer(coded, np.uint8), entry.among, entry.kept, entry.low, entry.unary)
        if places is None:
            raise damaged("has positions that are out of order or out of bounds", entry.place)
        if bool(((bits << 1) == 0).any()):
            raise damaged("lists zeros as entries that were sent", entry.place)
        places = within[places] if within is not None else places
    sizes = [math.prod(layout[name].shape) for name in entry.names]
    if places is None:
        stored = bits.copy()
    else:
        stored = np.zeros(sum(sizes), bits.dtype)
        stored[places] = bits
    parts = numbers.as_values(stored, entry.values).split(sizes)
    # Tensors that share memory cannot be saved side by side.
    owned = parts if len(parts) == 1 else [part.clone() for part in parts]
    described = ((name, layout[name]) for name in entry.names)
    return {name: part.reshape(shape).to(dtype) for (name, (shape, dtype)), part in zip(described, owned, strict=True)}
