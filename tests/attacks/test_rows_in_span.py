"""Rows of a batch in the span of a first layer's gradient: found by their categories, proven by a ReLU's zeros."""

import pytest
import torch
from torch import Tensor

from gradveil.attacks.closed_form.rows_in_span import proven_rows, rows_in_span
from gradveil.spaces import TableColumn, TableSpace

LEVELS = tuple("abcdefg")
SPACE = TableSpace((TableColumn("age", std=10.0), *(TableColumn(f"c{i}", LEVELS) for i in range(8))))
UNITS = 40


def batch(rows: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    ages = torch.randint(0, 90, (rows, 1), generator=random)
    levels = torch.randint(len(LEVELS), (rows, 8), generator=random)
    return SPACE.encode(torch.cat([ages, levels], 1).double())


def gradient(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a layer with random weights before a ReLU, its span, and the weights."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(UNITS, rows.shape[1], generator=random, dtype=torch.float64)
    errors = torch.randn(UNITS, len(rows), generator=random, dtype=torch.float64) * (weight @ rows.T > 0)
    whole = errors @ rows
    return whole, torch.linalg.svd(whole)[2][: len(rows)], weight


def contained(rows: Tensor, others: Tensor) -> list[bool]:
    return ((rows[:, None] - others[None]).abs().amax(2) < 1e-6).any(1).tolist()


@pytest.mark.parametrize("count", [2, 8, 16])
def test_all_rows_are_found_and_only_they_are_proven(count: int) -> None:
    rows = batch(count, count)
    whole, span, weight = gradient(rows)
    found = rows_in_span(span, SPACE.columns)
    assert all(contained(rows, found))
    proven = proven_rows(found, span, whole, weight @ found.T > 0)
    assert all(contained(found[proven], rows))
    assert int(proven.sum()) == count


def test_a_span_of_noise_has_no_rows() -> None:
    noise = torch.randn(8, SPACE.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert len(rows_in_span(noise, SPACE.columns)) == 0


def test_rows_of_the_same_categories_are_not_told_apart() -> None:
    rows = batch(4, 0)
    rows[1, 1:] = rows[0, 1:]
    assert len(rows_in_span(torch.linalg.qr(rows.T)[0].T, SPACE.columns)) == 0
