"""Guess the tokens that a client replaced by a mask before it trained, by a public model of the language."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.protocol import Reconstruction
from gradveil.attacks.sequences.sentence_search import LogPrior
from gradveil.client import Client
from gradveil.spaces.text_space import TextSpace

_BEAM = 8
"""Beginnings of a text that are kept."""


def with_guesses(
    found: Reconstruction, simulated_client: Client, prior: LogPrior | None, public: Tensor | None, space: TextSpace
) -> Reconstruction:
    """Replace the mask tokens of a client's batch defence by likely words; `before_undoing` keeps the texts as trained.

    Words are those of public texts [M, T]. Without these, or without such a defence, nothing changes.
    """
    masks = {each.placeholder(simulated_client.domain) for each in simulated_client.batch} - {None}
    if not masks or prior is None or public is None:
        return found
    words = public.unique().long()
    for token in (space.padding, space.start, space.end, *masks):
        words = words[words != token] if token is not None else words
    placeholders = torch.tensor(sorted(m for m in masks if m is not None), device=found.inputs.device)
    guessed = [
        guess_tokens(text, torch.isin(text, placeholders), prior, words) for text in found.inputs.flatten(0, 1).long()
    ]
    return replace(found, inputs=torch.stack(guessed).view_as(found.inputs), before_undoing=found.inputs)


def guess_tokens(text: Tensor, unknown: Tensor, prior: LogPrior, words: Tensor) -> Tensor:
    """Return a text [T] with the likeliest of some words where it is `unknown` [T], by a beam search.

    >>> text, unknown = torch.tensor([1, 9, 9, 4]), torch.tensor([False, True, True, False])
    >>> guess_tokens(text, unknown, lambda before, after: (after == before + 1).float(), torch.arange(9)).tolist()
    [1, 2, 3, 4]
    """
    rows, costs = text[:0].unsqueeze(0), torch.zeros(1, device=text.device)
    for token, is_unknown in zip(text, unknown.tolist(), strict=True):
        choices = words if is_unknown and len(words) else token.unsqueeze(0)
        longer = torch.cat([rows.repeat_interleave(len(choices), 0), choices.repeat(len(rows)).unsqueeze(1)], 1)
        costs = costs.repeat_interleave(len(choices))
        if longer.shape[1] > 1:
            costs = costs - prior(longer[:, -2], longer[:, -1])
        best = costs.argsort(stable=True)[:_BEAM]
        rows, costs = longer[best], costs[best]
    return rows[0]
