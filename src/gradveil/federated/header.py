"""What an encoded update says of itself, and the description of the model that it is held against.

Integers are unsigned and little-endian, in groups of 7 bits with the high bit set on all but the last (LEB128, in the
shortest form):

    "GVUP"  version  flags (bit 0: shared mask, bit 1: deflated)  [8 bytes: digest of the mask]  number of tensors
    for each tensor:  length of the name  name (UTF-8)  dtype | values << 4  number of dimensions  dimensions
                      [entries in the mask, if there is one]
                      0 if dense, else: 1 + lower bits  entries sent  length of the unary bitmap
                      [if deflated: length of each plane of bytes, 0 where it is left as it is]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem
from gradveil.federated import positions

MAGIC = b"GVUP"
"""The first bytes of an encoded update."""
VERSION = 1
"""Version of the encoding; another is refused."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What values may be; a dtype's code is its place."""
MOST_TENSORS, MOST_DIMENSIONS, MOST_NAME, MOST_ENTRIES = 1 << 13, 16, 1 << 10, 1 << 31
"""Limits of what is read, above what is trained: headers stay small, and every sum of positions fits 64 bits."""
DIGEST = 8
"""Bytes of the digest of a public mask."""
SHOWN = 8
"""Differences that one error lists; an update of another model differs everywhere."""


class WireError(GradveilError):
    """An encoded update is damaged, of another version, or not an update of the expected model."""


def damaged(what: str, where: str = "update") -> WireError:
    """Build the error for bytes that no sender writes."""
    return WireError(Problem(where, what, "have it sent again; if it comes again, do not trust the sender"))


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

    def differences(self, sent: Layout) -> list[Problem]:
        """Say where what was sent is not of this model, with both descriptions."""
        remedy = "send updates of the model that the receiver holds, or give the receiver this model's layout"
        problems = [
            Problem(place_of(name), f"is {sent.get(name, 'missing')}, expected {self[name]}", remedy)
            for name in self
            if sent.get(name) != self[name]
        ]
        problems += [
            Problem(place_of(name), f"is {sent[name]}, and the model has no such tensor", remedy)
            for name in sent
            if name not in self
        ]
        if (more := len(problems) - SHOWN) > 0:
            problems[SHOWN:] = [Problem("update", f"differs in {more} more tensors", remedy)]
        return problems


def on_wire(dtype: torch.dtype, values: torch.dtype | None) -> torch.dtype:
    """Choose the dtype of a tensor's values: the one asked for where it is narrower, else the tensor's own."""
    return dtype if values is None or values.itemsize >= dtype.itemsize else values


class Entry(NamedTuple):
    """How one tensor is stored: its description, the dtype of the values on the wire, and how positions are coded."""

    name: str
    described: Described
    values: torch.dtype
    among: int
    """Entries that could be sent: all, or those in the shared mask."""
    kept: int
    """Entries sent: the values that are not zero, or all of a dense tensor."""
    low: int | None
    """Lower bits of the gaps that are stored in planes; None for a dense tensor."""
    unary: int
    """Bits of the unary bitmap."""
    planes: tuple[int, ...] = ()
    """Lengths of the deflated planes of bytes, 0 for one that is left as it is; empty for plain values."""

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions."""
        return 0 if self.low is None else positions.size(self.kept, self.low, self.unary)

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return sum(plane or self.kept for plane in self.planes or (0,) * self.values.itemsize)


class Header(NamedTuple):
    """What an encoded update says of itself."""

    entries: tuple[Entry, ...]
    mask: bytes
    """Digest of the mask that sender and receiver share; empty if there is none."""
    deflated: bool
    start: int
    """Where the first tensor's content begins."""

    @property
    def layout(self) -> Layout:
        """The names, shapes and dtypes."""
        return Layout({entry.name: entry.described for entry in self.entries})

    @property
    def end(self) -> int:
        """Where the last tensor's content ends."""
        return self.start + sum(entry.position_bytes + entry.value_bytes for entry in self.entries)


