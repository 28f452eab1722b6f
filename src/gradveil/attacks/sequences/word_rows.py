"""Words and positions read off embedding gradients: a row that is not zero belongs to a word of the batch.

The row of a word is the sum of the errors of its occurrences, and so is the row of a position. A position's row is
thus the sum of its words' rows where these occur once: a linear system orders the bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.sequences.token_span import is_pruned
from gradveil.nn.token_layout import TokenLayout

_CUT = 1.5
"""Standard deviations of the log norms above which a row of a tied table belongs to a word (Fowl et al. 2022)."""
_DENSE = 0.9
"""Share of rows that are not zero above which a table is filled: tied to the output, or noisy."""


@dataclass(frozen=True)
class WordRows:
    """The bag of words [n], the number of positions in use, and each word's share [P, n] of a position's row."""

    bag: Tensor
    length: int | None
    """None if the positions were not sent, entries of them are missing, or noise fills them."""
    shares: Tensor | None


def word_rows(update: Mapping[str, Tensor], layout: TokenLayout, most: int) -> WordRows | None:
    """Read the embedding rows of one update; None if the word embedding was not sent.

    `most` bounds the number of distinct words where noise or a tied output fills every row.
    """
    table = update.get(f"{layout.words}.weight")
    if table is None or not bool(table.any()):
        return None
    table = table.double().nan_to_num(0, 0, 0)
    sizes = table.norm(dim=1)
    sizes[layout.padding] = 0
    filled = float((sizes > 0).double().mean()) > _DENSE
    if filled:
        logs = sizes.clamp_min(1e-300).log()
        level = logs[sizes > 0]
        usual = (logs > level.mean() + _CUT * level.std()) & (sizes > 0)
        count = min(most, max(int(usual.sum()), 1))
        bag = sizes.topk(count).indices.sort().values
    else:
        bag = (sizes > 0).nonzero().flatten()
    if not len(bag):  # pruning left the row of padding alone
        return None
    rows = None if layout.positions is None else update.get(f"{layout.positions}.weight")
    if rows is None:
        return WordRows(bag, None, None)
    rows = rows.double()[layout.offset :]
    used = rows.norm(dim=1) > 0
    if filled or not bool(used.any()):
        return WordRows(bag, None, None)
    length = int(used.nonzero().max()) + 1
    # gelsd: rows of words may depend on each other. Only CPUs have it.
    shares = torch.linalg.lstsq(table[bag].T.cpu(), rows[:length].T.cpu(), driver="gelsd").solution.T
    # Where entries are missing, all of the last rows may be.
    return WordRows(bag, None if is_pruned([rows[used]]) else length, shares.float().to(bag.device))
