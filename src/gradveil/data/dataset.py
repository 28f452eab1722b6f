"""A set of labelled images that carries its own normalisation and bounds."""

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
from gradveil.spaces import ImageSpace


@dataclass(frozen=True, repr=False)
class Dataset:
    """Images with labels, and what is needed to read them as pixels again.

    A value of `inputs` is (pixel - mean) / std, with pixels in [0, 1]. Raw pixels have mean (0,) and std (1,); one
    number stands for every channel.

    >>> data = Dataset("dots", torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1), torch.tensor([0, 1]), ("off", "on"),
    ...                mean=(0.5,), std=(0.5,))
    >>> data.views.flatten()
    tensor([0., 1.])
    """

    name: str
    inputs: Tensor
    """float32 [N, C, H, W], normalised."""
    targets: Tensor
    """int64 [N], positions in `classes`."""
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    source: str = ""
    """Where the images come from, with licence or citation, in a sentence."""
    task: bool = True
    """False where the labels mean nothing: good for attacks, no use for training."""
    column: tuple[Any, ...] = ()
    """The values of one more column, one an image, where it was asked for: who wrote a digit, where a scan was made."""
    marks: tuple[int, ...] = ()
    """Of each image from a file a hash of it as it lies there, before it is resized: see `identity`."""

    def __post_init__(self) -> None:
        """Refuse data that would fail later, or be attacked wrongly in silence; every problem at once."""
        refuse(list(self._problems()))

    def __repr__(self) -> str:
        """Say in a line what it is.

        >>> Dataset("dots", torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]), ("off", "on"))
        Dataset('dots', 2 images of 1x4x4, 2 classes)
        """
        shape = "x".join(str(side) for side in self.inputs.shape[1:])
        return f"Dataset({self.name!r}, {len(self)} images of {shape}, {len(self.classes)} classes)"

    def __len__(self) -> int:
        """Count the images."""
        return self.inputs.shape[0]

    @property
    def channels(self) -> int:
        """Channels of each image."""
        return self.inputs.shape[1]

    @cached_property
    def space(self) -> ImageSpace:
        """What one example is."""
        channels, height, width = self.inputs.shape[1:]
        return ImageSpace((channels, height, width), self.mean, self.std)

    @property
    def views(self) -> Tensor:
        """The images as pixels in [0, 1]."""
        return self.space.view(self.inputs)

    def subset(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Keep the images at these positions, in this order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        column, marks = (
            tuple(row[place] for place in chosen.tolist()) if row else () for row in (self.column, self.marks)
        )
        return replace(self, inputs=self.inputs[chosen], targets=self.targets[chosen], column=column, marks=marks)

    def identity(self, count: int | None = None) -> str | None:
        """Hash the first `count` images as they lie in their files, with what is said of them; None without files.

        Of what was decoded, not of `inputs`: two machines resize alike but for the last bit.
        """
        if not self.marks:
            return None
        column = [str(value) for value in self.column[:count]]
        said = (len(self.classes), self.marks[:count], self.targets[:count].tolist(), column)
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def _problems(self) -> list[Problem]:
        where, inputs, targets = f"data {self.name!r}", self.inputs, self.targets
        if inputs.ndim != 4 or inputs.dtype != torch.float32 or 0 in inputs.shape[1:]:
            what = f"inputs are {inputs.dtype} {tuple(inputs.shape)}"
            return [Problem(where, what, "give float32 images of shape [N, C, H, W]")]
        if len(inputs) == 0:
            return [Problem(where, "holds no images", "check the split, the folder, or the limit that was given")]
        problems = []
        if targets.dtype != torch.int64 or tuple(targets.shape) != (len(inputs),):
            what = f"targets are {targets.dtype} {tuple(targets.shape)} for {len(inputs)} images"
            problems.append(Problem(where, what, "give one int64 class number an image"))
        elif len(self.column) not in (0, len(inputs)):
            what = f"the column has {len(self.column)} values for {len(inputs)} images"
            problems.append(Problem(where, what, "give one value an image"))
        elif (outside := (targets < 0) | (targets >= len(self.classes))).any():
            row = int(outside.nonzero()[0])
            what = f"label {int(targets[row])} of image {row} is outside 0 to {len(self.classes) - 1}"
            remedy = "number the classes from 0, name them all, or take a split that is labelled (-1 means it is not)"
            problems.append(Problem(where, what, remedy))
        if any(len(values) not in (1, self.channels) for values in (self.mean, self.std)) or min(self.std) <= 0:
            what = f"mean {self.mean} and std {self.std} do not fit {self.channels} channel(s)"
            problems.append(Problem(where, what, "give one number, or one for each channel, with every std above 0"))
            return problems
        black, white = self.space.bounds(inputs)
        lowest, highest = torch.aminmax((inputs - black) / (white - black))
        if not torch.isfinite(lowest + highest):
            row = int((~torch.isfinite(inputs)).flatten(1).any(1).nonzero()[0])
            problems.append(Problem(where, f"image {row} holds NaN or infinite pixels", "repair or remove it"))
        elif lowest < -1e-3 or highest > 1 + 1e-3:
            what = f"pixels reach from {lowest:.3g} to {highest:.3g}, outside [0, 1]"
            remedy = "give pixels in [0, 1] before normalisation, and the mean and std they were normalised with"
            problems.append(Problem(where, what, remedy))
        return problems


class Splits(NamedTuple):
    """Two disjoint parts of a data set."""

    public: Dataset
    """Training images: what clients train on and what an attacker may know about such images."""
    private: Dataset
    """Test images: the ones that are attacked."""

    def identities(self) -> dict[str, str | None]:
        """Say what the files hold, see `Dataset.identity`."""
        return {"public": self.public.identity(), "private": self.private.identity()}
