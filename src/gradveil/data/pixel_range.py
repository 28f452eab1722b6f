"""What makes pixels in [0, 1] of inputs: a mean and a standard deviation, said or read off a range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import fail

Bounds = Literal["unit"] | tuple[float, float] | None
"""The range of inputs: [0, 1], a pair, or None for what the examples span."""
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""A mean and a standard deviation, one number or one a channel."""


def pixel_statistics(
    bounds: Bounds, mean: Sequence[float] | None, std: Sequence[float] | None, examples: Iterable[Tensor] = ()
) -> tuple[Statistics, bool]:
    """Return the mean and standard deviation of inputs whose range is said, and whether it was read off the examples.

    It is read off them where nothing is said and they do not lie in [0, 1].

    >>> pixel_statistics((-1.0, 1.0), None, None)
    (((0.5,), (0.5,)), False)
    """
    if mean is not None or std is not None or bounds == "unit":
        return (tuple(mean or (0.0,)), tuple(std or (1.0,))), False
    seen = [value.detach().float().nan_to_num(0, 0, 0).flatten().cpu() for value in examples]
    low, high = bounds or (0.0, 1.0)
    taken = False
    if bounds is None and seen:
        least, most = (float(value) for value in torch.aminmax(torch.cat(seen)))
        taken = least < 0 or most > 1
        low, high = (least, most) if taken else (low, high)
    if not low < high:
        raise fail("bounds", f"every input is {low:g}, which is no range", "give bounds=(low, high), or mean and std")
    return ((-low / (high - low),), (1 / (high - low),)), taken
