"""Plain vectors from callers: inputs [N, D] as rows of D numbers, which a model reads as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.data.column_inference import with_inference
from gradveil.data.pixel_range import Bounds
from gradveil.data.tables import column_of_numbers
from gradveil.spaces import TableColumn, TableSpace


def are_vectors(inputs: Any) -> bool:
    """Report whether these are vectors of numbers, one per example.

    >>> are_vectors(torch.zeros(8, 4)), are_vectors(torch.zeros(8, 1, 4, 4))
    (True, False)
    """
    return isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.is_floating_point() and 0 not in inputs.shape


def space_of_vectors(
    known: Tensor,
    names: Sequence[str] = (),
    bounds: Bounds = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TableSpace:
    """Return the columns of vectors like the `known` ones [N, D]: x0, x1 and so on, unless they have names.

    Means, deviations and ranges are those of the known vectors. `bounds` is the range of every column instead. With
    `mean` and `std`, inputs are (number - mean) / std, and people see the number.

    >>> space = space_of_vectors(torch.tensor([[0.0, 2.0], [1.0, 4.0]]))
    >>> space.written(space.view(torch.tensor([[0.5, 3.0]]))), space.columns[1].high
    ([{'x0': '0.5', 'x1': '3'}], 4.0)
    """
    width = known.shape[1]
    refuse(list(_problems(width, mean, std)))
    inputs = known.detach().cpu().nan_to_num(0.0, 0.0, 0.0).double()
    if standardised := mean is not None or std is not None:
        centres, scales = (_each(values, width) for values in (mean or (0.0,), std or (1.0,)))
        numbers = inputs * scales + centres
        scalings = [*zip(centres.tolist(), scales.tolist(), strict=True)]
    else:
        numbers, scalings = inputs, [None] * width
    pairs = zip(names or [f"x{place}" for place in range(width)], numbers.unbind(1), scalings, strict=True)
    columns = [
        replace(column_of_numbers(name, cells, scaling), standardised=standardised) for name, cells, scaling in pairs
    ]
    space = TableSpace(tuple(_within(column, bounds) for column in columns))
    return with_inference(space, inputs)


def space_of_vectors_sent(
    known: Any,
    shape: Sequence[int],
    names: Sequence[str] = (),
    bounds: Bounds = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TableSpace | None:
    """Return the columns of vectors that an update was made from; None if neither data nor shape say vectors.

    Without any vectors, `bounds` has to say the range.
    """
    if are_vectors(known):
        return space_of_vectors(known, names, bounds, mean, std)
    if known is not None or len(shape) != 1:
        return None
    if bounds is None:
        what = "are not known, and nothing shows the range of the columns"
        raise fail("bounds", what, "give bounds=(low, high), or public=(inputs, labels) of other rows")
    ends = torch.tensor((0.0, 1.0) if bounds == "unit" else bounds)
    return space_of_vectors(ends.unsqueeze(1).expand(2, shape[0]), names, bounds, mean, std)


def _within(column: TableColumn, bounds: Bounds) -> TableColumn:
    if bounds is None:
        return column
    low, high = (0.0, 1.0) if bounds == "unit" else bounds
    return replace(column, low=low, high=high)


def _each(values: Sequence[float], width: int) -> Tensor:
    return torch.tensor(tuple(values), dtype=torch.float64).expand(width)


def _problems(width: int, mean: Sequence[float] | None, std: Sequence[float] | None) -> Iterator[Problem]:
    for where, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) not in (1, width):
            yield Problem(where, f"has {len(values)} numbers for {width} columns", "give one, or one for each column")
    if std is not None and min(std) <= 0:
        yield Problem("std", f"holds {min(std):g}", "give numbers above 0")
