"""The mean and standard deviation that turn inputs into pixels in [0, 1], from a range or from examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import fail

Bounds = Literal["unit"] | tuple[float, float] | None
"""The range of inputs: [0, 1], a pair, or None for the range of the examples."""
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation: one number, or one per channel."""


def pixel_statistics(
    bounds: Bounds, mean: Sequence[float] | None, std: Sequence[float] | None, examples: Iterable[Tensor] = ()
) -> tuple[Statistics, bool]:
    """Return mean and standard deviation for a range, and whether the range was read from the examples.

    It is read from them if neither bounds nor statistics are given and they exceed [0, 1].

    >>> pixel_statistics((-1.0, 1.0), None, None)
    (((0.5,), (0.5,)), False)
    """
    if mean is not None or std is not None or bounds == "unit":
        return (tuple(mean or (0.0,)), tuple(std or (1.0,))), False
    values = [value.detach().float().nan_to_num(0, 0, 0).flatten().cpu() for value in examples]
    low, high = bounds or (0.0, 1.0)
    from_examples = False
    if bounds is None and values:
        least, most = (float(value) for value in torch.aminmax(torch.cat(values)))
        from_examples = least < 0 or most > 1
        low, high = (least, most) if from_examples else (low, high)
    if low > high:
        raise fail("bounds", f"begin at {low:g} and end at {high:g}", f"give the lower end first: ({high:g}, {low:g})")
    if not low < high:
        raise fail("bounds", f"every input is {low:g}, which is no range", "give bounds=(low, high), or mean and std")
    return ((-low / (high - low),), (1 / (high - low),)), from_examples
