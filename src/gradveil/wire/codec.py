"""Encode and decode an update: packed, checked, and limited in size.

An encoded update is a header (`wire.header`), then for each tensor its coded positions and its values
(`wire.positions_and_values`), then the CRC-32 of all that. A tensor is stored dense or sparse, whichever is smaller:
sparse from 1/32 of zeros on in 32 bits, 1/16 in 16 bits. Small ones are coded together where that is smaller.

The receiver knows the model, so the header has only a digest of its names, dtypes and shapes.

An entry is sent if it is not zero *on the wire*: a value that float16 rounds to zero is not sent. Zeros lose their
sign. NaN and infinities are refused on both sides unless `nonfinite="keep"`.

Decoding trusts no input. The receiver passes the layout that it expects. Every length, shape, dtype and the checksum
are compared before memory is allocated, and each mismatch raises `WireError`. In addition to its result, decoding takes
at most `WORKING_BYTES` per entry of the largest tensor (of 65,536 entries, if all are smaller). The header takes 200
bytes per byte, or 1000 per tensor of the receiver's layout.
A CRC detects accidents, not forgeries: the transport authenticates the sender.
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
    location_of,
    on_wire,
)

HEADER_BITS = 48
"""Cost of coding a tensor alone: 4 to 7 bytes of header, and padding to whole bytes."""


class Piece(NamedTuple):
    """One tensor's candidate entries, in the dtype of the wire."""

    name: str
    flat: Tensor
    support: NDArray[np.bool_]
    """True where an entry is not zero, and so is sent."""
    entries: int
    """Entries of the whole tensor, including those outside a shared mask."""

    @staticmethod
    def of(name: str, flat: Tensor, entries: int) -> Piece:
        """Find the entries that are not zero."""
        return Piece(name, flat, (flat != 0).numpy(), entries)


class _Counts(NamedTuple):
    among: int
    sent: int

    def bits(self, width: int) -> float:
        """Bound the content from below, for values of `width` bits: random positions in the entropy code, or dense."""
        among, sent = self
        if not 0 < sent < among:
            return sent * width
        # Entropy of a random support: n H(k / n) bits.
        positions = -sent * math.log2(sent / among) - (among - sent) * math.log2(1 - sent / among)
        return min(positions + sent * width, among * width)


