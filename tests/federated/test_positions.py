"""Rice's code against a bit-by-bit writer, and its best parameter against all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.wire import positions_and_values


def written(places: list[int], low: int) -> tuple[list[str], str]:
    """Write gaps one by one: the planes of lower bits, and the unary rest."""
    gaps = [place - before - 1 for place, before in zip(places, [-1, *places], strict=False)]
    planes = ["".join(str(gap >> bit & 1) for gap in gaps) for bit in range(low)]
    return planes, "".join("0" * (gap >> low) + "1" for gap in gaps)


def packed(bits: str) -> bytes:
    return bytes(int(bits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(bits), 8))


def of(places: list[int], entries: int) -> positions_and_values.Coded:
    support = np.zeros(entries, dtype=np.bool_)
    support[places] = True
    return positions_and_values.code(support, np.flatnonzero(support))


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=80))))
def test_code_is_the_best_of_all_and_reads_back(case: tuple[int, set[int]]) -> None:
    entries, places = case[0], sorted(case[1])
    coded = of(places, entries)
    content = b"".join(part.tobytes() for part in coded.content)
    planes, unary = written(places, coded.low)
    assert content == b"".join(packed(bits) for bits in [*planes, unary])
    assert len(unary) == coded.unary <= positions_and_values.longest(entries, len(places), coded.low)
    assert len(content) == positions_and_values.size(len(places), coded.low, coded.unary)
    for low in range(12):
        planes, other = written(places, low)
        assert len(content) <= sum(len(packed(bits)) for bits in [*planes, other])
    read = positions_and_values.read(np.frombuffer(content, np.uint8), entries, len(places), coded.low, coded.unary)
    assert read is not None
    assert read.tolist() == places


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.1, 0.25, 0.38, 0.5])
def test_random_positions_take_little_more_than_their_entropy(density: float, generator: torch.Generator) -> None:
    entries = 1_000_000
    support = (torch.rand(entries, generator=generator) < density).numpy()
    places = np.flatnonzero(support)
    d = len(places) / entries
    entropy = -entries * (d * np.log2(d) + (1 - d) * np.log2(1 - d))
    coded = positions_and_values.code(support, places)
    assert entropy < 8 * positions_and_values.size(len(places), coded.low, coded.unary) < 1.05 * entropy


def damaged(content: bytes, kept: int, low: int, unary: int, entries: int = 100) -> bool:
    return positions_and_values.read(np.frombuffer(content, np.uint8), entries, kept, low, unary) is None


def test_bits_that_nobody_writes_are_noticed() -> None:
    good = packed("01") + packed("001001")
    assert not damaged(good, kept=2, low=1, unary=6)
    assert damaged(good, kept=2, low=1, unary=6, entries=10)
    assert not damaged(good, kept=2, low=1, unary=6, entries=11)
    assert damaged(packed("011") + packed("001001"), kept=2, low=1, unary=6)
    assert damaged(packed("01") + packed("0010011"), kept=2, low=1, unary=6)
    assert damaged(packed("01") + packed("001000"), kept=2, low=1, unary=6)
    assert damaged(packed("01") + packed("0010010"), kept=2, low=1, unary=7)
    assert damaged(packed("01") + packed("011001"), kept=2, low=1, unary=6)
