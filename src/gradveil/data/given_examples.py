"""Examples as callers have them: tensors, arrays, dictionaries, data sets and loaders, as (inputs, targets)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import fail
from gradveil.core.formatting import listing
from gradveil.data.dataset import Dataset
from gradveil.data.tables import is_frame, of_frame

Examples = tuple[Any, Any] | Mapping[str, Any] | Dataset | torch.utils.data.Dataset[Any] | Iterable[Any]
"""(inputs, targets), a dictionary of both, a data set, or batches of a loader."""
INPUTS = ("pixel_values", "inputs", "x", "images", "image", "img", "jpg", "png")
"""Names of inputs in a dictionary, tried in this order."""
TARGETS = ("labels", "targets", "y", "label", "target", "fine_label", "class")
"""Names of targets in a dictionary, tried in this order."""
_COLOURS = (1, 3)
_BYTE = 255


def tensors_of(
    given: Any,
    where: str,
    limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Any:
    """Return examples as tensors (inputs, targets); what is no examples is returned as it is, for a check to report.

    Of data sets and loaders, at most `limit` examples are read. Images in bytes become (pixel / 255 - mean) / std, with
    the channels first, and a warning says so. A data frame of numbers becomes vectors. Other inputs keep their values.

    >>> inputs, targets = tensors_of({"pixel_values": np.zeros((2, 1, 4, 4)), "labels": [0, 1]}, "batch")
    >>> inputs.shape, inputs.dtype, targets
    (torch.Size([2, 1, 4, 4]), torch.float32, tensor([0, 1]))
    """
    if isinstance(given, Dataset):
        return given.inputs[:limit], given.targets[:limit]
    if is_frame(given):
        what = f"is a data frame of the columns {listing(map(str, _names(given)))}; nothing says which holds the labels"
        remedy = (
            "give (frame without the labels, labels) if the model reads the numbers as they are, or "
            "data = gradveil.data.table(frame, label='...') and data.private for a model of standardised numbers and "
            "one-hot categories"
        )
        raise fail(where, what, remedy)
    if isinstance(given, Mapping):
        pair = _of_mapping(given, where)
    elif _is_pair(given):
        pair = (given[0], given[1])
    elif isinstance(given, torch.utils.data.DataLoader):
        pair = _joined([_pair(batch, where) for batch in _up_to(given, limit, where)], where, limit, torch.cat)
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Tensor | str):
        count = len(given) if limit is None else min(limit, len(given))
        if count == 0 or not _is_row(given[0]):
            return given
        pair = _joined([_pair(given[i], where) for i in range(count)], where, limit, torch.stack)
    else:
        return given
    return _inputs(pair[0], where, mean, std), _targets(pair[1])


def column_names(given: Any) -> tuple[str, ...]:
    """Return the names of the columns, if the inputs are a data frame; otherwise nothing.

    >>> column_names((torch.zeros(2, 3), [0, 1]))
    ()
    """
    if isinstance(given, Mapping):
        inputs = next((given[name] for name in INPUTS if name in given), None)
    else:
        inputs = given[0] if _is_pair(given) else given
    return tuple(map(str, _names(inputs))) if is_frame(inputs) else ()


def _names(frame: Any) -> Sequence[Any]:
    return frame.column_names if hasattr(frame, "column_names") else list(frame.columns)


def _of_frame(frame: Any, where: str) -> Tensor:
    """Turn a data frame of numbers into vectors; empty cells are not a number."""
    names = [*map(str, _names(frame))]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise fail(where, f"has two columns '{twice}'", "name each differently")
    columns = of_frame(frame, where)
    for name, cells in columns.items():
        if (odd := next((cell for cell in cells if not isinstance(cell, int | float | None)), None)) is not None:
            what = f"column '{name}' holds {odd!r}, and inputs are numbers"
            remedy = "leave it out, or give gradveil.data.table(frame, label='...'), which makes categories one-hot"
            raise fail(where, what, remedy)
    filled = [[torch.nan if cell is None else cell for cell in cells] for cells in columns.values()]
    return torch.tensor(filled, dtype=torch.float32).T.contiguous()


def _is_pair(given: Any) -> bool:
    """Return whether this is (inputs, targets), and not two rows of a data set."""
    return isinstance(given, list | tuple) and len(given) == 2 and not any(isinstance(v, tuple | dict) for v in given)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) or (isinstance(row, list | tuple) and len(row) == 2)


def _of_mapping(given: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    found = [next((name for name in names if name in given), None) for names in (INPUTS, TARGETS)]
    if None in found:
        kind, names = ("inputs", INPUTS) if found[0] is None else ("targets", TARGETS)
        what = f"has no {kind}: its keys are {', '.join(map(repr, given)) or 'none'}"
        raise fail(where, what, f"name them one of: {', '.join(names)}")
    return given[str(found[0])], given[str(found[1])]


def _pair(row: Any, where: str) -> tuple[Any, Any]:
    """Return the inputs and targets of a row, or of a loader's batch."""
    if isinstance(row, Mapping):
        return _of_mapping(row, where)
    if not isinstance(row, list | tuple) or len(row) != 2:
        what = f"yields {type(row).__name__}" + (f" of {len(row)} parts" if isinstance(row, list | tuple) else "")
        raise fail(where, what, "let it yield (inputs, targets), or dictionaries with both")
    return row[0], row[1]