def together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group neighbours that take less space together than separately, estimated from their counts.

    Small tensors of about the same density share a header and the padding to whole bytes; a dense one stays alone.
    """
    run: list[Piece] = []
    before, entries = _Counts(0, 0), 0
    for piece in pieces:
        counts = _Counts(piece.flat.numel(), int(np.count_nonzero(piece.support)))
        both = _Counts(before.among + counts.among, before.sent + counts.sent)
        width = 8 * piece.flat.dtype.itemsize
        alike = bool(run) and run[0].flat.dtype == piece.flat.dtype
        few = entries + piece.entries <= MOST_TOGETHER
        if alike and few and both.bits(width) <= before.bits(width) + counts.bits(width) + HEADER_BITS:
            run.append(piece)
            before, entries = both, entries + piece.entries
        else:
            if run:
                yield run
            run, before, entries = [piece], counts, piece.entries
    if run:
        yield run


def pack(run: list[Piece], deflate: bool) -> tuple[TensorEntry, list[numbers.Bytes | numbers.Integers]]:
    """Encode tensors sparse or dense, whichever is smaller."""
    flat = run[0].flat if len(run) == 1 else torch.cat([piece.flat for piece in run])
    support = run[0].support if len(run) == 1 else np.concatenate([piece.support for piece in run])
    among, width = flat.numel(), flat.dtype.itemsize
    positions = np.flatnonzero(support)
    low, unary, coded = None, 0, []
    if len(positions) < among:
        code = numbers.code(support, positions)
        # Both ways send the values that are not zero: a sparse tensor pays for positions, a dense one for its zeros.
        if numbers.size(len(positions), code.low, code.unary) < (among - len(positions)) * width:
            low, unary, coded = code
    # Adding 0.0 turns -0.0 into 0.0: zeros of a dense tensor have no sign either.
    bits = numbers.as_integers(flat + 0.0) if low is None else numbers.as_integers(flat)[positions]
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
    """Rebuild tensors from bytes of a checked length."""
    width = entry.values.itemsize
    if entry.planes:
        bits = numbers.inflate(content, entry.sent, width, entry.planes)
    else:
        bits = np.frombuffer(content, f"<i{width}")
    if bits is None:
        raise damaged("has values that do not inflate to their number", entry.location)
    if finite and not numbers.all_finite(bits, entry.values):
        raise WireError(Problem(entry.location, "has values that are not finite", "leave this update out"))
    positions = within
    if entry.low is not None:
        positions = numbers.read(np.frombuffer(coded, np.uint8), entry.among, entry.sent, entry.low, entry.unary)
        if positions is None:
            raise damaged("has positions that are out of order or out of bounds", entry.location)
        if bool(((bits << 1) == 0).any()):  # the shift drops the sign bit, so -0.0 counts as zero
            raise damaged("lists zeros as entries that were sent", entry.location)
        positions = within[positions] if within is not None else positions
    sizes = [math.prod(layout[name].shape) for name in entry.names]
    if positions is None:
        stored = bits.copy()
    else:
        stored = np.zeros(sum(sizes), bits.dtype)
        stored[positions] = bits
    parts = numbers.as_values(stored, entry.values).split(sizes)
    # safetensors refuses to save tensors that share memory.
    owned = parts if len(parts) == 1 else [part.clone() for part in parts]
    described = ((name, layout[name]) for name in entry.names)
    return {name: part.reshape(shape).to(dtype) for (name, (shape, dtype)), part in zip(described, owned, strict=True)}


__all__ = ["Header", "Layout", "WireError", "decode", "encode", "encoded_size", "fits", "inspect"]

CHECKSUM = 4
"""Bytes of the checksum at the end."""
WORKING_BYTES = 48
"""Bytes per entry of the largest tensor that decoding needs in addition to its result, in the worst case."""
NonFinite = Literal["refuse", "keep"]
"""Treatment of values that are not finite."""
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

    Values wider than `values` are rounded to it. The receiver has the same `mask`: positions are coded within it, and
    take no bytes where all of it is sent. A nonzero entry outside it is refused. `deflate` makes values a sixth smaller
    (bfloat16 a third, signs of one magnitude twenty times) and doubles the time.

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
    head = header.write(Layout.of(update), entries, digest(mask) if mask is not None else b"", deflate)
    parts = [memoryview(head), *content]
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
    """Convert each tensor for the wire; add invalid values to `problems`."""
    for name in sorted(update):
        flat = update[name].detach().reshape(-1)
        if mask is not None:
            inside = mask[name].detach().reshape(-1).bool()
            if outside := int(flat[~inside].count_nonzero()):
                remedy = "apply the mask before encoding"
                problems.append(Problem(location_of(name), f"has {outside} entries outside the shared mask", remedy))
            flat = flat[inside]
        flat = flat.to("cpu", on_wire(update[name].dtype, values))
        if nonfinite == "refuse" and not numbers.all_finite(numbers.as_integers(flat), flat.dtype):
            dtype = str(flat.dtype).removeprefix("torch.")
            problem = f"{int((~flat.isfinite()).sum())} values are not finite in {dtype}"
            remedy = "find out why, send wider values, or say nonfinite='keep' on both sides"
            problems.append(Problem(location_of(name), problem, remedy))
        yield Piece.of(name, flat, update[name].numel())


def inspect(data: bytes | bytearray | memoryview, layout: Layout) -> Header:
    """Read the header of an encoded update of this layout, after checking its length and checksum.

    >>> update = {"w": torch.eye(16)}
    >>> inspect(encode(update), Layout.of(update)).entries[0].sent
    16
    """
    view = memoryview(data).cast("B")
    body = view[:-CHECKSUM]
    if (stated := header.stated(body)) != layout.digest():
        _refuse_damage(view)
        problem = f"is of the layout with the digest {stated.hex()}, expected {layout.digest().hex()}"
        remedy = "hold one model on both sides, and train the same parameters of it"
        raise WireError(Problem("update", problem, remedy))
    head = header.read(body, layout)
    if head.end != len(body):
        raise damaged(f"has {len(view)} bytes, {head.end + CHECKSUM} according to its header")
    _refuse_damage(view)
    return head


def fits(data: bytes | bytearray | memoryview, layout: Layout) -> bool:
    """Return whether an encoded update states the digest of this layout.

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
    """Decode an update of this layout, in its order and dtypes; raise `WireError` for any other bytes."""
    refuse([*_NONFINITE.problems("nonfinite", nonfinite), *_not_its_mask(layout, mask)])
    head = inspect(data, layout)
    if head.mask != (digest(mask) if mask is not None else b""):
        remedy = "give `mask` the tensors that the sender used, or none on both sides"
        raise WireError(Problem("mask", "is not the one that the update was encoded with", remedy))
    view, offset = memoryview(data).cast("B"), head.start
    sent: Tensors = {}
    for entry in head.entries:
        coded = view[offset : (offset := offset + entry.position_bytes)]
        bits = view[offset : (offset := offset + entry.value_bytes)]
        within = None
        if mask is not None:
            within = np.flatnonzero(
                torch.cat([mask[name].detach().reshape(-1).bool().cpu() for name in entry.names]).numpy()
            )
            if len(within) != entry.among:
                raise damaged(f"has {entry.among} entries in a mask of {len(within)}", entry.location)
        sent |= unpack(entry, layout, coded, bits, within, nonfinite == "refuse")
    return {name: sent[name] for name in layout}


