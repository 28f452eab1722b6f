"""Decoding trusts nothing: each kind of damage is refused by name, and mutated inputs never do anything else."""

import tracemalloc
import zlib
from typing import Any

import pytest
import torch
from benchmarks.wire_fuzz import fuzz, sealed, traced_memory

from gradveil.wire import header
from gradveil.wire.codec import WORKING_BYTES, Layout, WireError, decode, digest, encode, inspect
from gradveil.wire.header import Described

UPDATE = {"w": torch.tensor([0.0] * 40 + [1.5, 0.0, -2.0] + [0.0] * 20), "b": torch.ones(3)}
LAYOUT = Layout.of(UPDATE)


def refused(data: bytes, match: str, **arguments: Any) -> None:
    with pytest.raises(WireError, match=match) as caught:
        decode(data, LAYOUT, **arguments)
    assert all(problem.remedy for problem in caught.value.problems)


def rewritten(
    tensor: str = "w",
    content: bytes | None = None,
    **changes: Any,
) -> bytes:
    """Encode again with other numbers in the header of one tensor, sealed with the right checksum."""
    data = encode(UPDATE)
    result = inspect(data, LAYOUT)
    entries = [entry._replace(**changes) if tensor in entry.names else entry for entry in result.entries]
    body = data[result.start : -4] if content is None else content
    return sealed(header.write(LAYOUT, entries, result.mask, result.deflated) + body)


def one(
    entry: header.TensorEntry, shape: tuple[int, ...], dtype: torch.dtype, mask: Any = None
) -> tuple[bytes, Layout]:
    """Write the header of one tensor, and the layout that it has."""
    layout = Layout({"w": Described(shape, dtype)})
    return header.write(layout, [entry], digest(mask) if mask else b"", bool(entry.planes)), layout


