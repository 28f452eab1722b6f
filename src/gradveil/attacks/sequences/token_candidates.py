"""Likely words of each position, ranked by what the first layer's span leaves of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.token_span import NoisySpan, TokenSpan
from gradveil.core.tree import Tensors
from gradveil.nn.normalisation import LayerNorm
from gradveil.nn.token_layout import TokenLayout

_WORDS = 8192
"""Words whose inputs are tested at once."""
_MARGIN = 2
"""Times as many words as are kept are tested exactly."""
DROPPED_MEMBER = 1e-3
"""Largest residual of a member whose dropped numbers were guessed; true ones lie below 1e-4, wrong ones above 0.1."""
_TRIED = 32
"""Words whose masks are guessed at once; the search of a position ends where some fitted and the next do not."""
_SWEEPS = 12
"""Guesses of the numbers that dropout kept of an input."""
_SOFTEST, _SOFT = 0.3, 1e-3
"""Differences that weigh as much as none, in the first sweep and at least."""
_RIDGE = 1e-9
_KEPT = 0.5
"""Least share of an input that dropout keeps."""
_STANDS_OUT, _SURE = 0.2, 2.0
"""How much larger than a word's squared residual the next word's is where it is taken for known, and is at once."""


@dataclass(frozen=True)
class Candidates:
    """Words of each position, the best first: numbers [P, m] and their residuals [P, m]."""

    words: Tensor
    residuals: Tensor

    def among(self, position: int, threshold: float) -> Tensor:
        """Return the words of a position whose residual is below the threshold."""
        return self.words[position][self.residuals[position] < threshold]


@torch.no_grad()
def with_dropped(
    model: nn.Module, layout: TokenLayout, params: Tensors, span: TokenSpan, listed: Candidates
) -> Candidates:
    """Rank words again whose inputs are in the span once dropout has set some of their numbers to zero.

    The span then holds m x for a mask m of zeros and ones, up to its scale. The member z of least |x - z|_1 equals
    x where it was kept and 0 elsewhere, which shows m. A wrong word leaves more equations than its masks can meet.
    """
    rows = []
    for position, (words, plain) in enumerate(zip(listed.words, listed.residuals, strict=True)):
        residuals, found = plain.clone(), False
        for start in range(0, len(words), _TRIED):
            some = slice(start, start + _TRIED)
            inputs = layout.first_inputs(model, params, position, words[some])
            masks = _kept(span.basis, inputs)
            rest = span.residuals(inputs * masks)
            fits = (rest < DROPPED_MEMBER) & (masks.mean(-1) > _KEPT)
            residuals[some] = torch.where(fits, rest, plain[some])
            if found and not fits.any():
                break
            found = found or bool(fits.any())
        rows.append(residuals)
    residuals = torch.stack(rows)
    order = residuals.argsort(dim=1, stable=True)
    return Candidates(listed.words.gather(1, order), residuals.gather(1, order))


def _kept(basis: Tensor, inputs: Tensor) -> Tensor:
    """Return which numbers of each input [N, d] a span kept, 1 or 0, by weighted least squares of falling weights."""
    x = inputs / inputs.square().mean(1, keepdim=True).sqrt()
    member, masks = x @ basis.T @ basis, torch.ones_like(x)
    ridge = _RIDGE * torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
    for sweep in range(_SWEEPS):
        # The last sweeps fit the numbers that were kept, exactly.
        # Weights 1 / |x - z| make least squares approach the least |x - z|_1.
        weights = masks if sweep >= _SWEEPS - 2 else 1 / ((x - member).abs() + max(_SOFT, _SOFTEST / 2**sweep))
        products = (weights.unsqueeze(1) * basis) @ basis.T + ridge
        solved, _ = torch.linalg.solve_ex(products, (weights * x) @ basis.T)
        member = solved.nan_to_num(0, 0, 0) @ basis
        # Kept where the member is nearer to x than to zero.
        masks = ((x - member).abs() < member.abs()).to(x.dtype)
    return masks


@torch.no_grad()
def beside_known(
    model: nn.Module, layout: TokenLayout, params: Tensors, span: NoisySpan, listed: Candidates, examples: int
) -> Candidates:
    """Rank words again by what they leave beside those that stand out: these are taken out of the span, in turn.

    What is known of a text narrows the noise around the rest: a direction that a known input explains is none of the
    others', and only the part of a word that known inputs do not explain is held against the span. A word is ranked
    beside the known ones of other positions, and by itself; the residuals returned are those beside the known.
    """
    if listed.words.shape[1] < 2:  # a single word stands out from no other
        return listed
    # Without positions all have the same words, of all tokens of the texts.
    places = range(len(listed.words) if layout.positions is not None else 1)
    most = examples if layout.positions is not None else examples * len(listed.words)
    inputs = torch.stack([layout.first_inputs(model, params, place, listed.words[place]) for place in places])
    unusable = torch.isinf(listed.residuals[: len(places)])
    known: list[tuple[int, int]] = []

    def beside(others: list[tuple[int, int]], vectors: Tensor) -> Tensor:
        return (span.without(torch.stack([inputs[one] for one in others])) if others else span).residuals(vectors)

    while len(known) < span.inputs - 1:
        squares = beside(known, inputs).square().masked_fill(unusable, torch.inf)
        for place, word in known:
            squares[place, word] = torch.inf
        first, second = squares.topk(2, dim=1, largest=False).values.T
        gains = (second / first.clamp_min(torch.finfo(first.dtype).tiny) - 1).nan_to_num(-1)
        filled = [sum(one == place for one, _ in known) >= most for place in places]
        gains[torch.tensor(filled)] = -1
        best = float(gains.max())
        if best < _STANDS_OUT:
            break
        sure = (gains >= min(best, _SURE)).nonzero().flatten().tolist()
        known += [(place, int(squares[place].argmin())) for place in sure]
    rows = []
    for place in places:
        same = [one for one in known if one[0] == place]
        if most == 1:
            rows.append(beside([one for one in known if one not in same], inputs[place]))
            continue
        row = beside(known, inputs[place])
        for one in same:
            row[one[1]] = beside([other for other in known if other != one], inputs[one])
        rows.append(row)
    residuals = torch.stack(rows).masked_fill(unusable, torch.inf)
    # A wrong word among the known ones hides right ones: what a word leaves by itself counts as much for its rank.
    scores = _standardised(residuals) + _standardised(listed.residuals[: len(places)])
    order = scores.argsort(dim=1, stable=True).expand(len(listed.words), -1)
    residuals = residuals.expand(len(listed.words), -1)
    return Candidates(listed.words.gather(1, order), residuals.gather(1, order))


def _standardised(residuals: Tensor) -> Tensor:
    """Return residuals [P, m] with mean 0 and deviation 1 in each position; infinite ones, and single ones, stay so."""
    scores = residuals.clone()
    for row, some in zip(scores, torch.isfinite(residuals), strict=True):
        if int(some.sum()) > 1:
            usable = row[some]
            row[some] = (usable - usable.mean()) / usable.std().clamp_min(torch.finfo(row.dtype).tiny)
    return scores


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
    table = layout.word_table(params)
    words = torch.arange(len(table), device=table.device) if bag is None else bag
    fast = _MARGIN * kept + _WORDS // 64 < len(words)
    likely = _likely(model, layout, params, span, positions, words, _MARGIN * kept + _WORDS // 64) if fast else None
    vocabulary = words
    best, rows = [], []
    for position in range(positions):
        words = vocabulary if likely is None else likely[position]
        parts = [span.residuals(layout.first_inputs(model, params, position, part)) for part in words.split(_WORDS)]
        residuals = torch.cat(parts)
        residuals = torch.where(words == layout.padding, torch.inf, residuals)
        least = residuals.topk(min(kept, len(residuals)), largest=False)
        if member is not None and position and float(least.values[0]) > member:
            break
        best.append(least.values)
        rows.append(words[least.indices])
        if layout.positions is None:  # rotary positions: the first layer sees one bag
            best, rows = best * positions, rows * positions
            break
    return Candidates(torch.stack(rows), torch.stack(best))


def _likely(
    model: nn.Module, layout: TokenLayout, params: Tensors, span: TokenSpan, positions: int, words: Tensor, count: int
) -> Tensor | None:
    """Return the words [P, count] with the smallest residuals in single precision; None without a layer norm.

    A normalised input is x = (g_w + h_p) / s + b with parts of the word and of the position, so that the squared
    lengths of x P and x Q, and s, come from products of all words with all positions. They cancel down to a residual
    of about 1e-3, which is enough for a shortlist.
    """
    norm = model.get_submodule(layout.norm)
    if not isinstance(norm, (nn.LayerNorm, LayerNorm)) or layout.positions is None:
        return None
    weight, bias = (params.get(f"{layout.norm}.{name}") for name in ("weight", "bias"))
    width = layout.word_table(params).shape[1]
    weight = layout.word_table(params).new_ones(width) if weight is None else weight
    bias = torch.zeros_like(weight) if bias is None else bias
    # The layer norm takes off the mean, which can be done for words and positions separately.
    table, places = (
        vectors - vectors.mean(-1, keepdim=True)
        for vectors in (
            layout.word_table(params)[words],
            torch.stack([layout.added(params, position) for position in range(positions)]),
        )
    )
    size = (_sums(table, places) / width + norm.eps).sqrt()

    def squares(matrix: Tensor | None) -> Tensor:
        g, h, b = (x if matrix is None else x @ matrix for x in (table * weight, places * weight, bias))
        # |(g + h) / s + b|^2, multiplied out.
        return _sums(g, h) / size.square() + 2 * ((g @ b).unsqueeze(1) + h @ b) / size + b.square().sum()

    residuals = torch.stack([squares(p) / squares(q) for p, q in span.factors()]).mean(0)
    return words[residuals.topk(count, dim=0, largest=False).indices].T


def _sums(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared lengths [A, B] of the sums of all pairs of vectors [A, d] and [B, d]."""
    return one.square().sum(1, keepdim=True) + 2 * one @ other.T + other.square().sum(1)