def _up_to(loader: Iterable[Any], limit: int | None, where: str) -> Iterator[Any]:
    """Yield batches until they hold as many examples as asked for."""
    count = 0
    for batch in islice(loader, limit):
        yield batch
        count += len(_pair(batch, where)[1])
        if limit is not None and count >= limit:
            return


def _joined(pairs: Sequence[tuple[Any, Any]], where: str, limit: int | None, join: Any) -> tuple[Any, Any]:
    """Join rows or batches to one pair."""
    if not pairs:
        raise fail(where, "yields no examples", "give at least one")
    inputs, targets = ([_tensor(value) for value in values] for values in zip(*pairs, strict=True))
    if len(shapes := {value.shape[-3:] for value in inputs}) > 1:
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes, key=tuple)[:2])
        raise fail(where, f"holds inputs of different sizes, {sizes}", "resize them in its transform")
    return join(inputs)[:limit], join(targets)[:limit]


def _tensor(value: Any) -> Tensor:
    """Convert an array, a number, a list or a picture (PIL) to a tensor; double precision, numpy's habit, to single."""
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _inputs(given: Any, where: str, mean: Sequence[float] | None, std: Sequence[float] | None) -> Any:
    """Convert inputs to a tensor, and images in bytes to normalised pixels with the channels first."""
    if is_frame(given):
        return _of_frame(given, where)
    pictures = isinstance(given, list | tuple) and given and not isinstance(given[0], int | float)
    if not isinstance(given, Tensor | np.ndarray) and not pictures:
        return given
    inputs = _joined([(v, 0) for v in given], where, None, torch.stack)[0] if pictures else _tensor(given)
    shape = tuple(inputs.shape)
    if inputs.dtype != torch.uint8 and inputs.dim() == 4 and shape[3] == 3 and shape[1] not in _COLOURS:
        raise fail(where, f"is {shape}: the three colours come last", "put the channels first: permute(0, 3, 1, 2)")
    if inputs.dtype != torch.uint8 or inputs.dim() not in (3, 4):
        return inputs
    last = inputs.dim() == 4 and shape[3] in _COLOURS and shape[1] not in _COLOURS
    layout = "height x width" if inputs.dim() == 3 else "height x width x channels" if last else "channels first"
    pixels = (inputs.unsqueeze(1) if inputs.dim() == 3 else inputs.permute(0, 3, 1, 2) if last else inputs).float()
    means, stds = tuple(mean or (0.0,)), tuple(std or (1.0,))
    normalised = f", then normalised by mean {means} and std {stds}" if mean or std else ""
    text = f"{where}: bytes of shape {shape} ({layout}) are read as pixels: divided by {_BYTE}{normalised}"
    warnings.warn(text, stacklevel=5)
    centre, scale = (torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) for values in (means, stds))
    return (pixels / _BYTE - centre) / scale


def _targets(given: Any) -> Any:
    """Convert arrays and lists of whole numbers to int64; tensors stay as they are."""
    if isinstance(given, Tensor):
        return given
    try:
        targets = _tensor(given)
    except (TypeError, ValueError):
        return given
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    return targets.long() if whole else targets
