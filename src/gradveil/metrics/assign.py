"""Which reconstruction shows which image of the batch: the update does not say in which order they were."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.assign import match
from gradveil.core.errors import fail
from gradveil.metrics.image import finite, precise


def match_batch(candidate: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Match candidates to truths one to one by least total MSE, for each victim; both are [V, B, C, H, W].

    Returns the permutation [V, B] (place b of the truth was matched with candidate permutation[v, b]) and the
    candidates in that order. Candidates that are not finite get what is left over.
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
    """Bring what belongs to the candidates (labels, say) into the matched order: values [V, B, ...].

    >>> permute(torch.tensor([[10, 20, 30]]), torch.tensor([[2, 0, 1]]))
    tensor([[30, 10, 20]])
    """
    victims = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[victims, permutation.to(values.device)]
