"""Examples that a separation of the mixed rows of a first layer shows: what a server reads without touching the model.

No row of the gradient needs to hold a single example. The rows of dW = D X span all examples of a batch, and
independent component analysis finds them there (`gradveil.attacks.closed_form.independent_images`). The attack itself
is run, once, on the rows that are about to be sent, and its answers are compared with the client's own examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.independent_images import differences, independent, spanned, whitening
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import qualified
from gradveil.nn.module_paths import call_on, caught_inputs, evaluating, first_layer

MOST = 64
"""Largest number of examples that are separated: with more, the separation hardly converges."""
_COST = 2**34
"""Number of multiplications up to which rows are separated."""
_ROWS = 4
"""Random combinations of rows that stand for all of them where those cost too much, as a multiple of the examples."""
_FEATURES = 12288
"""Largest number of features that the separation looks at."""
_SIDE = 6
"""Least side of an image that a vector is taken for."""
_STEPS = 100
"""Number of steps that a separation usually takes, for its cost."""
_LIKE = 0.1
"""Mean squared error of an example that is separated, as a share of its variance: an image of 20 dB or more."""


def separable(rows: Tensor, examples: int, shape: tuple[int, ...]) -> bool:
    """Return whether rows [h, n] of so many examples can be separated, and at a bounded cost."""
    high, wide = rows.shape
    features = min(_FEATURES, 3 * wide if len(shape) == 3 else wide)
    # The steps of the separation, then the rows' Gram matrix and its eigenvectors (`spanned`).
    cost = _STEPS * 2 * examples**2 * features + high**2 * (wide + high)
    return len(shape) in (1, 3) and 2 <= examples <= min(MOST, high - 1, wide) and cost <= _COST


def combined(rows: Tensor, examples: int, shape: tuple[int, ...]) -> Tensor:
    """Return the rows, or random combinations of them, which span the same, where all of them cost too much."""
    few = _ROWS * examples
    if separable(rows, examples, shape) or len(rows) <= few or few * rows.numel() > _COST:
        return rows
    draw = torch.randn(few, len(rows), generator=Key(0).child(Stream.PROBE, 1).generator())
    return draw.to(rows) @ rows


def layouts(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that a server may take the values of an example for: its own, or a square image.

    >>> layouts((3, 4, 5)), layouts((28, 28)), layouts((3072,)), layouts((10,))
    (((3, 4, 5),), ((1, 28, 28),), ((3072,), (3, 32, 32)), ((10,),))
    """
    if len(shape) == 3:
        return (shape,)
    if len(shape) == 2:
        return ((1, *shape),)
    sides = ((channels, isqrt(prod(shape) // channels)) for channels in (3, 1))
    images = ((count, side, side) for count, side in sides if side >= _SIDE and count * side**2 == prod(shape))
    return ((prod(shape),), *images)


def separated(inputs: Tensor, rows: Tensor) -> frozenset[int]:
    """Return the indices of the examples [B, ...] that a separation of rows [h, n] shows; none if it costs too much.

    An example is shown by a component that differs from it, up to a factor and a constant, by less than a tenth of its
    variance.
    """
    truth, rows = inputs.detach().flatten(1).double(), rows.detach()
    if not bool(rows.isfinite().all()) or not bool(rows.any()):
        return frozenset()
    return frozenset[int]().union(*(_shown(truth, rows, shape) for shape in layouts(tuple(inputs.shape[1:]))))


def _shown(truth: Tensor, rows: Tensor, shape: tuple[int, ...]) -> frozenset[int]:
    rows = combined(rows, len(truth), shape)
    if not separable(rows, len(truth), shape):
        return frozenset()
    span = spanned(rows.double()[None], len(truth)).right
    features = differences(span, shape)
    # Every k-th feature, with the least k that leaves no more than the limit.
    features = features[..., :: -(-features.shape[-1] // _FEATURES)]
    turn = whitening(features)
    start = torch.randn(1, len(truth), len(truth), generator=Key(0).child(Stream.PROBE, 0).generator()).to(span)
    components = (independent(turn @ features, start) @ turn @ span)[0]
    alike = _standardised(truth) @ _standardised(components).T
    # 1 - r^2 is the share of an example's variance that the best factor and constant leave.
    return frozenset((1 - alike.square().amax(1) < _LIKE).nonzero().flatten().tolist())


def separated_from(
    model: nn.Module, inputs: Tensor, sent: Mapping[str, Tensor], params: Mapping[str, Tensor] | None = None
) -> tuple[str, frozenset[int]]:
    """Return the first layer's path and the examples that a separation of its sent rows shows.

    That is the layer that runs first, if it combines all values of an example: a linear one, or a convolution whose
    kernel is as large as its input. What it is given is compared, so pixels may be averaged before.
    """
    if not inputs.is_floating_point() or not len(inputs):
        return "", frozenset()
    path = first_layer(model, inputs[:1])
    rows = sent.get(qualified(path, "weight"))
    if rows is None:
        return path, frozenset()
    with evaluating(model), torch.no_grad(), caught_inputs(model, path) as caught:
        call_on(model, params or {}, inputs)
    taken, rows = caught[0].detach(), rows.flatten(1)
    if len(taken) != len(inputs) or taken[0].numel() != rows.shape[1]:
        return "", frozenset()
    shape = inputs.shape if taken.numel() == inputs.numel() else taken.shape
    return path, separated(taken.reshape(shape), rows)


def _standardised(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
