"""Decoding trusts nothing: each kind of damage is refused by name, and mutated inputs never do anything else."""

import tracemalloc
import zlib
from typing import Any

import pytest
import torch
from benchmarks.wire_fuzz import fuzz, sealed

from gradveil.federated import header
from gradveil.federated.wire import WORKING_BYTES, Layout, WireError, decode, digest, encode, inspect

UPDATE = {"w": torch.tensor([0.0] * 40 + [1.5, 0.0, -2.0] + [0.0] * 20), "b": torch.ones(3)}
LAYOUT = Layout.of(UPDATE)


def refused(data: bytes, match: str, **arguments: Any) -> None:
    with pytest.raises(WireError, match=match) as caught:
        decode(data, LAYOUT, **arguments)
    assert all(problem.remedy for problem in caught.value.problems)


def rewritten(tensor: str = "w", content: bytes | None = None, **changes: Any) -> bytes:
    """Encode again with other numbers in the header of one tensor, sealed with the right checksum."""
    data = encode(UPDATE)
    found = inspect(data)
    entries = [entry._replace(**changes) if entry.name == tensor else entry for entry in found.entries]
    body = data[found.start : -4] if content is None else content
    return sealed(header.write(entries, found.mask, found.deflated) + body)


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = encode(UPDATE)
    for place in range(8 * len(data)):
        turned = bytearray(data)
        turned[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError):
            decode(turned, LAYOUT)
    for length in range(len(data) - 4):
        with pytest.raises(WireError):
            decode(data[:length], LAYOUT)
        with pytest.raises(WireError):
            decode(sealed(data[:length]), LAYOUT)


def test_each_damage_has_its_name() -> None:
    data = encode(UPDATE)
    body = data[:-4]
    refused(b"", "does not begin like")
    refused(b"PK" + data[2:], "does not begin like")
    refused(sealed(body[:4] + b"\x02" + body[5:]), "version 2 of the encoding, not 1.*same version")
    refused(sealed(body[:5] + b"\x04" + body[6:]), "unknown flags 0x4")
    refused(body + b"abcd", "another checksum")
    refused(sealed(body + b"\0"), f"has {len(data) + 1} bytes, {len(data)} according to its header")
    refused(sealed(body[:6] + b"\xff" * 6), "more than 35 bits")
    refused(sealed(body[:6] + b"\x82\0" + body[7:]), "not in its shortest form")
    refused(sealed(body[:6] + b"\xff\x7f" + body[7:]), "number 16383 where at most 8192")
    refused(sealed(body[:8] + b"\xff" + body[9:]), "not UTF-8")
    refused(sealed(body[:9] + b"\x0f" + body[10:]), "unknown dtypes 0xf")
    refused(sealed(body[:9] + b"\x01" + body[10:]), "wider than the tensor")
    refused(sealed(body[:20]), "ends within its header")


def test_numbers_that_do_not_fit_each_other_are_refused() -> None:
    entry = inspect(encode(UPDATE)).entries[0]
    refused(rewritten("b", name="w"), "names a tensor twice")
    refused(rewritten(kept=64), "number 64 where at most 63")
    refused(rewritten(low=7), "number 8 where at most 6")
    refused(rewritten(unary=1 << 20), "number 1048576 where")
    refused(rewritten(described=header.Described((1 << 20, 1 << 20), torch.float32)), "more than 2147483648 entries")
    refused(rewritten(described=header.Described((64,), torch.float32)), r"is float32 \[64\], expected float32 \[63\]")
    refused(rewritten(unary=entry.unary + 1), "out of order or out of bounds")
    zero = bytes(entry.position_bytes)
    refused(rewritten(content=zero + encode(UPDATE)[-20 - 4 : -4]), "out of order or out of bounds")


def test_zeros_among_the_entries_sent_are_refused() -> None:
    data = encode(UPDATE)
    found = inspect(data)
    place = found.start + found.entries[0].position_bytes
    for zero in (b"\0\0\0\0", b"\0\0\0\x80"):
        refused(sealed(data[:place] + zero + data[place + 4 : -4]), "lists zeros")