def encoded_size(update: Mapping[str, Tensor], messages: Mapping[str, Tensor] | None = None) -> int:
    """Count the bytes of an update as `encode` writes it, header included: float32, deflated.

    Public messages of the round that are masks of the parameters (`...mask.<parameter>`) are shared masks, if every
    nonzero entry lies within them.

    >>> encoded_size({"w": torch.eye(32)}) < encoded_size({"w": torch.ones(32, 32).cumsum(1)}) < 4 * 32 * 32
    True
    """
    mask = _public_mask(update, messages or {})
    return len(encode(update, values=torch.float32, mask=mask, nonfinite="keep", deflate=True))


def _public_mask(update: Mapping[str, Tensor], messages: Mapping[str, Tensor]) -> Tensors | None:
    masks = {name: mask for name in update for key, mask in messages.items() if f".{key}".endswith(f".mask.{name}")}
    if not update or masks.keys() != update.keys():
        return None
    return masks if all(not value[~masks[name].bool()].any() for name, value in update.items()) else None


def digest(mask: Mapping[str, Tensor]) -> bytes:
    """Digest a mask to detect a different one: BLAKE2b of every name and packed bitmap, sorted by name."""
    hasher = blake2b(digest_size=DIGEST)
    for name in sorted(mask):
        hasher.update(name.encode())
        hasher.update(np.packbits(mask[name].detach().reshape(-1).bool().cpu().numpy()).data)
    return hasher.digest()


def _not_encodable(
    update: Mapping[str, Tensor], values: torch.dtype | None, mask: Mapping[str, Tensor] | None
) -> list[Problem]:
    """List tensors and settings that the encoding cannot represent."""
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    problems = [
        Problem(location_of(name), f"is of {value.dtype}", f"send one of {known}")
        for name, value in update.items()
        if value.dtype not in DTYPES
    ]
    if values is not None and values not in DTYPES:
        problems.append(Problem("values", f"is {values}", f"choose one of {known}"))
    problems += [
        Problem(location_of(name), f"is {tuple(value.shape)}", f"send at most {MOST_ENTRIES} entries")
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
