"""Labelled examples: images with their normalisation, or another kind with its space."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.space import Space
from gradveil.spaces import ImageSpace


@dataclass(frozen=True, repr=False)
class Dataset:
    """Examples with labels, and what turns them back into what people see.

    Of images, `inputs` holds (pixel - mean) / std, with pixels in [0, 1]. Raw pixels have mean (0,) and std (1,); a
    single number applies to every channel.

    >>> data = Dataset("dots", torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1), torch.tensor([0, 1]), ("off", "on"),
    ...                mean=(0.5,), std=(0.5,))
    >>> data.views.flatten()
    tensor([0., 1.])
    """

    name: str
    inputs: Tensor
    """float32 [N, C, H, W], normalised; of another kind as its space says."""
    targets: Tensor
    """int64 [N], indices into `classes`."""
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    source: str = ""
    """Origin of the images, with licence or citation, in a sentence."""
    task: bool = True
    """False if the labels mean nothing: the data can be attacked, but not learnt."""
    column: tuple[Any, ...] = ()
    """The values of one additional column, one per image, such as the writer of a digit."""
    marks: tuple[int, ...] = ()
    """Hashes of the decoded images before resizing, for images from files: see `identity`."""
    persons: tuple[Any, ...] = ()
    """The person of each example, where a column names persons; None for an unknown one. Models do not see them."""
    example: Space | None = None
    """What one example is; None for images, whose `mean` and `std` say it."""

    def __post_init__(self) -> None:
        """Raise with every problem of data that would fail later or silently give wrong results."""
        refuse(self._problems())

    def __repr__(self) -> str:
        """Show name, size and classes.

        >>> Dataset("dots", torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]), ("off", "on"))
        Dataset('dots', 2 images of 1x4x4, 2 classes)
        """
        shape = "x".join(str(side) for side in self.space.view_shape)
        count = f"{len(self)} {self.space.words.plural}"
        return f"Dataset({self.name!r}, {count} of {shape}, {len(self.classes)} classes)"

    def __len__(self) -> int:
        """Count the examples."""
        return self.inputs.shape[0]

    @property
    def channels(self) -> int:
        """Channels of each image."""
        return self.inputs.shape[1]

    @cached_property
    def space(self) -> Space:
        """The space of one example."""
        if self.example is not None:
            return self.example
        channels, height, width = self.inputs.shape[1:]
        return ImageSpace((channels, height, width), self.mean, self.std)

    @property
    def views(self) -> Tensor:
        """The examples as people see them: of images, pixels in [0, 1]."""
        return self.space.view(self.inputs)

    def subset(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Return the examples at these indices, in this order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        rows = {"column": self.column, "marks": self.marks, "persons": self.persons}
        chosen_rows: dict[str, Any] = {
            name: tuple(row[i] for i in chosen.tolist()) if row else () for name, row in rows.items()
        }
        return replace(self, inputs=self.inputs[chosen], targets=self.targets[chosen], **chosen_rows)

    def identity(self, count: int | None = None) -> str | None:
        """Hash the first `count` images of files as decoded, with their labels and column; None without files.

        `inputs` are not hashed: the last bit of a resized image depends on the machine.
        """
        if not self.marks:
            return None
        column = [str(value) for value in self.column[:count]]
        content = (len(self.classes), self.marks[:count], self.targets[:count].tolist(), column)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _problems(self) -> list[Problem]:
        where, inputs, targets = f"data {self.name!r}", self.inputs, self.targets
        noun = "image" if self.example is None else self.example.words.noun
        if self.example is not None and tuple(inputs.shape[1:]) != self.example.shape:
            what = f"inputs are {tuple(inputs.shape)}, and a {noun} is {self.example.shape}"
            return [Problem(where, what, "encode them by the space of the data")]
        if self.example is None and (inputs.ndim != 4 or inputs.dtype != torch.float32 or 0 in inputs.shape[1:]):
            what = f"inputs are {inputs.dtype} {tuple(inputs.shape)}"
            return [Problem(where, what, "give float32 images of shape [N, C, H, W]")]
        if len(inputs) == 0:
            return [Problem(where, f"holds no {noun}s", "check the split, the folder and the limit")]
        problems = []
        if targets.dtype != torch.int64 or tuple(targets.shape) != (len(inputs),):
            what = f"targets are {targets.dtype} {tuple(targets.shape)} for {len(inputs)} {noun}s"
            problems.append(Problem(where, what, f"give one int64 class number per {noun}"))
        elif len(self.column) not in (0, len(inputs)):
            what = f"the column has {len(self.column)} values for {len(inputs)} {noun}s"
            problems.append(Problem(where, what, f"give one value per {noun}"))
        elif (outside := (targets < 0) | (targets >= len(self.classes))).any():
            row = int(outside.nonzero()[0])
            what = f"label {int(targets[row])} of {noun} {row} is outside 0 to {len(self.classes) - 1}"
            remedy = "number the classes from 0, name them all, or choose a labelled split (-1 means unlabelled)"
            problems.append(Problem(where, what, remedy))
        statistics, channels = (self.mean, self.std), inputs.shape[1]
        if self.example is None and (any(len(v) not in (1, channels) for v in statistics) or min(self.std) <= 0):
            what = f"mean {self.mean} and std {self.std} do not fit {channels} channel(s)"
            problems.append(Problem(where, what, "give one number, or one for each channel, with every std above 0"))
            return problems
        return problems + [replace(p, where=where) for p in self.space.problems(inputs)]


class Splits(NamedTuple):
    """Two disjoint parts of a data set."""

    public: Dataset
    """Training examples: clients train on them, and attackers may use them as auxiliary data."""
    private: Dataset
    """Test examples: those under attack."""

    def identities(self) -> dict[str, str | None]:
        """Return the hashes of both parts, see `Dataset.identity`."""
        return {"public": self.public.identity(), "private": self.private.identity()}
