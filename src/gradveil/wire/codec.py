"""Encode and decode an update: packed, checked, and limited in size.

An encoded update is a header (`wire.header`), then for each tensor its coded positions and its values
(`wire.positions_and_values`), then the CRC-32 of all that. A tensor is stored dense or sparse, whichever is smaller:
sparse from 1/32 of zeros on in 32 bits, 1/16 in 16 bits. Small ones are coded together where that is smaller.

The receiver knows the model, so the header has a digest of its layout, and nothing else about names, dtypes and shapes.

What counts as sent is what is not zero *on the wire*: a value that float16 rounds to zero is not sent. Zeros have no
sign there. NaN and infinities are refused on both sides unless `nonfinite="keep"`.

Decoding trusts nothing. The receiver says what model it expects; every length, shape, dtype and the checksum are
compared before memory is taken; whatever is wrong ends in `WireError`. Beyond its result decoding takes at most
`WORKING_BYTES` an entry of the largest tensor (of 65,536 entries, if all are smaller), and for the header 200 bytes a
byte, or 1000 a tensor of the receiver's layout.
A CRC finds accidents, not forgeries: who sent it is the transport's business.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.settings import Choice
from gradveil.core.tree import Tensors
from gradveil.wire import header
from gradveil.wire import positions_and_values as numbers
from gradveil.wire.header import (
    DIGEST,
    DTYPES,
    MOST_ENTRIES,
    MOST_TOGETHER,
    Header,
    Layout,
    TensorEntry,
    WireError,
    damaged,
    on_wire,
    place_of,
)

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


def pack(run: list[Piece], deflate: bool) -> tuple[TensorEntry, list[numbers.Bytes | numbers.Integers]]:
    """Store tensors in the smaller way."""
    flat = run[0].flat if len(run) == 1 else torch.cat([piece.flat for piece in run])
    support = run[0].support if len(run) == 1 else np.concatenate([piece.support for piece in run])
    among, width = flat.numel(), flat.dtype.itemsize
    places = np.flatnonzero(support)
    low, unary, coded = None, 0, []
    if len(places) < among:
        code = numbers.code(support, places)
        if numbers.size(len(places), code.low, code.unary) < (among - len(places)) * width:
            low, unary, coded = code
    # A dense zero has no sign either.
    bits = numbers.as_integers(flat + 0.0) if low is None else numbers.as_integers(flat)[places]
    planes, parts = numbers.deflate(bits) if deflate else ((), [bits])
    names = tuple(piece.name for piece in run)
    return TensorEntry(names, flat.dtype, among, len(bits), low, unary, planes), [*coded, *parts]


def unpack(
    entry: TensorEntry,
    layout: Layout,
    coded: memoryview,
    content: memoryview,
    within: numbers.Positions | None,
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
        places = numbers.read(np.frombuffer(coded, np.uint8), entry.among, entry.kept, entry.low, entry.unary)
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


__all__ = ["Header", "Layout", "WireError", "decode", "encode", "encoded_size", "fits", "inspect"]

CHECKSUM = 4
"""Bytes of the checksum at the end."""
WORKING_BYTES = 48
"""Bytes an entry of the largest tensor that decoding needs beside its result, for the most wasteful code there is."""
NonFinite = Literal["refuse", "keep"]
"""What is done about values that are not finite."""
_NONFINITE = Choice(get_args(NonFinite))


def encode(
    update: Mapping[str, Tensor],
    *,
    values: torch.dtype | None = None,
    mask: Mapping[str, Tensor] | None = None,
    nonfinite: NonFinite = "refuse",
    deflate: bool = False,
) -> bytes:
    """Encode one update {name: tensor}.

    `values` is what wider values are rounded to. `mask` is one that the receiver has too: positions are coded within
    it, and take nothing where all of it is sent; an entry outside it that is not zero is refused. `deflate` makes
    values a sixth smaller (bfloat16 a third, signs of one magnitude twenty times) and doubles the time.

    >>> update = {"w": torch.tensor([0.0, 1.5, 0.0, -2.0])}
    >>> decode(encode(update), Layout.of(update))
    {'w': tensor([ 0.0000,  1.5000,  0.0000, -2.0000])}
    """
    refuse([*_NONFINITE.problems("nonfinite", nonfinite), *_not_encodable(update, values, mask)])
    entries: list[TensorEntry] = []
    content: list[memoryview] = []
    problems: list[Problem] = []
    for run in together(_pieces(update, values, mask, nonfinite, problems)):
        entry, parts = pack(run, deflate)
        entries.append(entry)
        content += [part.data for part in parts]
    refuse(problems)
    said = header.write(Layout.of(update), entries, digest(mask) if mask is not None else b"", deflate)
    parts = [memoryview(said), *content]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, checksum.to_bytes(CHECKSUM, "little")])


def _pieces(
    update: Mapping[str, Tensor],
    values: torch.dtype | None,
    mask: Mapping[str, Tensor] | None,
    nonfinite: NonFinite,
    problems: list[Problem],
) -> Iterator[Piece]:
    """Prepare one tensor after the other for the wire; say what is wrong with its values."""
    for name in sorted(update):
        flat = update[name].detach().reshape(-1)
        if mask is not None:
            inside = mask[name].detach().reshape(-1).bool()
            if outside := int(flat[~inside].count_nonzero()):
                remedy = "apply the mask before encoding"
                problems.append(Problem(place_of(name), f"has {outside} entries outside the shared mask", remedy))
            flat = flat[inside]
        flat = flat.to("cpu", on_wire(update[name].dtype, values))
        if nonfinite == "refuse" and not numbers.all_finite(numbers.as_integers(flat), flat.dtype):
            what = f"{int((~flat.isfinite()).sum())} values are not finite in {str(flat.dtype).removeprefix('torch.')}"
            remedy = "find out why, send wider values, or say nonfinite='keep' on both sides"
            problems.append(Problem(place_of(name), what, remedy))
        yield Piece.of(name, flat, update[name].numel())


def inspect(data: bytes | bytearray | memoryview, layout: Layout) -> Header:
    """Read what an encoded update of this layout says of itself, once its length and checksum are right.

    >>> update = {"w": torch.eye(16)}
    >>> inspect(encode(update), Layout.of(update)).entries[0].kept
    16
    """
    view = memoryview(data).cast("B")
    body = view[:-CHECKSUM]
    if (said := header.stated(body)) != layout.digest():
        _refuse_damage(view)
        what = f"is of the layout with the digest {said.hex()}, expected {layout.digest().hex()}"
        remedy = "hold one model on both sides, and train the same parameters of it"
        raise WireError(Problem("update", what, remedy))
    found = header.read(body, layout)
    if found.end != len(body):
        raise damaged(f"has {len(view)} bytes, {found.end + CHECKSUM} according to its header")
    _refuse_damage(view)
    return found


def fits(data: bytes | bytearray | memoryview, layout: Layout) -> bool:
    """Say whether an encoded update is of this layout, as far as it tells.

    >>> update = {"w": torch.eye(16)}
    >>> fits(encode(update), Layout.of(update)), fits(encode(update), Layout.of({"b": update["w"]}))
    (True, False)
    """
    return layout.digest() == header.stated(memoryview(data).cast("B")[:-CHECKSUM])


def _refuse_damage(view: memoryview) -> None:
    if zlib.crc32(view[:-CHECKSUM]) != int.from_bytes(view[-CHECKSUM:], "little"):
        raise damaged("has another checksum than when it was sent")


def decode(
    data: bytes | bytearray | memoryview,
    layout: Layout,
    *,
    mask: Mapping[str, Tensor] | None = None,
    nonfinite: NonFinite = "refuse",
) -> Tensors:
    """Decode an update of this model, in its order and its dtypes; anything else ends in a `WireError`."""
    refuse([*_NONFINITE.problems("nonfinite", nonfinite), *_not_its_mask(layout, mask)])
    found = inspect(data, layout)
    if found.mask != (digest(mask) if mask is not None else b""):
        remedy = "give `mask` the tensors that the sender used, or none on both sides"
        raise WireError(Problem("mask", "is not the one that the update was encoded with", remedy))
    view, place = memoryview(data).cast("B"), found.start
    sent: Tensors = {}
    for entry in found.entries:
        coded = view[place : (place := place + entry.position_bytes)]
        bits = view[place : (place := place + entry.value_bytes)]
        within = None
        if mask is not None:
            within = np.flatnonzero(
                torch.cat([mask[name].detach().reshape(-1).bool().cpu() for name in entry.names]).numpy()
            )
            if len(within) != entry.among:
                raise damaged(f"has {entry.among} entries in a mask of {len(within)}", entry.place)
        sent |= unpack(entry, layout, coded, bits, within, nonfinite == "refuse")
    return {name: sent[name] for name in layout}


def encoded_size(update: Mapping[str, Tensor], messages: Mapping[str, Tensor] | None = None) -> int:
    """Count the bytes that an update takes in float32, deflated: what `encode` makes of it, header and all.

    Public messages of the round that are masks of the parameters (`...mask.<parameter>`) are shared masks, if all that
    is sent lies within them.

    >>> encoded_size({"w": torch.eye(32)}) < encoded_size({"w": torch.ones(32, 32).cumsum(1)}) < 4 * 32 * 32
    True
    """
    mask = _public_mask(update, messages or {})
    return len(encode(update, values=torch.float32, mask=mask, nonfinite="keep", deflate=True))


def _public_mask(update: Mapping[str, Tensor], messages: Mapping[str, Tensor]) -> Tensors | None:
    found = {name: mask for name in update for said, mask in messages.items() if f".{said}".endswith(f".mask.{name}")}
    if not update or found.keys() != update.keys():
        return None
    return found if all(not value[~found[name].bool()].any() for name, value in update.items()) else None


def digest(mask: Mapping[str, Tensor]) -> bytes:
    """Digest a mask, so that another one is noticed: BLAKE2b of every name and packed bitmap, sorted by name."""
    found = blake2b(digest_size=DIGEST)
    for name in sorted(mask):
        found.update(name.encode())
        found.update(np.packbits(mask[name].detach().reshape(-1).bool().cpu().numpy()).data)
    return found.digest()


def _not_encodable(
    update: Mapping[str, Tensor], values: torch.dtype | None, mask: Mapping[str, Tensor] | None
) -> list[Problem]:
    """List what no receiver would accept."""
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    problems = [
        Problem(place_of(name), f"is of {value.dtype}", f"send one of {known}")
        for name, value in update.items()
        if value.dtype not in DTYPES
    ]
    if values is not None and values not in DTYPES:
        problems.append(Problem("values", f"is {values}", f"choose one of {known}"))
    problems += [
        Problem(place_of(name), f"is {tuple(value.shape)}", f"send at most {MOST_ENTRIES} entries")
        for name, value in update.items()
        if value.numel() > MOST_ENTRIES
    ]
    return problems + _not_its_mask(Layout.of(update), mask)


def _not_its_mask(layout: Layout, mask: Mapping[str, Tensor] | None) -> list[Problem]:
    """List where a mask is not one of this model."""
    if mask is None:
        return []
    return [
        Problem(f"mask.{name}", "is not of the update's names and shapes", "give one mask a tensor, of its shape")
        for name in sorted(layout.keys() | mask.keys())
        if name not in mask or name not in layout or tuple(mask[name].shape) != layout[name].shape
    ]
