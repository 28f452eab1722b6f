"""One-to-one matching of reconstructions and private images, as an update does not reveal their order."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.core.errors import fail
from gradveil.metrics.image_similarity import finite, precise


def match(cost: Tensor) -> Tensor:
    """Assign each row a different column with the least total cost, for each target client.

    `cost` is [V, B, B]; the result is int64 [V, B], the column of each row (H. W. Kuhn's assignment problem, solved by
    scipy). Costs that are not finite are avoided if possible, so a broken candidate is matched last.

    >>> match(torch.tensor([[[9.0, 1.0], [2.0, float("nan")]]]))
    tensor([[1, 0]])
    """
    if cost.ndim != 3 or cost.shape[1] != cost.shape[2]:
        raise fail("cost", f"has shape {tuple(cost.shape)}", "give one square matrix per target client: [V, B, B]")
    rows = [_solve(matrix) for matrix in cost.detach().to("cpu", torch.float64).numpy()]
    columns = np.stack(rows) if rows else np.empty((0, cost.shape[1]), dtype=np.int64)
    return torch.as_tensor(columns, dtype=torch.int64, device=cost.device)


def _solve(matrix: NDArray[np.float64]) -> NDArray[np.int64]:
    finite = np.isfinite(matrix)
    # One avoided entry must cost more than any choice of finite ones: scaled to [0, 1], B of them cost at most B.
    low, high = (matrix[finite].min(), matrix[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (matrix - low) / max(high - low, np.finfo(np.float64).tiny)
    return cast("NDArray[np.int64]", linear_sum_assignment(np.where(finite, scaled, len(matrix) + 1.0))[1])


def match_batch(candidate: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Match candidates to truths one to one by least total MSE, for each target client; both are [V, B, C, H, W].

    Returns the permutation [V, B] (truth b was matched with candidate permutation[v, b]) and the candidates in that
    order. Candidates that are not finite are matched last.
    """
    if candidate.shape != truth.shape or candidate.ndim != 5:
        what = f"candidate is {tuple(candidate.shape)}, truth is {tuple(truth.shape)}"
        raise fail("match_batch", what, "give both as [V, B, C, H, W] of one shape")
    permutation = match(pairwise_mse(candidate, truth))
    return permutation, permute(candidate, permutation)


def pairwise_mse(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute the MSE of every truth (rows) with every candidate (columns): [V, B, B], inf where one is not finite."""
    x, y = (precise(images).flatten(2) for images in (truth, candidate))
    usable = finite(truth)[:, :, None] & finite(candidate)[:, None, :]
    distance = torch.cdist(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0), compute_mode="donot_use_mm_for_euclid_dist")
    return torch.where(usable, distance.square() / x.shape[-1], torch.inf)


def permute(values: Tensor, permutation: Tensor) -> Tensor:
    """Reorder values [V, B, ...] of the candidates, such as labels, by the permutation.

    >>> permute(torch.tensor([[10, 20, 30]]), torch.tensor([[2, 0, 1]]))
    tensor([[30, 10, 20]])
    """
    target_clients = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[target_clients, permutation.to(values.device)]