def write(entries: list[Entry], mask: bytes, deflated: bool) -> bytes:
    """Write a header."""
    out = bytearray(MAGIC) + bytes((VERSION, bool(mask) | deflated << 1)) + mask
    _write_number(out, len(entries))
    for entry in entries:
        name = entry.name.encode()
        _write_number(out, len(name))
        out += name
        out.append(DTYPES.index(entry.described.dtype) | DTYPES.index(entry.values) << 4)
        coding = (0,) if entry.low is None else (1 + entry.low, entry.kept, entry.unary)
        among = (entry.among,) if mask else ()
        for number in (len(entry.described.shape), *entry.described.shape, *among, *coding, *entry.planes):
            _write_number(out, number)
    return bytes(out)


def read(data: memoryview) -> Header:
    """Read a header, trusting nothing in it: no number is used before it is compared with its limit."""
    if bytes(data[:4]) != MAGIC:
        raise damaged("does not begin like an encoded update")
    cursor = _Cursor(data, 4)
    if (version := cursor.byte()) != VERSION:
        remedy = "install the same version of Gradveil on both sides"
        raise WireError(Problem("update", f"is in version {version} of the encoding, not {VERSION}", remedy))
    flags = cursor.byte()
    if flags > 3:
        raise damaged(f"has unknown flags {flags:#x}")
    mask, deflated = bytes(cursor.take(DIGEST)) if flags & 1 else b"", bool(flags & 2)
    entries = tuple(_read_entry(cursor, bool(mask), deflated) for _ in range(cursor.number(MOST_TENSORS)))
    if len({entry.name for entry in entries}) < len(entries):
        raise damaged("names a tensor twice")
    return Header(entries, mask, deflated, cursor.place)


def _read_entry(cursor: _Cursor, masked: bool, deflated: bool) -> Entry:
    try:
        name = str(cursor.take(cursor.number(MOST_NAME)), "utf-8")
    except UnicodeDecodeError as error:
        raise damaged("has a name that is not UTF-8") from error
    kinds = cursor.byte()
    if max(kinds & 15, kinds >> 4) >= len(DTYPES):
        raise damaged(f"has unknown dtypes {kinds:#x}", place_of(name))
    dtype, values = DTYPES[kinds & 15], DTYPES[kinds >> 4]
    if values != on_wire(dtype, values):
        raise damaged("has values that are wider than the tensor", place_of(name))
    shape = tuple(cursor.number(MOST_ENTRIES) for _ in range(cursor.number(MOST_DIMENSIONS)))
    if (entries := math.prod(shape)) > MOST_ENTRIES:
        raise damaged(f"has more than {MOST_ENTRIES} entries", place_of(name))
    among = cursor.number(entries) if masked else entries
    low, kept, unary = cursor.number(among.bit_length()) - 1, among, 0
    if low >= 0:
        kept = cursor.number(among)
        unary = cursor.number(positions.longest(among, kept, low))
    # A deflated plane is shorter than a plain one, or it would not be deflated.
    planes = tuple(cursor.number(max(kept - 1, 0)) for _ in range(values.itemsize * deflated))
    return Entry(name, Described(shape, dtype), values, among, kept, low if low >= 0 else None, unary, planes)


class _Cursor:
    """A place in the bytes that never passes their end."""

    def __init__(self, data: memoryview, place: int) -> None:
        self.data = data
        self.place = place

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.place:
            raise damaged("ends within its header")
        self.place += count
        return self.data[self.place - count : self.place]

    def byte(self) -> int:
        if self.place == len(self.data):
            raise damaged("ends within its header")
        self.place += 1
        return self.data[self.place - 1]

    def number(self, most: int) -> int:
        value = 0
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


def place_of(name: str) -> str:
    """Name a tensor in an error; a stranger's name can do no harm in a terminal or a log."""
    text = repr(name)[1:-1]
    return f"update.{text if len(text) <= 80 else text[:77] + '...'}"
