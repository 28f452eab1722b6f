"""The noise that a client adds to each parameter of its update, next to the update without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gradveil.core.noise import Laplace, NoiseSpec, Normal
from gradveil.core.tree import Tensors

NOISE, QUIET = "layer_noise", "layer_quiet"
"""Tensors [V, P]: root mean squares of the noise in each parameter, and of the update without noise."""


def additive(spec: NoiseSpec, params: Collection[str]) -> list[str]:
    """Return the names of the noise that a client adds to its update: a normal or Laplace tensor per parameter."""
    return [
        name
        for name, noise in spec.items()
        if isinstance(noise.law, Normal | Laplace)
        and name.startswith(("step.", "send."))
        and name.endswith(tuple(f".{param}" for param in params))
    ]


def layer_noise(spec: NoiseSpec, drawn: Tensors, sent: Tensors, update: Callable[[Tensors], Tensors]) -> Tensors:
    """Measure the noise in each parameter: what was sent minus what the same clients send with their noise off.

    `drawn` and `sent` have leading V; `update` computes what the clients send with other noise. Empty for clients that
    add no noise to their update.
    """
    names = additive(spec, sent)
    if not names:
        return {}
    quiet = update({**drawn, **{name: torch.zeros_like(drawn[name]) for name in names}})
    added = {name: value - quiet[name] for name, value in sent.items()}
    return {NOISE: _root_mean_squares(added), QUIET: _root_mean_squares(quiet)}


def _root_mean_squares(update: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.double().flatten(1).square().mean(1).sqrt() for value in update.values()], 1)


def layers_of(tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[dict[str, Any]] | None:
    """Return the noise of each parameter over all clients; None for clients that add none.

    >>> found = layers_of({NOISE: torch.tensor([[3.0], [4.0]]), QUIET: torch.ones(2, 1)}, {"head.bias": 10})
    >>> [(layer["parameter"], round(layer["noise"], 2), layer["update"]) for layer in found or ()]
    [('head.bias', 3.54, 1.0)]
    """
    if NOISE not in tensors:
        return None
    noise, quiet = (tensors[name].square().mean(0).sqrt() for name in (NOISE, QUIET))
    return [
        {"parameter": name, "values": values, "noise": float(noise[place]), "update": float(quiet[place])}
        for place, (name, values) in enumerate(sizes.items())
    ]
