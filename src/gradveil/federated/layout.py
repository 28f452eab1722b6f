"""The description of a model's updates, which the receiver of one knows: names, shapes, dtypes, and their digest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What values may be; a dtype's code is its place."""
DIGEST = 8
"""Bytes of the digest of a layout or of a public mask."""
SHOWN = 8
"""Differences that one error lists; an update of another model differs everywhere."""


class WireError(GradveilError):
    """An encoded update is damaged, of another version, or not an update of the expected model."""


def damaged(what: str, where: str = "update") -> WireError:
    """Build the error for bytes that no sender writes."""
    return WireError(Problem(where, what, "have it sent again; if it comes again, do not trust the sender"))


class Described(NamedTuple):
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Write as `float32 [6, 3, 5, 5]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Layout(Mapping[str, Described]):
    """The names, shapes and dtypes of a model's updates, which the receiver knows and compares.

    >>> print(Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}))
    w: float32 [2, 3]; b: float32 [2]
    """

    tensors: Mapping[str, Described] = field(default_factory=dict[str, Described])

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Describe parameters, or an update of them."""
        return Layout({name: Described(tuple(value.shape), value.dtype) for name, value in tensors.items()})

    def __getitem__(self, name: str) -> Described:
        """Return the description of one tensor."""
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self.tensors)

    def __str__(self) -> str:
        """Write all on one line."""
        return "; ".join(f"{name}: {described}" for name, described in self.items())

    def digest(self) -> bytes:
        """Digest names, dtypes and shapes, in whatever order they are: BLAKE2b of their JSON, sorted by name.

        >>> Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}).digest().hex()
        '595c78f1885ea213'
        """
        told = [[name, str(self[name].dtype).removeprefix("torch."), self[name].shape] for name in sorted(self)]
        return blake2b(json.dumps(told, separators=(",", ":")).encode(), digest_size=DIGEST).digest()

    def differences(self, sent: Layout) -> list[Problem]:
        """Say where what was sent is not of this model, with both descriptions."""
        remedy = "send updates of the model that the receiver holds, or give the receiver this model's layout"
        problems = [
            Problem(place_of(name), f"is {sent.get(name, 'missing')}, expected {self[name]}", remedy)
            for name in self
            if sent.get(name) != self[name]
        ]
        problems += [
            Problem(place_of(name), f"is {sent[name]}, and the model has no such tensor", remedy)
            for name in sent
            if name not in self
        ]
        if (more := len(problems) - SHOWN) > 0:
            problems[SHOWN:] = [Problem("update", f"differs in {more} more tensors", remedy)]
        return problems


def on_wire(dtype: torch.dtype, values: torch.dtype | None) -> torch.dtype:
    """Choose the dtype of a tensor's values: the one asked for where it is narrower, else the tensor's own."""
    return dtype if values is None or values.itemsize >= dtype.itemsize else values


def place_of(name: str) -> str:
    """Name a tensor in an error; a stranger's name can do no harm in a terminal or a log."""
    text = repr(name)[1:-1]
    return f"update.{text if len(text) <= 80 else text[:77] + '...'}"
