"""The assignment against brute force."""

from itertools import permutations

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.metrics.matching import match


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_no_permutation_is_cheaper(size: int, generator: torch.Generator) -> None:
    cost = torch.rand(6, size, size, generator=generator, dtype=torch.float64) * 10 - 5
    chosen = match(cost)
    assert chosen.dtype == torch.int64
    for matrix, columns in zip(cost, chosen, strict=True):
        assert sorted(columns.tolist()) == list(range(size))
        cheapest = min(sum(matrix[row, column] for row, column in enumerate(p)) for p in permutations(range(size)))
        assert matrix.gather(1, columns[:, None]).sum().item() == pytest.approx(float(cheapest))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_costs_that_are_not_finite_are_taken_as_rarely_as_possible(broken: float, generator: torch.Generator) -> None:
    cost = torch.rand(1, 4, 4, generator=generator, dtype=torch.float64) * 1e9
    cost[0, :, 2] = broken  # one broken candidate: one truth must take it
    cost[0, 0, :3] = broken  # and the first truth can only take the last or the broken one
    columns = match(cost)[0]
    rows = range(4)

    def price(order) -> tuple[int, float]:
        values = [cost[0, row, order[row]] for row in rows]
        return sum(not value.isfinite() for value in values), sum(value.nan_to_num(0, 0, 0).item() for value in values)

    assert price(columns) == pytest.approx(min(price(order) for order in permutations(rows)))


def test_a_finite_choice_is_taken_however_dear() -> None:
    cost = torch.tensor([[[torch.nan, 1e6], [1e6, 0.0]]])
    assert match(cost).tolist() == [[1, 0]]


def test_all_costs_broken_and_no_target_clients() -> None:
    assert sorted(match(torch.full((1, 3, 3), torch.nan))[0].tolist()) == [0, 1, 2]
    assert match(torch.zeros(0, 3, 3)).shape == (0, 3)


def test_a_matrix_that_is_not_square_is_refused() -> None:
    with pytest.raises(GradveilError, match="square"):
        match(torch.zeros(1, 2, 3))
