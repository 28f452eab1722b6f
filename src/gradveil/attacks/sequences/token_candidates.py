"""Likely words of each position, ranked by what the first layer's span leaves of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.token_span import TokenSpan
from gradveil.core.tree import Tensors
from gradveil.nn.token_layout import TokenLayout

_WORDS = 8192
"""Words whose inputs are tested at once."""


@dataclass(frozen=True)
class Candidates:
    """Words of each position, the best first: numbers [P, m] and their residuals [P, m]."""

    words: Tensor
    residuals: Tensor

    def among(self, position: int, threshold: float) -> Tensor:
        """Return the words of a position whose residual is below the threshold."""
        return self.words[position][self.residuals[position] < threshold]


@torch.no_grad()
def rank_words(
    model: nn.Module,
    layout: TokenLayout,
    params: Tensors,
    span: TokenSpan,
    positions: int,
    kept: int,
    bag: Tensor | None = None,
    member: float | None = None,
) -> Candidates:
    """Rank the vocabulary, or a bag of words [n], at each position by its residual, and keep the best `kept`.

    With a largest residual of members, positions behind the longest text, which have no member, are left out.
    """
    words = torch.arange(len(layout.word_table(params))) if bag is None else bag
    best, rows = [], []
    for position in range(positions):
        parts = [
            span.residuals(layout.first_inputs(model, params, position, part))
            for part in words.to(span.basis.device).split(_WORDS)
        ]
        residuals = torch.cat(parts)
        residuals = torch.where(words.to(residuals.device) == layout.padding, torch.inf, residuals)
        least = residuals.topk(min(kept, len(residuals)), largest=False)
        if member is not None and position and float(least.values[0]) > member:
            break
        best.append(least.values)
        rows.append(words.to(residuals.device)[least.indices])
        if layout.positions is None:  # rotary positions: the first layer sees one bag
            best, rows = best * positions, rows * positions
            break
    return Candidates(torch.stack(rows), torch.stack(best))
