"""The header of an encoded update, and the layout of tensors that the receiver expects.

Integers are unsigned and little-endian, in groups of 7 bits with the high bit set on all but the last (LEB128, in the
shortest form):

    "GVUP"  2  flags (bit 0: shared mask, bit 1: deflated)  [8 bytes: digest of the mask]  8 bytes: digest of the layout
    for the tensors, sorted by name, one or several at once:
                      number of tensors coded together  1 + lower bits, 0 if dense | values << 6
                      [entries in the mask, if there is one]
                      [if sparse: entries sent  length of the unary bitmap]
                      [if deflated: length of each plane of bytes, 0 where it is not deflated]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem
from gradveil.wire import positions_and_values

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of values; the code of a dtype is its index."""
DIGEST = 8
"""Bytes of the digest of a layout or of a public mask."""
SHOWN = 8
"""Largest number of differences in one error: an update of another model differs everywhere."""


class WireError(GradveilError):
    """An encoded update is damaged, of another version, or not an update of the expected model."""


def damaged(problem: str, where: str = "update") -> WireError:
    """Build the error for bytes that `encode` never writes."""
    return WireError(Problem(where, problem, "have it sent again; if it comes again, do not trust the sender"))


class Described(NamedTuple):
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Write as `float32 [6, 3, 5, 5]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Layout(Mapping[str, Described]):
    """The names, shapes and dtypes of a model's updates, which the receiver knows and compares.

    >>> print(Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}))
    w: float32 [2, 3]; b: float32 [2]
    """

    tensors: Mapping[str, Described] = field(default_factory=dict[str, Described])

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Describe parameters, or an update of them."""
        return Layout({name: Described(tuple(value.shape), value.dtype) for name, value in tensors.items()})

    def __getitem__(self, name: str) -> Described:
        """Return the description of one tensor."""
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self.tensors)

    def __str__(self) -> str:
        """Write all on one line."""
        return "; ".join(f"{name}: {described}" for name, described in self.items())

    def digest(self) -> bytes:
        """Digest names, dtypes and shapes, in whatever order they are: BLAKE2b of their JSON, sorted by name.

        >>> Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}).digest().hex()
        '595c78f1885ea213'
        """
        rows = [[name, str(self[name].dtype).removeprefix("torch."), self[name].shape] for name in sorted(self)]
        return blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=DIGEST).digest()

    def differences(self, sent: Layout) -> list[Problem]:
        """List the tensors in which a received layout differs, with both descriptions."""
        remedy = "send updates of the model that the receiver holds, or give the receiver this model's layout"
        problems = [
            Problem(location_of(name), f"is {sent.get(name, 'missing')}, expected {self[name]}", remedy)
            for name in self
            if sent.get(name) != self[name]
        ]
        problems += [
            Problem(location_of(name), f"is {sent[name]}, and the model has no such tensor", remedy)
            for name in sent
            if name not in self
        ]
        if (more := len(problems) - SHOWN) > 0:
            problems[SHOWN:] = [Problem("update", f"differs in {more} more tensors", remedy)]
        return problems


def on_wire(dtype: torch.dtype, values: torch.dtype | None) -> torch.dtype:
    """Return the narrower of a tensor's dtype and the requested one."""
    return dtype if values is None or values.itemsize >= dtype.itemsize else values


def location_of(name: str) -> str:
    """Name a tensor in an error; control characters in an untrusted name are escaped."""
    text = repr(name)[1:-1]
    return f"update.{text if len(text) <= 80 else text[:77] + '...'}"


MAGIC = b"GVUP"
"""The first bytes of an encoded update."""
VERSION = 2
"""Version of the encoding; others are refused."""
MOST_ENTRIES = 1 << 31
"""Largest number of entries of one tensor: every sum of positions fits 64 bits."""
MOST_TOGETHER = 1 << 16
"""Largest number of entries coded together, which bounds the memory of decoding."""


class TensorEntry(NamedTuple):
    """Encoding of one tensor, or of several in a row."""

    names: tuple[str, ...]
    values: torch.dtype
    """Dtype of the values on the wire."""
    among: int
    """Candidate entries: all, or those in the shared mask."""
    sent: int
    """Entries sent: the nonzero values, or all of a dense tensor."""
    low: int | None
    """Lower bits of the gaps that are stored in planes; None if dense."""
    unary: int
    """Bits of the unary bitmap."""
    planes: tuple[int, ...] = ()
    """Lengths of the deflated planes of bytes, 0 for one that is not deflated; empty for plain values."""

    @property
    def location(self) -> str:
        """The tensors' name in an error."""
        return _location(self.names)

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions."""
        return 0 if self.low is None else positions_and_values.size(self.sent, self.low, self.unary)

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return sum(plane or self.sent for plane in self.planes or (0,) * self.values.itemsize)


class Header(NamedTuple):
    """Header of an encoded update."""

    layout: Layout
    """The names, shapes and dtypes, which the receiver knows and the digest confirms."""
    entries: tuple[TensorEntry, ...]
    mask: bytes
    """Digest of the mask that sender and receiver share; empty if there is none."""
    deflated: bool
    start: int
    """Where the first tensor's content begins."""

    @property
    def end(self) -> int:
        """Where the last tensor's content ends."""
        return self.start + sum(entry.position_bytes + entry.value_bytes for entry in self.entries)


def write(layout: Layout, entries: Sequence[TensorEntry], mask: bytes, deflated: bool) -> bytes:
    """Write a header; entries are sorted by name."""
    out = bytearray(MAGIC) + bytes((VERSION, bool(mask) | deflated << 1)) + mask + layout.digest()
    for entry in entries:
        low = 0 if entry.low is None else 1 + entry.low
        _write_number(out, len(entry.names))
        out.append(low | DTYPES.index(entry.values) << 6)
        among = (entry.among,) if mask else ()
        for number in (*among, *((entry.sent, entry.unary) if low else ()), *entry.planes):
            _write_number(out, number)
    return bytes(out)


def stated(data: memoryview) -> bytes:
    """Read the layout digest that an update states."""
    return _opening(_Cursor(data, 0))[0]


def read(data: memoryview, layout: Layout) -> Header:
    """Read an untrusted header: each number is compared with its limit before it is used.

    `layout` is the one whose digest the update states.
    """
    cursor = _Cursor(data, 0)
    _, mask, deflated = _opening(cursor)
    entries = list[TensorEntry]()
    remaining = sorted(layout)
    while remaining:
        entries.append(_entry(cursor, layout, remaining, bool(mask), deflated))
        del remaining[: len(entries[-1].names)]
    return Header(layout, tuple(entries), mask, deflated, cursor.position)


def _opening(cursor: _Cursor) -> tuple[bytes, bytes, bool]:
    """Read the digests of the layout and of the shared mask, and whether values are deflated."""
    if bytes(cursor.data[: len(MAGIC)]) != MAGIC:
        raise damaged("does not begin like an encoded update")
    cursor.take(len(MAGIC))
    if (version := cursor.byte()) != VERSION:
        remedy = "install the same version of Gradveil on both sides"
        raise WireError(Problem("update", f"is in version {version} of the encoding, not {VERSION}", remedy))
    if (flags := cursor.byte()) > 3:
        raise damaged(f"has unknown flags {flags:#x}")
    mask = bytes(cursor.take(DIGEST)) if flags & 1 else b""
    return bytes(cursor.take(DIGEST)), mask, bool(flags & 2)


def _entry(cursor: _Cursor, layout: Layout, remaining: list[str], masked: bool, deflated: bool) -> TensorEntry:
    """Read the entry of the next tensors that are coded together; `remaining` lists those still to come."""
    names = tuple(remaining[: cursor.number(len(remaining))])
    if not names:
        raise damaged("codes no tensor where some are left")
    entries = sum(math.prod(layout[name].shape) for name in names)
    if len(names) > 1 and entries > MOST_TOGETHER:
        raise damaged(f"codes {entries} entries together, at most {MOST_TOGETHER} may be", _location(names))
    kind = cursor.byte()
    low, values = kind & 63, DTYPES[kind >> 6]
    for name in names:
        if layout[name].dtype not in DTYPES or values != on_wire(layout[name].dtype, values):
            raise damaged("has values that are wider than the tensor", location_of(name))
    among = cursor.number(entries) if masked else entries
    if low > among.bit_length():
        raise damaged(f"has the number {low} where at most {among.bit_length()} is possible", _location(names))
    sent, unary = among, 0
    if low:
        sent = cursor.number(among)
        unary = cursor.number(positions_and_values.longest(among, sent, low - 1))
    # A deflated plane is shorter than a plain one, or it would not be deflated.
    planes = tuple(cursor.number(max(sent - 1, 0)) for _ in range(values.itemsize * deflated))
    return TensorEntry(names, values, among, sent, low - 1 if low else None, unary, planes)


class _Cursor:
    """A reading position in the bytes that never passes their end."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.position:
            raise damaged("ends within its header")
        self.position += count
        return self.data[self.position - count : self.position]

    def byte(self) -> int:
        if self.position == len(self.data):
            raise damaged("ends within its header")
        self.position += 1
        return self.data[self.position - 1]

    def number(self, most: int) -> int:
        value = 0
        # Five groups of 7 bits hold `MOST_ENTRIES`.
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if value > most:
                    raise damaged(f"has the number {value} where at most {most} is possible")
                if shift and not byte:
                    raise damaged("has a number that is not in its shortest form")
                return value
        raise damaged("has a number of more than 35 bits")


def _write_number(out: bytearray, value: int) -> None:
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _location(names: tuple[str, ...]) -> str:
    return location_of(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
