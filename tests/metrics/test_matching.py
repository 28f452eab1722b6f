"""The assignment against brute force, and matched batches."""

from itertools import permutations

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.metrics import match_batch, pairwise_mse, permute
from gradveil.metrics.matching import match


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_match_finds_the_cheapest_permutation(size: int, generator: torch.Generator) -> None:
    cost = torch.rand(6, size, size, generator=generator, dtype=torch.float64) * 10 - 5
    chosen = match(cost)
    assert chosen.dtype == torch.int64
    for matrix, columns in zip(cost, chosen, strict=True):
        assert sorted(columns.tolist()) == list(range(size))
        cheapest = min(sum(matrix[row, column] for row, column in enumerate(p)) for p in permutations(range(size)))
        assert matrix.gather(1, columns[:, None]).sum().item() == pytest.approx(float(cheapest))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_match_avoids_non_finite_costs(broken: float, generator: torch.Generator) -> None:
    cost = torch.rand(1, 4, 4, generator=generator, dtype=torch.float64) * 1e9
    cost[0, :, 2] = broken  # one broken candidate: one truth must take it
    cost[0, 0, :3] = broken  # and the first truth can only take the last or the broken one
    columns = match(cost)[0]
    rows = range(4)

    def cost_of(order) -> tuple[int, float]:
        values = [cost[0, row, order[row]] for row in rows]
        return sum(not value.isfinite() for value in values), sum(value.nan_to_num(0, 0, 0).item() for value in values)

    assert cost_of(columns) == pytest.approx(min(cost_of(order) for order in permutations(rows)))


def test_match_prefers_any_finite_cost() -> None:
    cost = torch.tensor([[[torch.nan, 1e6], [1e6, 0.0]]])
    assert match(cost).tolist() == [[1, 0]]


def test_match_without_finite_costs_or_clients() -> None:
    assert sorted(match(torch.full((1, 3, 3), torch.nan))[0].tolist()) == [0, 1, 2]
    assert match(torch.zeros(0, 3, 3)).shape == (0, 3)


def test_match_of_a_matrix_that_is_not_square_raises() -> None:
    with pytest.raises(GradveilError, match="square"):
        match(torch.zeros(1, 2, 3))


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_match_batch_restores_a_shuffled_noisy_batch(batch: int, generator: torch.Generator) -> None:
    truth = torch.rand(3, batch, 3, 8, 8, generator=generator)
    orders = torch.stack([torch.randperm(batch, generator=generator) for _ in range(3)])
    noisy = truth + 0.05 * torch.randn(truth.shape, generator=generator)
    shuffled = permute(noisy, orders)
    permutation, matched = match_batch(shuffled, truth)
    assert torch.equal(matched, noisy)
    assert torch.equal(permutation, orders.argsort(1))


def test_match_batch_minimises_the_total_error(generator: torch.Generator) -> None:
    candidate, truth = (torch.rand(2, 4, 1, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    _, matched = match_batch(candidate, truth)
    for target_client in range(2):
        totals = [
            (candidate[target_client, list(p)] - truth[target_client]).square().mean() for p in permutations(range(4))
        ]
        torch.testing.assert_close((matched[target_client] - truth[target_client]).square().mean(), min(totals))


def test_pairwise_mse_equals_a_naive_loop(generator: torch.Generator) -> None:
    candidate, truth = (torch.rand(2, 3, 1, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    naive = (truth[:, :, None] - candidate[:, None]).square().mean((-3, -2, -1))
    torch.testing.assert_close(pairwise_mse(candidate, truth), naive)


def test_broken_candidate_is_matched_last(generator: torch.Generator) -> None:
    truth = torch.rand(1, 3, 1, 4, 4, generator=generator)
    candidate = truth[:, [2, 0, 1]].clone()
    candidate[0, 1, 0, 0, 0] = torch.nan  # shows truth 0
    permutation, _ = match_batch(candidate, truth)
    assert permutation.tolist() == [[1, 2, 0]]


def test_match_batch_of_different_shapes_raises() -> None:
    with pytest.raises(GradveilError, match="of one shape"):
        match_batch(torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 3, 1, 4, 4))
