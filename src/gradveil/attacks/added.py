"""What known noise adds to an update, whatever the images: who is told the noise can take it off what was sent.

An attacker who is told the noise may put the same noise into what he simulates. But once it is as long as the gradient,
two updates that share it look alike whatever the images; taken off the sent update, nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.noise import Key, Laplace, Noise, Normal
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch

LEAST = 1e-3
"""Share of its length by which what is added may seem to depend on the images."""
ROUNDING = 1e-6
"""The same, of the length of the update: in float32 the difference of two updates is known no better."""


def size(described: Noise) -> float:
    """Return the standard deviation of normal or Laplacian noise, zero of all other.

    >>> size(Noise((2,), Normal(3.0)))
    3.0
    """
    law = described.law
    return law.std if isinstance(law, Normal) else law.scale * 2**0.5 if isinstance(law, Laplace) else 0.0


def stages(spec: Mapping[str, Noise], params: Mapping[str, Tensor]) -> list[list[str]]:
    """List the names of the additive noise of each stage: normal or Laplacian, named and shaped like a parameter."""
    found: dict[str, list[str]] = {}
    for name, described in spec.items():
        for parameter, value in params.items():
            if name.endswith(f".{parameter}") and described.shape == tuple(value.shape) and size(described):
                found.setdefault(name.removesuffix(parameter), []).append(name)
    return list(found.values())


def candidates(shape: tuple[int, ...], bounds: tuple[Tensor, Tensor], classes: int, key: Key) -> tuple[Batch, Batch]:
    """Draw two batches of images [V, B, ...] that have nothing in common, each of one class."""
    lower, upper = bounds

    def of_class(number: int) -> Batch:
        uniform = torch.rand(shape, dtype=lower.dtype, generator=key.child(number).generator())
        targets = torch.full(shape[:2], number % classes, device=lower.device)
        return Batch(lower + (upper - lower) * uniform.to(lower.device), targets)

    return of_class(0), of_class(1)


def added(
    rounds: Sequence[tuple[Client, Tensors]],
    batches: tuple[Batch, Batch],
    noise: Sequence[Mapping[str, Tensor]],
    names: Collection[str],
    state: Tensors,
) -> list[Tensors] | None:
    """Return what the noise of these names adds to the update of every round; None if that depends on the images.

    `rounds` are the clients of the rounds and their parameters. What noise adds depends on the images where it enters
    the steps of local training, or where what is not linear follows it.
    """
    off = [{n: torch.zeros_like(v) if n in names else v for n, v in drawn.items()} for drawn in noise]
    first, second = (_differences(rounds, batch, noise, off, state) for batch in batches)
    for (one, sent), (other, _) in zip(first, second, strict=True):
        apart = _length({name: one[name] - other[name] for name in one})
        if not bool((apart <= LEAST * _length(one) + ROUNDING * _length(sent)).all()):
            return None
    return [one for one, _ in first]


def _differences(
    rounds: Sequence[tuple[Client, Tensors]],
    batch: Batch,
    noise: Sequence[Mapping[str, Tensor]],
    off: Sequence[Mapping[str, Tensor]],
    state: Tensors,
) -> list[tuple[Tensors, Tensors]]:
    """Return what is sent with minus without the noise, and without it, by the same clients round by round."""
    found: list[tuple[Tensors, Tensors]] = []
    noisy = quiet = state
    for (client, params), drawn, silent in zip(rounds, noise, off, strict=True):
        sent, noisy = client.updates(params, batch, drawn, noisy)
        without, quiet = client.updates(params, batch, silent, quiet)
        found.append(({name: sent[name] - without[name] for name in without}, without))
    return found


def _length(update: Mapping[str, Tensor]) -> Tensor:
    """Return the length of every victim's update."""
    return torch.stack([value.flatten(1).square().sum(1) for value in update.values()]).sum(0).sqrt()
