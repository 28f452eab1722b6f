"""Partitions of a data set among clients: each example belongs to exactly one client."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.extras import needs
from gradveil.data.dataset import Dataset


def iid(examples: int, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Deal a random permutation of the example indices into `clients` parts whose sizes differ by at most one.

    >>> parts = iid(5, 2, torch.Generator().manual_seed(0))
    >>> [len(part) for part in parts], sorted(torch.cat(parts).tolist())
    ([3, 2], [0, 1, 2, 3, 4])
    """
    _check(examples, clients)
    order = torch.randperm(examples, generator=generator)
    return [part.sort().values for part in order.tensor_split(clients)]


def dirichlet(
    targets: Tensor, clients: int, concentration: float, generator: torch.Generator, *, at_least: int = 1
) -> list[Tensor]:
    """Divide each class among the clients by shares p ~ Dirichlet(concentration, ..., concentration).

    The smaller the concentration, the fewer classes a client sees (Yurochkin et al. 2019, Bayesian Nonparametric
    Federated Learning of Neural Networks; Hsu et al. 2019 draw the classes of each client instead). A client with fewer
    than `at_least` examples gets random ones, one at a time, from the client that has the most.
    """
    _check(len(targets), clients, concentration, at_least)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in targets.unique():
        members = (targets == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        shares = _dirichlet(clients, concentration, generator)
        # Cut at the rounded cumulative shares, so that the parts cover the class exactly.
        cuts = (shares.cumsum(0)[:-1] * len(members)).round().long()
        for part, chosen in zip(parts, members.tensor_split(cuts), strict=True):
            part += chosen.tolist()
    for part in parts:
        while len(part) < at_least:
            most = max(parts, key=len)
            part.append(most.pop(int(torch.randint(len(most), (1,), generator=generator))))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in parts]


def pathological(targets: Tensor, clients: int, classes: int, generator: torch.Generator) -> list[Tensor]:
    """Cut the examples, sorted by label, into `clients` x `classes` shards and deal each client `classes` of them.

    With shards no larger than a class a client sees about `classes` labels (McMahan et al. 2017,
    Communication-Efficient Learning of Deep Networks from Decentralized Data).
    """
    _check(len(targets), clients, at_least=classes)
    shuffled = torch.randperm(len(targets), generator=generator)
    order = shuffled[targets[shuffled].argsort(stable=True)]
    shards = order.tensor_split(clients * classes)
    dealt = torch.randperm(len(shards), generator=generator).view(clients, classes).tolist()
    return [torch.cat([shards[shard] for shard in hand]).sort().values for hand in dealt]


def grouped(values: Sequence[Any], clients: int, generator: torch.Generator) -> list[Tensor]:
    """Assign all examples of one value to the same client: one value per client if the numbers agree.

    Otherwise the values are dealt in random order, each to the client with the fewest examples so far.

    >>> [part.tolist() for part in grouped(["ann", "bob", "ann", "bob", "bob"], 2, torch.Generator().manual_seed(0))]
    [[0, 2], [1, 3, 4]]
    """
    by_value: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if not isinstance(value, Hashable):
            raise fail("column", f"row {index} holds a {type(value).__name__}", "choose a column of names or numbers")
        by_value.setdefault(value, []).append(index)
    if len(by_value) < clients:
        problem = f"{len(by_value)} different values cannot make {clients} clients"
        raise fail("clients", problem, f"set clients = {len(by_value)} or fewer, or choose another column")
    groups = [by_value[value] for value in sorted(by_value, key=lambda value: (str(type(value)), value))]
    if len(groups) > clients:
        order = torch.randperm(len(groups), generator=generator).tolist()
        hands: list[list[int]] = [[] for _ in range(clients)]
        for group in order:
            min(hands, key=len).extend(groups[group])
        groups = [sorted(hand) for hand in hands]
    return [torch.tensor(group, dtype=torch.int64) for group in groups]


def _dirichlet(count: int, concentration: float, generator: torch.Generator) -> Tensor:
    # Normalised gamma variates, in logarithms: log G(a) = log G(a + 1) + log(U) / a. Otherwise small concentrations
    # underflow, and torch's Dirichlet sampler returns equal shares, the opposite of the request.
    # numpy draws the gamma variates, seeded from the generator, as torch's sampler takes no generator.
    draws = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    logs = np.log(draws.standard_gamma(concentration + 1, count)) + np.log1p(-draws.random(count)) / concentration
    return torch.softmax(torch.from_numpy(logs), 0)


def _check(examples: int, clients: int, concentration: float = 1.0, at_least: int = 1) -> None:
    problems = []
    if clients < 1:
        problems.append(Problem("clients", f"is {clients}", "give at least 1"))
    elif at_least < 0 or examples < clients * at_least:
        what = f"{examples} examples cannot give {clients} clients {at_least} each"
        problems.append(Problem("clients", what, "take fewer clients or more examples"))
    if not 0 < concentration < float("inf"):
        problems.append(Problem("concentration", f"is {concentration}", "give a number above 0, say 0.5"))
    refuse(problems)


_PLACE = "gradveil-place"


def by_flower(
    data: Dataset,
    clients: int,
    name: str,
    options: Mapping[str, Any],
    column: str | None,
    shuffle: int | Literal[False],
) -> list[Tensor]:
    """Partition the examples by `flwr_datasets.partitioner.NAME(**options)`.

    The partitioner's table has the column `label`, and `column` if the data was loaded with one. `shuffle` is the seed
    with which `FederatedDataset` shuffles before partitioning; False keeps the order. `num_partitions` defaults to
    `clients`. The partitioner draws its own random numbers: equal options give equal parts.
    """
    partitioner = _partitioner(name, dict(options), clients)
    import datasets

    columns: dict[str, list[Any]] = {_PLACE: list(range(len(data))), "label": data.targets.tolist()}
    if column is not None and column not in columns:
        columns[column] = list(data.column)
    table = datasets.Dataset.from_dict(columns)
    try:
        partitioner.dataset = table if shuffle is False else table.shuffle(seed=shuffle)
        parts = [torch.tensor(partitioner.load_partition(i)[_PLACE]) for i in range(partitioner.num_partitions)]
    except (ValueError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise fail(name, f"cannot partition these examples ({_line(error)})", "change partition.options") from error
    problems = []
    if len(parts) != clients:
        problem = f"is {clients} and {name} makes {len(parts)} parts"
        problems.append(Problem("clients", problem, f"set clients = {len(parts)}, or change partition.options"))
    if empty := [str(i) for i, part in enumerate(parts) if len(part) == 0]:
        problem = f"{name} leaves clients {', '.join(empty)} without examples"
        problems.append(Problem("partition", problem, "use fewer clients, or options with more even shares"))
    refuse(problems)
    return [part.sort().values for part in parts]


def _partitioner(name: str, options: dict[str, Any], clients: int) -> Any:
    with needs("hub", "partition.kind 'flwr'"):
        from flwr_datasets import partitioner
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
