"""The state after a round that came to no number: what it was before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core.tree import Tensors, all_finite, plain


def steady(sent: Mapping[str, Tensor], after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the state `after` a round, or the one `before` if that or what is `sent` has a value that is not finite.

    NaN in a residual, a moment or a momentum never leaves it again: one bad batch would ruin every later update. So the
    round does not count for the client. What is sent stays as it is: not for the client to make look right.

    >>> state = {"m": torch.zeros(1)}
    >>> steady({"w": torch.ones(1)}, {"m": torch.ones(1)}, state)["m"], steady(
    ...     {"w": torch.tensor([torch.nan])}, {"m": torch.ones(1)}, state
    ... )["m"]
    (tensor([1.]), tensor([0.]))
    """
    if not after:
        return after
    finite = all_finite(sent, after)
    if plain(finite, *after.values(), *before.values()):
        return after if bool(finite) else {name: before[name] for name in after}
    return {name: torch.where(finite, value, before[name]) for name, value in after.items()}
