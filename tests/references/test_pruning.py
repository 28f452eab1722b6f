"""Pruning against a stable sort in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Dual, Magnitude, chain
from gradveil.defences.compression import Quantise
from gradveil.defences.pruning import LARGE, ends_mask, ends_mask_by_order, without_ends

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
def test_large_rows_take_thresholds_and_agree(bottom: int, top: int, step: float | None):
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


ENDS = [(0, 0), (1, 0), (0, 1), (15_000, 900), (19_999, 1), (20_000, 0), (0, 20_000), (12_345, 0), (0, 6_000)]


def cut_by_mask(value: torch.Tensor, bottom: int, top: int) -> torch.Tensor:
    """What an attacker computes: somebody differentiates, so the mask is made."""
    return without_ends(value.clone().requires_grad_(), bottom, top).detach()


@pytest.mark.parametrize("step", [None, 0.02, 0.5])
@pytest.mark.parametrize(("bottom", "top"), ENDS)
def test_a_plain_tensor_is_cut_like_one_that_is_differentiated(bottom: int, top: int, step: float | None):
    value = torch.randn(100, 200, generator=Key(4).generator())
    value = (value / step).round() * step if step else value
    for tensor, ends in ((value, (bottom, top)), (value.flatten()[:300], (bottom * 3 // 200, top * 3 // 200))):
        sent = without_ends(tensor, *ends)
        assert torch.equal(sent, cut_by_mask(tensor, *ends))
        assert torch.equal(sent, kept(tensor.numpy(), *ends))


@pytest.mark.parametrize("stride", [3, 9, 5, 61])
def test_a_misleading_sample_changes_nothing(stride: int):
    """Every entry that the sample sees is small, and no other."""
    value = torch.randn(200_000, generator=Key(5).generator()) + 10
    value[::stride] /= 1000
    for ends in ((100_000, 10_000), (1, 199_998), (190_000, 0)):
        assert torch.equal(without_ends(value, *ends), kept(value.numpy(), *ends))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [100, 20_000])
def test_a_diverged_tensor_is_not_made_finite(size: int, odd: float):
    value = torch.randn(size, generator=Key(6).generator())
    value[3:5] = odd
    for ends in ((size // 2, size // 4), (size - 1, 0), (0, 1)):
        sent, expected = (cut(value, *ends) for cut in (without_ends, cut_by_mask))
        assert not expected.isfinite().all()
        assert torch.equal(sent.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("defence", [Dual(), Magnitude(0.8), Magnitude(0.8, "global")])
def test_a_client_sends_what_an_attacker_simulates(defence: Dual | Magnitude):
    generator = Key(7).generator()
    g = {"large": torch.randn(90, 80, generator=generator), "small": torch.randn(12, generator=generator)}
    sent, _ = defence.apply(g, {}, {}, CONTEXT)
    simulated, _ = defence.apply({name: value.clone().requires_grad_() for name, value in g.items()}, {}, {}, CONTEXT)
    batched = torch.vmap(lambda *values: defence.apply(dict(zip(g, values, strict=True)), {}, {}, CONTEXT)[0])(
        *(value.unsqueeze(0) for value in g.values())
    )
    for name, value in sent.items():
        assert torch.equal(value, simulated[name]), name
        assert torch.equal(value, batched[name][0]), name


PRUNINGS = [Magnitude(0.5), Magnitude(0.5, "global"), Dual(0.05, 0.75), Dual(0.2, 0.6)]


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_what_was_sent_bounds_what_was_not(pruning):
    """The true update breaks no order; another one shows, entry by entry, by how much it does."""
    g = update()
    sent, _ = pruning.apply(g, {}, {}, CONTEXT)
    seen = pruning.evidence(sent)
    again, _ = pruning.apply(g, {}, seen, CONTEXT)
    assert all(torch.equal(again[name], sent[name]) for name in g)
    other = {name: 1.5 * value.flip(0) for name, value in g.items()}
    found, _ = pruning.apply(other, {}, seen, CONTEXT)
    together = [abs(v) for value in sent.values() for v in value.flatten().tolist() if v]
    broken = 0
    for name, value in other.items():
        own = together if pruning == Magnitude(0.5, "global") else [abs(v) for v in sent[name].flatten().tolist() if v]
        smallest, largest = min(own), max(own)
        rows = torch.stack([part.flatten() for part in (sent[name], value, found[name])], 1)
        for was, would, is_now in rows.tolist():
            size = abs(would)
            over = max(0.0, min(size - smallest, largest - size if isinstance(pruning, Dual) else size))
            broken += not was and over > 0
            assert is_now == pytest.approx(would if was else (over if would > 0 else -over), abs=1e-12)
    assert broken > 10


def test_a_layer_of_which_nothing_was_sent_bounds_nothing():
    pruning, nothing = Dual(0.2, 0.6), {"w": torch.zeros(5)}
    seen = pruning.evidence(nothing)
    found, _ = pruning.apply({"w": torch.arange(5.0)}, {}, seen, CONTEXT)
    assert torch.equal(found["w"], nothing["w"])


def test_values_that_a_later_stage_changed_bound_nothing():
    g = update()
    both = chain(prune=Magnitude(0.5), quantise=Quantise(8))
    noise = {f"quantise.{name}": torch.full_like(value, 0.5) for name, value in g.items()}
    sent, _ = both.apply(g, {}, noise, CONTEXT)
    kinds = {name.split(".")[1] for name in both.evidence(sent)}
    assert "mask" in kinds
    assert "border" not in kinds
