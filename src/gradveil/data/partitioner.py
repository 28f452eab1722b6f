"""Partitions as Flower's data sets library makes them: the same clients here as in an app that uses it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.data.dataset import Dataset

_NEED = "pip install 'gradveil[hub]'"
_PLACE = "gradveil-place"


def by_flower(
    data: Dataset,
    clients: int,
    name: str,
    options: Mapping[str, Any],
    column: str | None,
    shuffle: int | Literal[False],
) -> list[Tensor]:
    """Share the examples as `flwr_datasets.partitioner.NAME(**options)` does.

    Its table has the column `label`, and `column` where the data was loaded with one. `shuffle` is the seed with which
    its FederatedDataset shuffles before it partitions; False keeps the order. `num_partitions` is `clients` where the
    partitioner takes it and the options do not say it. Its randomness is its own: the same options, the same parts.
    """
    partitioner = _made(name, dict(options), clients)
    import datasets

    columns: dict[str, list[Any]] = {_PLACE: list(range(len(data))), "label": data.targets.tolist()}
    if column is not None and column not in columns:
        columns[column] = list(data.column)
    table = datasets.Dataset.from_dict(columns)
    try:
        partitioner.dataset = table if shuffle is False else table.shuffle(seed=shuffle)
        parts = [torch.tensor(partitioner.load_partition(i)[_PLACE]) for i in range(partitioner.num_partitions)]
    except (ValueError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise fail(name, f"cannot share these examples ({_line(error)})", "change partition.options") from error
    _check(name, parts, clients)
    return [part.sort().values for part in parts]


def _made(name: str, options: dict[str, Any], clients: int) -> Any:
    """Build the partitioner, or say what is wrong with its name or its options."""
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise fail("partition.kind", "'flwr' needs the package flwr-datasets", _NEED) from error
    kinds = {key: kind for key, kind in vars(partitioner).items() if key != "Partitioner" and inspect.isclass(kind)}
    if name not in kinds:
        raise fail("partition.partitioner", f"is {name!r}", f"choose among: {', '.join(sorted(kinds))}")
    takes = inspect.signature(kinds[name]).parameters
    if unknown := sorted(set(options) - set(takes)):
        what = f"{name} takes no {', '.join(unknown)}"
        raise fail("partition.options", what, f"choose among: {', '.join(takes)}")
    if "num_partitions" in takes:
        options.setdefault("num_partitions", clients)
    try:
        return kinds[name](**options)
    except (ValueError, TypeError) as error:
        raise fail("partition.options", f"{name} refuses them ({_line(error)})", "change them") from error


def _check(name: str, parts: list[Tensor], clients: int) -> None:
    problems = []
    if len(parts) != clients:
        what = f"is {clients} and {name} makes {len(parts)} parts"
        problems.append(Problem("clients", what, f"set clients = {len(parts)}, or change partition.options"))
    if empty := [str(i) for i, part in enumerate(parts) if len(part) == 0]:
        what = f"{name} leaves clients {', '.join(empty)} without examples"
        problems.append(Problem("partition", what, "take fewer clients, or options that share more evenly"))
    refuse(problems)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
