"""Pruning against a stable sort in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Dual, Magnitude
from gradveil.defences.selection import LARGE, ends_mask, ends_mask_by_order

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
SHAPES = {"conv.weight": (6, 5, 3, 3), "conv.bias": (7,), "one": (1,), "head": (40, 25)}


def update(step: float | None = None, dtype: torch.dtype = torch.float64):
    """Random tensors; with a step they are rounded to its multiples, so that many entries are equal."""
    drawn = {
        name: torch.randn(shape, generator=Key(0, (name,)).generator(), dtype=dtype) for name, shape in SHAPES.items()
    }
    return {name: (value / step).round() * step if step else value for name, value in drawn.items()}


def removed_by_sorting(value: np.ndarray, bottom: int, top: int) -> np.ndarray:
    order = np.argsort(np.abs(value), axis=None, kind="stable")
    removed = np.zeros(value.size, dtype=bool)
    removed[order[:bottom]] = True
    removed[order[value.size - top :]] = True
    return removed.reshape(value.shape)


def kept(value: np.ndarray, bottom: int, top: int) -> torch.Tensor:
    return torch.from_numpy(np.where(removed_by_sorting(value, bottom, top), 0.0, value))


@pytest.mark.parametrize("step", [None, 0.5])
@pytest.mark.parametrize(("top", "bottom"), [(0.05, 0.75), (0.0, 0.5), (0.3, 0.0), (0.29, 0.7), (0.0, 0.99)])
def test_dual_is_a_sort_of_each_layer(top: float, bottom: float, step: float | None):
    g = update(step)
    sent, _ = Dual(top, bottom).apply(g, {}, {}, CONTEXT)
    for name, value in g.items():
        size = value.numel()
        counts = round(bottom * 100) * size // 100, round(top * 100) * size // 100
        torch.testing.assert_close(sent[name], kept(value.numpy(), *counts), rtol=0, atol=0)


@pytest.mark.parametrize("step", [None, 0.5])
@pytest.mark.parametrize("ratio", [0.0, 0.29, 0.5, 0.9, 0.99])
def test_magnitude_is_a_sort_of_each_layer_or_of_all(ratio: float, step: float | None):
    g = update(step)
    sent, _ = Magnitude(ratio).apply(g, {}, {}, CONTEXT)
    for name, value in g.items():
        expected = kept(value.numpy(), round(ratio * 100) * value.numel() // 100, 0)
        torch.testing.assert_close(sent[name], expected, rtol=0, atol=0)
    everything = np.concatenate([value.numpy().ravel() for value in g.values()])
    together, _ = Magnitude(ratio, "global").apply(g, {}, {}, CONTEXT)
    expected = kept(everything, round(ratio * 100) * everything.size // 100, 0)
    torch.testing.assert_close(torch.cat([v.flatten() for v in together.values()]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.7, 0.999])
@pytest.mark.parametrize("size", [1, 3, 100, 1000])
def test_exactly_the_share_is_removed_even_if_all_are_equal(ratio: float, size: int):
    sent, _ = Magnitude(ratio).apply({"w": torch.ones(size)}, {}, {}, CONTEXT)
    assert int((sent["w"] == 0).sum()) == round(ratio * 1000) * size // 1000
    assert sent["w"][-1] == 1


@given(
    values=st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.5]), min_size=1, max_size=30),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_ends_are_those_of_a_stable_sort(values: list[float], shares: tuple[float, float]):
    bottom = int(shares[0] * len(values))
    top = int(shares[1] * (len(values) - bottom))
    expected = torch.from_numpy(removed_by_sorting(np.array(values), bottom, top))
    assert torch.equal(ends_mask(torch.tensor(values), bottom, top), expected)


@pytest.mark.parametrize("step", [None, 0.02, 0.5])
@pytest.mark.parametrize(("bottom", "top"), [(0, 0), (1, 0), (0, 1), (15_000, 900), (19_999, 1), (12_345, 0)])
def test_large_rows_take_the_histogram_and_agree(bottom: int, top: int, step: float | None):
    size = 20_000
    assert size > LARGE
    rows = torch.randn(3, size, generator=Key(1).generator()).abs()
    rows = (rows / step).round() * step if step else rows
    marked = ends_mask(rows, bottom, top)
    for row, mask in zip(rows, marked, strict=True):
        assert torch.equal(mask, torch.from_numpy(removed_by_sorting(row.numpy(), bottom, top)))
    assert torch.equal(marked, ends_mask_by_order(rows, bottom, top))
    assert torch.equal(torch.vmap(lambda row: ends_mask(row, bottom, top), in_dims=1)(rows.T), marked)


def test_diverged_rows_do_not_stop_the_others():
    rows = torch.rand(2, 10_000, generator=Key(2).generator())
    rows[0, 3] = float("nan")
    marked = ends_mask(rows, 9000)
    assert torch.equal(marked[1], ends_mask_by_order(rows[1], 9000))