def test_planes_inflate_to_exactly_their_number() -> None:
    update = {"w": torch.full((5000,), 0.37)}
    data = encode(update, deflate=True)
    found = inspect(data)
    entry = found.entries[0]
    assert all(entry.planes)
    for count in (4999, 5001, 500):
        described = header.Described((count,), torch.float32)
        changed = [entry._replace(described=described, among=count, kept=count)]
        body = sealed(header.write(changed, b"", True) + data[found.start : -4])
        with pytest.raises(WireError, match="do not inflate to their number"):
            decode(body, Layout({"w": described}))
    longer = [entry._replace(planes=(entry.planes[0] + 1, *entry.planes[1:]))]
    first = data[found.start : found.start + entry.planes[0]]
    rest = data[found.start + entry.planes[0] : -4]
    for body in (first + b"\0" + rest, b"\xff" * (len(first) + 1) + rest):
        with pytest.raises(WireError, match="do not inflate"):
            decode(sealed(header.write(longer, b"", True) + body), Layout.of(update))


def test_a_plane_without_its_end_is_refused() -> None:
    raw = bytes(5000)
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    open_ended = stream.compress(raw) + stream.flush(zlib.Z_SYNC_FLUSH)
    described = header.Described((5000,), torch.float16)
    entry = header.Entry("w", described, torch.float16, 5000, 5000, None, 0, (len(open_ended), 0))
    for planes, ends in ((open_ended, False), (open_ended + stream.flush(), True)):
        whole = entry._replace(planes=(len(planes), 0))
        data = sealed(header.write([whole], b"", True) + planes + raw)
        if ends:
            assert not decode(data, Layout({"w": described}))["w"].any()
        else:
            with pytest.raises(WireError, match="do not inflate"):
                decode(data, Layout({"w": described}))


def test_a_mask_has_as_many_entries_as_the_header_says() -> None:
    mask = {"w": torch.arange(8) < 4}
    described = header.Described((8,), torch.float32)
    for among in (3, 4, 5):
        entry = header.Entry("w", described, torch.float32, among, among, None, 0)
        data = sealed(header.write([entry], digest(mask), False) + bytes(4 * among))
        if among == 4:
            assert not decode(data, Layout({"w": described}), mask=mask)["w"].any()
        else:
            with pytest.raises(WireError, match=f"has {among} entries in a mask of 4"):
                decode(data, Layout({"w": described}), mask=mask)


def test_a_few_bytes_cannot_claim_memory() -> None:
    claimed = header.Described((1 << 15, 1 << 16), torch.float32)
    entry = header.Entry("w", claimed, torch.float32, 1 << 31, 0, 0, 0)
    data = sealed(header.write([entry], b"", False))
    assert len(data) < 40
    assert inspect(data).layout["w"] == claimed
    refused(data, "expected")


@pytest.mark.parametrize("low", [0, 1, 16])
def test_working_memory_is_bounded_for_the_most_wasteful_code(low: int) -> None:
    entries = 1 << 17
    described = header.Described((entries,), torch.float64)
    entry = header.Entry("w", described, torch.float64, entries, entries, low, entries)
    content = bytes(low * entries // 8) + b"\xff" * (entries // 8) + torch.ones(entries).double().numpy().tobytes()
    for mask in (None, {"w": torch.ones(entries, dtype=torch.bool)}):
        data = sealed(header.write([entry], digest(mask) if mask else b"", False) + content)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        arrived = decode(data, Layout({"w": described}), mask=mask)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert bool((arrived["w"] == 1).all())
        assert 8 * entries < peak < (8 + WORKING_BYTES) * entries


def test_a_header_of_many_tensors_takes_little_memory() -> None:
    update = {f"{i:x}": torch.ones(()) for i in range(header.MOST_TENSORS)}
    data = encode(update)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(WireError, match="differs in"):
        decode(data, LAYOUT)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 200 * len(data)


def test_a_strangers_name_does_no_harm_in_a_log() -> None:
    data = encode({"\x1b[31m" + "x" * 500: torch.zeros(1)})
    with pytest.raises(WireError) as caught:
        decode(data, LAYOUT)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_mutated_inputs_are_refused_or_decoded_within_the_bound() -> None:
    ended, worst = fuzz(10_000, seed=1)
    assert sum(ended.values()) == 10_000
    assert ended["decoded"] > 500
    assert len(ended) > 15
    assert worst <= 1


def test_a_decoder_that_lets_damage_through_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.federated.values.all_finite", lambda bits, dtype: True)
    with pytest.raises(AssertionError, match="not finite came through"):
        fuzz(10_000, seed=1)
