"""Rice code of positions against a bit-by-bit writer, and its parameter against all others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.wire import positions_and_values


def bit_by_bit(positions: list[int], low: int) -> tuple[list[str], str]:
    """Write gaps one by one: the planes of lower bits, and the unary rest."""
    gaps = [place - before - 1 for place, before in zip(positions, [-1, *positions], strict=False)]
    planes = ["".join(str(gap >> bit & 1) for gap in gaps) for bit in range(low)]
    return planes, "".join("0" * (gap >> low) + "1" for gap in gaps)


def packed(bits: str) -> bytes:
    return bytes(int(bits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(bits), 8))


def coded_positions(positions: list[int], entries: int) -> positions_and_values.Coded:
    support = np.zeros(entries, dtype=np.bool_)
    support[positions] = True
    return positions_and_values.code(support, np.flatnonzero(support))


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=80))))
def test_code_is_the_shortest_and_reads_back(case: tuple[int, set[int]]) -> None:
    entries, positions = case[0], sorted(case[1])
    coded = coded_positions(positions, entries)
    content = b"".join(part.tobytes() for part in coded.content)
    planes, unary = bit_by_bit(positions, coded.low)
    assert content == b"".join(packed(bits) for bits in [*planes, unary])
    assert len(unary) == coded.unary <= positions_and_values.longest(entries, len(positions), coded.low)
    assert len(content) == positions_and_values.size(len(positions), coded.low, coded.unary)
    for low in range(12):
        planes, other = bit_by_bit(positions, low)
        assert len(content) <= sum(len(packed(bits)) for bits in [*planes, other])
    read = positions_and_values.read(np.frombuffer(content, np.uint8), entries, len(positions), coded.low, coded.unary)
    assert read is not None
    assert read.tolist() == positions


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.1, 0.25, 0.38, 0.5])
def test_code_random_positions_stay_near_their_entropy(density: float, generator: torch.Generator) -> None:
    entries = 1_000_000
    support = (torch.rand(entries, generator=generator) < density).numpy()
    positions = np.flatnonzero(support)
    d = len(positions) / entries
    entropy = -entries * (d * np.log2(d) + (1 - d) * np.log2(1 - d))
    coded = positions_and_values.code(support, positions)
    assert entropy < 8 * positions_and_values.size(len(positions), coded.low, coded.unary) < 1.05 * entropy


@pytest.mark.parametrize(
    ("lower", "ends", "unary", "entries", "valid"),
    [
        pytest.param("01", "001001", 6, 100, True, id="valid"),
        pytest.param("01", "001001", 6, 11, True, id="last position fits"),
        pytest.param("01", "001001", 6, 10, False, id="position out of bounds"),
        pytest.param("011", "001001", 6, 100, False, id="padding of the lower bits"),
        pytest.param("01", "0010011", 6, 100, False, id="padding of the bitmap"),
        pytest.param("01", "001000", 6, 100, False, id="too few ends"),
        pytest.param("01", "0010010", 7, 100, False, id="trailing zero"),
        pytest.param("01", "011001", 6, 100, False, id="too many ends"),
    ],
)
def test_read_bits_that_code_never_writes_returns_none(
    lower: str, ends: str, unary: int, entries: int, valid: bool
) -> None:
    content = np.frombuffer(packed(lower) + packed(ends), np.uint8)
    assert (positions_and_values.read(content, entries, count=2, low=1, unary=unary) is not None) is valid
