"""Accuracy of reconstructed labels: class numbers [V, B], or scores [V, B, K].

Scores that are not finite count as wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.errors import fail

_NONE = -1


def label_accuracy(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute the share of labels recovered as a multiset, whatever their order: sum_k min(n_k, m_k) / B, shape [V].

    >>> label_accuracy(torch.tensor([[3, 3, 1, 0]]), torch.tensor([[0, 3, 1, 1]]))
    tensor([0.7500])
    """
    guessed, actual = _pair(candidate, truth)
    highest = int(torch.stack([guessed.max(), actual.max()]).max()) if guessed.numel() else 0
    shared = torch.minimum(_counts(guessed, highest), _counts(actual, highest)).sum(1)
    return shared / max(actual.shape[1], 1)


def matched_label_accuracy(candidate: Tensor, truth: Tensor) -> Tensor:
    """Return 1 for each image whose label was recovered, else 0; shape [V, B]. Match the candidates first."""
    guessed, actual = _pair(candidate, truth)
    return (guessed == actual).to(torch.get_default_dtype())


def _pair(candidate: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    guessed, actual = _hard(candidate), _hard(truth)
    if guessed.shape != actual.shape or guessed.ndim != 2:
        what = f"candidate is {tuple(candidate.shape)}, truth is {tuple(truth.shape)}"
        raise fail("label_accuracy", what, "give both as class numbers [V, B] or scores [V, B, K]")
    return guessed, actual


def _hard(labels: Tensor) -> Tensor:
    if labels.ndim == 3:
        return torch.where(torch.isfinite(labels).all(-1), labels.argmax(-1), _NONE)
    return labels.to(torch.int64)


def _counts(labels: Tensor, highest: int) -> Tensor:
    """Count each class from 0 to `highest`, and ignore negative labels."""
    counts = torch.zeros(labels.shape[0], highest + 2, dtype=torch.int64, device=labels.device)
    # One place up: the first column takes the negative labels, and is left out.
    counts.scatter_add_(1, labels.clamp(min=_NONE) + 1, torch.ones_like(labels))
    return counts[:, 1:]