def test_decode_detects_every_flipped_bit_and_truncation() -> None:
    data = encode(UPDATE)
    for position in range(8 * len(data)):
        turned = bytearray(data)
        turned[position // 8] ^= 1 << position % 8
        with pytest.raises(WireError):
            decode(turned, LAYOUT)
    for length in range(len(data) - 4):
        with pytest.raises(WireError):
            decode(data[:length], LAYOUT)
        with pytest.raises(WireError):
            decode(sealed(data[:length]), LAYOUT)


def test_decode_names_each_kind_of_damage() -> None:
    data = encode(UPDATE)
    body = data[:-4]
    assert [entry.names for entry in inspect(data, LAYOUT).entries] == [("b", "w")]
    refused(b"", "does not begin like")
    refused(b"PK" + data[2:], "does not begin like")
    for version in (b"\x01", b"\x03"):
        refused(sealed(body[:4] + version + body[5:]), f"version {version[0]} of the encoding, not 2.*same version")
    refused(sealed(body[:5] + b"\x04" + body[6:]), "unknown flags 0x4")
    refused(body + b"abcd", "another checksum")
    refused(body[:6] + b"\0" + body[7:] + data[-4:], "another checksum")
    refused(sealed(body[:6] + b"\0" + body[7:]), f"expected {LAYOUT.digest().hex()}.*hold one model")
    refused(sealed(body + b"\0"), f"has {len(data) + 1} bytes, {len(data)} according to its header")
    refused(sealed(body[:14] + b"\xff" * 6), "more than 35 bits")
    refused(sealed(body[:14] + b"\x82\0" + body[15:]), "not in its shortest form")
    refused(sealed(body[:14] + b"\0" + body[15:]), "codes no tensor where some are left")
    refused(sealed(body[:14] + b"\x03" + body[15:]), "number 3 where at most 2")
    refused(sealed(body[:15] + b"\xc0" + body[16:]), "wider than the tensor")
    refused(sealed(body[:15] + b"\x09" + body[16:]), "update.b and 1 more: has the number 9 where at most 7")
    refused(sealed(body[:14] + b"\x01\x04" + body[16:]), "update.b: has the number 4 where at most 2")
    refused(sealed(body[:10]), "ends within its header")
    refused(sealed(body[:16]), "ends within its header")


def test_decode_with_too_many_tensors_together_raises() -> None:
    layout = Layout({name: Described((1 << 15,), torch.float32) for name in "abc"})
    entry = header.TensorEntry(("a", "b", "c"), torch.float32, 3 << 15, 0, 0, 0)
    data = sealed(header.write(layout, [entry], b"", False))
    with pytest.raises(WireError, match=r"update\.a and 2 more: codes 98304 entries together, at most 65536"):
        decode(data, layout)
    two = [entry._replace(names=("a", "b"), among=2 << 15), entry._replace(names=("c",), among=1 << 15)]
    assert not any(value.any() for value in decode(sealed(header.write(layout, two, b"", False)), layout).values())


def test_decode_with_an_impossible_dtype_raises() -> None:
    layout = Layout({"n": Described((3,), torch.int64)})
    entry = header.TensorEntry(("n",), torch.float32, 3, 0, 0, 0)
    with pytest.raises(WireError, match=r"update\.n: has values that are wider"):
        decode(sealed(header.write(layout, [entry], b"", False)), layout)


def test_decode_with_inconsistent_numbers_raises() -> None:
    result = inspect(encode(UPDATE), LAYOUT)
    entry = result.entries[0]
    most = entry.among.bit_length()
    refused(rewritten(sent=entry.among + 1), f"{entry.among + 1} where at most {entry.among}")
    refused(rewritten(low=most + 1), f"number {most + 2} where at most {most}")
    refused(rewritten(unary=1 << 20), "number 1048576 where")
    refused(rewritten(unary=entry.unary + 1), "out of order or out of bounds")
    content = bytes(entry.position_bytes) + encode(UPDATE)[result.start + entry.position_bytes : -4]
    refused(rewritten(content=content), "out of order or out of bounds")


def test_decode_with_zeros_among_sent_entries_raises() -> None:
    data = encode(UPDATE)
    result = inspect(data, LAYOUT)
    position = result.start + result.entries[0].position_bytes
    for zero in (b"\0\0\0\0", b"\0\0\0\x80"):
        refused(sealed(data[:position] + zero + data[position + 4 : -4]), "lists zeros")


def test_decode_planes_must_inflate_to_their_length() -> None:
    update = {"w": torch.full((5000,), 0.37)}
    data = encode(update, deflate=True)
    result = inspect(data, Layout.of(update))
    entry = result.entries[0]
    assert all(entry.planes)
    for count in (4999, 5001, 500):
        message, layout = one(entry._replace(among=count, sent=count), (count,), torch.float32)
        with pytest.raises(WireError, match="do not inflate to their number"):
            decode(sealed(message + data[result.start : -4]), layout)
    longer, layout = one(entry._replace(planes=(entry.planes[0] + 1, *entry.planes[1:])), (5000,), torch.float32)
    first = data[result.start : result.start + entry.planes[0]]
    rest = data[result.start + entry.planes[0] : -4]
    for body in (first + b"\0" + rest, b"\xff" * (len(first) + 1) + rest):
        with pytest.raises(WireError, match="do not inflate"):
            decode(sealed(longer + body), layout)


def test_decode_with_an_unfinished_plane_raises() -> None:
    raw = bytes(5000)
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    open_ended = stream.compress(raw) + stream.flush(zlib.Z_SYNC_FLUSH)
    entry = header.TensorEntry(("w",), torch.float16, 5000, 5000, None, 0, (len(open_ended), 0))
    for planes, ends in ((open_ended, False), (open_ended + stream.flush(), True)):
        message, layout = one(entry._replace(planes=(len(planes), 0)), (5000,), torch.float16)
        data = sealed(message + planes + raw)
        if ends:
            assert not decode(data, layout)["w"].any()
        else:
            with pytest.raises(WireError, match="do not inflate"):
                decode(data, layout)


def test_decode_mask_of_another_size_raises() -> None:
    mask = {"w": torch.arange(8) < 4}
    for among in (3, 4, 5):
        entry = header.TensorEntry(("w",), torch.float32, among, among, None, 0)
        message, layout = one(entry, (8,), torch.float32, mask)
        data = sealed(message + bytes(4 * among))
        if among == 4:
            assert not decode(data, layout, mask=mask)["w"].any()
        else:
            with pytest.raises(WireError, match=f"has {among} entries in a mask of 4"):
                decode(data, layout, mask=mask)


@pytest.mark.parametrize("low", [0, 1, 16])
def test_decode_memory_is_bounded_for_the_most_wasteful_code(low: int) -> None:
    entries = 1 << 17
    entry = header.TensorEntry(("w",), torch.float64, entries, entries, low, entries)
    content = bytes(low * entries // 8) + b"\xff" * (entries // 8) + torch.ones(entries).double().numpy().tobytes()
    for mask in (None, {"w": torch.ones(entries, dtype=torch.bool)}):
        message, layout = one(entry, (entries,), torch.float64, mask)
        data = sealed(message + content)
        with traced_memory():
            before = tracemalloc.get_traced_memory()[0]
            arrived = decode(data, layout, mask=mask)
            peak = tracemalloc.get_traced_memory()[1] - before
        assert bool((arrived["w"] == 1).all())
        assert 8 * entries < peak < (8 + WORKING_BYTES) * entries


def test_inspect_many_tensors_takes_little_memory() -> None:
    """Each tensor is coded for itself, which takes two bytes where a sender would have coded all together."""
    layout = Layout({f"{i:x}": Described((), torch.float32) for i in range(1 << 13)})
    entries = [header.TensorEntry((name,), torch.float32, 1, 1, None, 0) for name in sorted(layout)]
    data = sealed(header.write(layout, entries, b"", False) + bytes(4 * len(layout)))
    with traced_memory():
        before = tracemalloc.get_traced_memory()[0]
        inspect(data, layout)
        peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < 1000 * len(layout)


def test_wire_error_escapes_untrusted_names() -> None:
    strange = Layout.of({"\x1b[31m" + "x" * 500: torch.zeros(1)})
    problem = str(WireError(LAYOUT.differences(strange)))
    assert "\x1b" not in problem
    assert len(problem) < 1000


def test_decode_of_mutated_bytes_raises_or_stays_within_memory() -> None:
    ended, worst = fuzz(4_000, 1)
    assert sum(ended.values()) == 4_000
    assert ended["decoded"] > 100
    assert len(ended) > 15
    assert worst <= 1


def test_mutation_test_catches_a_lenient_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.wire.positions_and_values.all_finite", lambda bits, dtype: True)
    with pytest.raises(AssertionError, match="not finite came through"):
        fuzz(10_000, 1)
