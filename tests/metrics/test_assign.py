"""Matching batches."""

from itertools import permutations

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.metrics import match_batch, pairwise_mse, permute


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_shuffled_noisy_batch_is_put_in_order(batch: int, generator: torch.Generator) -> None:
    truth = torch.rand(3, batch, 3, 8, 8, generator=generator)
    orders = torch.stack([torch.randperm(batch, generator=generator) for _ in range(3)])
    noisy = truth + 0.05 * torch.randn(truth.shape, generator=generator)
    shuffled = permute(noisy, orders)
    permutation, matched = match_batch(shuffled, truth)
    assert torch.equal(matched, noisy)
    assert torch.equal(permutation, orders.argsort(1))


def test_the_total_error_is_the_least_of_all_orders(generator: torch.Generator) -> None:
    candidate, truth = (torch.rand(2, 4, 1, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    _, matched = match_batch(candidate, truth)
    for target_client in range(2):
        totals = [
            (candidate[target_client, list(p)] - truth[target_client]).square().mean() for p in permutations(range(4))
        ]
        torch.testing.assert_close((matched[target_client] - truth[target_client]).square().mean(), min(totals))


def test_pairwise_errors_are_the_naive_ones(generator: torch.Generator) -> None:
    candidate, truth = (torch.rand(2, 3, 1, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    naive = (truth[:, :, None] - candidate[:, None]).square().mean((-3, -2, -1))
    torch.testing.assert_close(pairwise_mse(candidate, truth), naive)


def test_a_broken_candidate_takes_the_place_that_is_left(generator: torch.Generator) -> None:
    truth = torch.rand(1, 3, 1, 4, 4, generator=generator)
    candidate = truth[:, [2, 0, 1]].clone()
    candidate[0, 1, 0, 0, 0] = torch.nan  # shows truth 0
    permutation, _ = match_batch(candidate, truth)
    assert permutation.tolist() == [[1, 2, 0]]


def test_shapes_must_agree() -> None:
    with pytest.raises(GradveilError, match="of one shape"):
        match_batch(torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 3, 1, 4, 4))
