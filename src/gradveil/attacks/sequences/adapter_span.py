"""The span of a layer's inputs, read off the gradients of its low-rank adapters.

With y = W x + s B A x and G = sum_i delta_i x_i^T: the gradient of A is s B^T G, whose rows lie in the span of the
inputs x_i, and that of B is s G A^T, whose rows lie in the span of A x_i. A is public. B is zero in the first round,
and so is the gradient of A. Either is decisive only if a batch has fewer distinct inputs than adapters have rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.sequences.token_span import TOLERANCE, TokenSpan
from gradveil.core.tree import Tensors
from gradveil.nn.lora import adapters
from gradveil.nn.token_layout import TokenLayout

FREE = 3
"""Directions of r that must be free: with fewer, words of the vocabulary lie in the span by chance."""
_SILENT = 1e-12
"""Norm of a gradient of A, against that of B, below which B is zero."""


@dataclass(frozen=True)
class AdapterSpan(TokenSpan):
    """Spans of inputs after public matrices A [r, d], which hold together; the fields are those of the first."""

    parts: tuple[tuple[Tensor | None, TokenSpan], ...] = ()

    def factors(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return those of all spans, behind their matrices."""
        each = [(matrix, span.factors()[0][0]) for matrix, span in self.parts]
        return [(p, None) if a is None else (a.T @ p, a.T) for a, p in each]

    def residuals(self, vectors: Tensor) -> Tensor:
        """Return the root mean square of the residuals [...] in the spans."""
        squares = [
            span.residuals(vectors if matrix is None else vectors @ matrix.T).square() for matrix, span in self.parts
        ]
        return torch.stack(squares).mean(0).sqrt()


def adapter_span(
    update: Mapping[str, Tensor], layout: TokenLayout, params: Tensors, layer: int, dtype: torch.dtype
) -> AdapterSpan | None:
    """Return the span of a layer's inputs; None if no adapter of its attention was sent.

    Only decisive spans count if there is one. Otherwise all are kept, to rank words by.
    """
    paths = [path.format(layer) for path in layout.attention]
    # `sent` holds gradients of A and B, `public` the matrices A.
    sent, public = adapters(update, paths), {one.path: one.a for one in adapters(params, paths)}
    outer = [one.a for one in sent if one.a is not None and one.b is not None
             and float(one.a.norm()) > _SILENT * float(one.b.norm())]  # fmt: skip
    parts: list[tuple[Tensor | None, TokenSpan]] = [(None, _span(outer, dtype))] if outer else []
    for one in sent:
        matrix = public.get(one.path)
        if one.b is not None and matrix is not None and bool(one.b.any()):
            parts.append((matrix, _span([one.b], dtype)))
    known = [matrix for one in sent if (matrix := public.get(one.path)) is not None]
    if not known:
        return None
    if not parts:  # nothing is left of the gradients
        matrix = known[0]
        parts = [(None, TokenSpan(matrix.new_zeros(0, matrix.shape[1]), matrix.new_zeros(0), exact=True))]
    decisive = [part for part in parts if part[1].exact]
    kept = tuple(decisive or parts)
    first = kept[0][1]
    return AdapterSpan(first.basis, first.weights, bool(decisive), kept)


def _span(gradients: Sequence[Tensor], dtype: torch.dtype) -> TokenSpan:
    """Return the row space of gradients; it is exact if it leaves directions of theirs free."""
    stacked = torch.cat([g.double() / g.double().norm().clamp_min(1e-300) for g in gradients]).nan_to_num(0, 0, 0)
    _, sizes, directions = torch.linalg.svd(stacked, full_matrices=False)
    rank = int((sizes > TOLERANCE * sizes[0].clamp_min(1e-300)).sum())
    if rank <= min(stacked.shape) - FREE:
        return TokenSpan(directions[:rank].to(dtype), directions.new_ones(rank, dtype=dtype), exact=True)
    # Full: inputs have only a share in these directions; where they are all there are, strong ones count more.
    weights = torch.ones_like(sizes) if rank < stacked.shape[1] else 1 - (sizes[-1] / sizes).square()
    return TokenSpan(directions.to(dtype), weights.clamp(0, 1).to(dtype), exact=False)
