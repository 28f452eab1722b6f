"""Examples that a separation of the mixed rows of a first layer shows: what a server reads without touching the model.

No row of the gradient needs to hold a single example. The rows of dW = D X span all examples of a batch, and
independent component analysis finds them there (`gradveil.attacks.closed_form.independent_images`). The attack itself
is run, once, on the rows that are about to be sent, and its answers are compared with the client's own examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.independent_images import differences, independent, spanned, whitening
from gradveil.core.noise import Key

MOST = 64
"""Largest number of examples that are separated: with more, the separation hardly converges."""
_COST = 2**34
"""Number of multiplications up to which rows are separated."""
_STEPS = 100
"""Number of steps that a separation usually takes, for its cost."""
_LIKE = 0.1
"""Mean squared error of an example that is separated, as a share of its variance: an image of 20 dB or more."""


def first_layer(model: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return the path of the first layer with weights if it is linear and takes all values of an example."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            fits = isinstance(module, nn.Linear) and module.in_features == prod(shape)
            return path if fits else None
    return None


def separable(rows: Tensor, examples: int, shape: tuple[int, ...]) -> bool:
    """Return whether rows [h, n] of so many examples can be separated, and at a bounded cost."""
    high, wide = rows.shape
    features = 3 * wide if len(shape) == 3 else wide
    cost = _STEPS * 2 * examples**2 * features + high**2 * (wide + high)
    return len(shape) in (1, 3) and 2 <= examples <= min(MOST, high - 1, wide) and cost <= _COST


def separated(inputs: Tensor, rows: Tensor) -> frozenset[int]:
    """Return the indices of the examples [B, ...] that a separation of rows [h, n] shows; none if it costs too much.

    An example is shown by a component that differs from it, up to a factor and a constant, by less than a tenth of its
    variance.
    """
    shape, truth = tuple(inputs.shape[1:]), inputs.detach().flatten(1).double()
    rows = rows.detach().double()
    if not separable(rows, len(truth), shape) or not bool(rows.isfinite().all()) or not bool(rows.any()):
        return frozenset()
    span = spanned(rows[None], len(truth)).right
    features = differences(span, shape)
    turn = whitening(features)
    start = torch.randn(1, len(truth), len(truth), generator=Key(0, ("separated",)).generator()).to(rows)
    components = (independent(turn @ features, start) @ turn @ span)[0]
    alike = _standardised(truth) @ _standardised(components).T
    return frozenset((1 - alike.square().amax(1) < _LIKE).nonzero().flatten().tolist())


def separated_from(model: nn.Module, inputs: Tensor, sent: Mapping[str, Tensor]) -> tuple[str, frozenset[int]]:
    """Return the first layer's path and the examples that a separation of its sent rows shows."""
    path = first_layer(model, tuple(inputs.shape[1:]))
    rows = None if path is None else sent.get(f"{path}.weight" if path else "weight")
    return path or "", frozenset() if rows is None else separated(inputs, rows)


def _standardised(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
