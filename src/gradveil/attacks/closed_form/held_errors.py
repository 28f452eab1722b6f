"""The likeliest image behind a masked or noisy update, with every layer's error held while the image moves.

The gradient of a layer is bilinear in its input and in the error at its outputs. With the errors held, the likelihood
of an update needs no second derivative: the image's forward pass gives the inputs, a pass back gives the errors, and
the misfit of each entry is weighed by its noise. Layers whose gradient is an outer product have given their inputs
already (`outer_products`), and these decide which units of a ReLU are on. The tolerance of exact entries falls
geometrically: a rough fit first, smooth by total variation, since the exact one has many local minima.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from gradveil.attacks.closed_form.outer_products import Factors, factored, nothing
from gradveil.attacks.closed_form.sent_entries import SentEntries
from gradveil.core.tree import Tensors
from gradveil.nn.layer_chain import Link

_SURE = 2.0
"""Deviations above zero from which an input counts as positive."""
_EXACT = 0.01
"""Relative error up to which a measured error is better than the image's own."""
_DECAY = 0.9, 0.99
_SOFT = 1e-4
"""Keeps total variation smooth, as a square."""


@dataclass(frozen=True)
class Tolerance:
    """The error granted to exact entries and inputs, relative to their root mean square: from first to last."""

    first: float
    last: float

    def at(self, share: float) -> float:
        """Return the tolerance after a share of the descent."""
        return self.first * (self.last / self.first) ** share


@dataclass(frozen=True)
class Layer:
    """The evidence of one layer for V target clients: entries sent, and inputs and errors if they were factored."""

    link: Link
    weight: WeighedEntries
    bias: WeighedEntries | None
    errors: Tensor
    """[V, R] measured errors."""
    measured: Tensor
    """[V, R] those to use in the place of the image's own, in the first half of a descent."""
    exact: Tensor
    """[V, R] those to use to the end."""
    inputs: Tensor
    """[V, C] estimates of the layer's inputs."""
    deviation: Tensor
    """[V, C] standard deviations of the estimates; infinite where there are none."""
    scale: Tensor
    """[V] standard deviation of their common factor."""
    hidden: Tensor
    """[V] positive inputs among those without an estimate; -1 if their number is open."""
    below: Tensor
    """[V] upper bound of an input that was cut as small; infinite without bounds."""
    above: Tensor
    """[V] lower bound of an input that was cut as large."""

    def of(self, rows: Tensor) -> Layer:
        """Return the evidence of some of the target clients."""
        tensors = {f.name: value[rows] for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        bias = None if self.bias is None else self.bias.of(rows)
        return replace(self, weight=self.weight.of(rows), bias=bias, **tensors)

    @property
    def factored(self) -> Tensor:
        """Mark the target clients for whom any input is known [V]."""
        return self.deviation.isfinite().any(1)

    @property
    def settled(self) -> Tensor:
        """Mark the target clients for whom the number of positive inputs is known [V]."""
        return self.hidden >= 0


@dataclass(frozen=True)
class WeighedEntries:
    """A parameter's update as sent [V, ...], and how far each entry counts."""

    value: Tensor
    masked: bool
    noise: float
    ordered: bool
    cut: bool
    """Whether the largest entries are set to zero, too."""

    def of(self, rows: Tensor) -> WeighedEntries:
        """Return the update of some of the target clients."""
        return replace(self, value=self.value[rows])

    def misfit(self, gradient: Tensor, tolerance: float) -> Tensor:
        """Return half the squared misfit [V] of a simulated gradient, in units of noise and tolerance.

        An entry that was not sent counts by how far it breaks the order of magnitudes.
        """
        flat, value = gradient.flatten(1), self.value.flatten(1)
        magnitude, sent = value.abs(), value != 0
        count = sent.sum(1, keepdim=True).clamp_min(1) if self.masked else torch.full_like(value[:, :1], value.shape[1])
        size = (magnitude.square().sum(1, keepdim=True) / count).sqrt()
        # The variances add up: the tolerance is relative to the entries sent, the noise is absolute.
        unit = ((tolerance * size).square() + self.noise**2).sqrt().clamp_min(1e-12)
        rest = flat - value
        if self.masked:
            largest = magnitude.amax(1, keepdim=True)
            smallest = torch.where(sent, magnitude, torch.inf).amin(1, keepdim=True).clamp_max(largest)
            # An unsent entry is in order at most as large as the smallest one sent or, if large ones are cut, at least
            # as large as the largest: it breaks the order by the smaller of the two distances.
            less = largest - flat.abs() if self.cut else torch.full_like(flat, torch.inf)
            more = flat.abs() - smallest if self.ordered else torch.zeros_like(flat)
            broken = torch.minimum(more, less).clamp_min(0)
            rest = torch.where(sent, rest, broken)
        return (rest / unit).square().sum(1) / 2


def evidence(
    links: Sequence[Link], update: Mapping[str, Tensor], treated: Mapping[str, SentEntries], dtype: torch.dtype
) -> list[Layer]:
    """Collect the evidence of every layer, and factor the gradients that are outer products."""
    layers = list[Layer]()
    for number, link in enumerate(links):
        positive = number > 0 and bool(links[number - 1].cuts)
        weight, of_weight = update[link.weight].flatten(2), treated[link.weight]
        masked, noise = of_weight.masked(weight[0].numel()), of_weight.noise
        bias = None if link.bias is None else update.get(link.bias)
        if link.bias is not None and bias is not None:
            of_bias = treated[link.bias]
            masked, noise = masked or of_bias.masked(bias[0].numel()), max(noise, of_bias.noise)
        found = list[Factors]()
        for row in range(len(weight)):
            part = weight[row].double(), None if bias is None else bias[row].double()
            if not link.outer:
                found.append(nothing(*part[:1], weight.shape[2]))
                continue
            found.append(factored(*part, noise, masked=masked, positive=positive))
        layers.append(_layer(link, update, treated, found, dtype, masked=masked, positive=positive))
    return layers


def _layer(
    link: Link,
    update: Mapping[str, Tensor],
    treated: Mapping[str, SentEntries],
    found: Sequence[Factors],
    dtype: torch.dtype,
    *,
    masked: bool,
    positive: bool,
) -> Layer:
    of_weight, weight = treated[link.weight], update[link.weight].flatten(2)
    sizes = weight.abs().flatten(1).double()
    sent = (weight != 0).flatten(1).sum(1)
    largest = sizes.amax(1)
    smallest = torch.where(sizes > 0, sizes, torch.inf).amin(1)
    errors, rows = torch.stack([each.errors for each in found]), torch.stack([each.rows for each in found])
    inputs, deviation = torch.stack([each.inputs for each in found]), torch.stack([each.of_inputs for each in found])
    scale = torch.tensor([each.scale for each in found], dtype=torch.double, device=weight.device)
    usable = rows & scale.isfinite().unsqueeze(1)
    of_errors = torch.stack([each.of_errors for each in found])
    size = errors.square().mean(1, keepdim=True).sqrt()
    hidden = torch.full_like(sent, -1)
    below, above = (torch.full_like(largest, torch.inf) for _ in range(2))
    if masked and positive and link.outer and of_weight.noise == 0:
        known = deviation.isfinite().sum(1)
        # Smallest and largest |k_i|. An input of which nothing was sent has all |k_i x_j| >= largest or all <= smallest
        # sent: x_j >= largest / min |k_i|, or x_j <= smallest / max |k_i|.
        reach = torch.where(rows, errors.abs(), torch.inf).amin(1), torch.where(rows, errors.abs(), 0.0).amax(1)
        spare = sent < of_weight.most  # zeros fill the place of the smallest: every other entry was cut as large
        if of_weight.largest:
            above = torch.where(rows.any(1), largest / reach[0], torch.inf)
            # If all nonzero entries are sent or cut, there is one for each nonzero error and positive input: total =
            # count * inputs.
            total, count = sent + of_weight.largest, rows.sum(1)
            whole = spare & (sent > 0) & (total % count.clamp_min(1) == 0)
            missing = total // count.clamp_min(1) - known
            fits = whole & (missing >= 0) & (missing <= inputs.shape[1] - known)
            hidden = torch.where(fits, missing, hidden)
        elif of_weight.ordered:
            # Nothing is cut as large: every nonzero entry was sent, and with it every positive input.
            hidden = torch.where(spare & (sent > 0), 0, hidden)
        if of_weight.ordered:
            below = torch.where(spare, 0.0, smallest / reach[1].clamp_min(1e-300))
            below = torch.where(rows.any(1), below, torch.inf)
    elif not masked:
        hidden = torch.where(deviation.isfinite().all(1), 0, hidden)
    # Rows of an error that is zero send nothing: if the number of inputs is settled, the rest of the rows are such.
    silent = (hidden >= 0).unsqueeze(1) & ~rows & masked
    exact = (usable & (of_errors <= _EXACT * size)) | (silent & scale.isfinite().unsqueeze(1))
    bias = None if link.bias is None or link.bias not in update else _sent(update[link.bias], treated[link.bias], dtype)
    return Layer(
        link,
        _sent(weight, of_weight, dtype),
        bias,
        errors.to(dtype),
        usable | exact,
        exact,
        inputs.to(dtype),
        deviation.to(dtype),
        scale.to(dtype),
        hidden,
        below.to(dtype),
        above.to(dtype),
    )


def _sent(value: Tensor, treated: SentEntries, dtype: torch.dtype) -> WeighedEntries:
    masked = treated.masked(value[0].numel())
    return WeighedEntries(value.to(dtype), masked, treated.noise, treated.ordered, treated.largest > 0)


class HeldErrors:
    """The descent of images, given the evidence of every layer of a chain."""

    def __init__(
        self, layers: Sequence[Layer], params: Tensors, loss: Callable[[Tensor], Tensor], bounds: tuple[Tensor, Tensor]
    ) -> None:
        """Prepare the layers; `loss` maps the outputs [V, K] to the losses [V]."""
        self.layers, self.params, self.loss, self.bounds = layers, params, loss, bounds
        self.range = float((bounds[1] - bounds[0]).mean())
        self.entries = sum(layer.weight.value[0].numel() for layer in layers)

    def descend(
        self, images: Tensor, tolerance: Tolerance, iterations: int, tv: float, measured: float
    ) -> tuple[Tensor, Tensor]:
        """Descend from images [V, C, H, W] by Adam, with the step size falling to zero.

        Returns the images and their misfit [V] at the last tolerance, in nats an entry. `measured` is the share of the
        descent in which measured errors are held. `tv` weighs the total variation of images in [0, 1], in nats.
        """
        x, step = images.clone(), 0.0125 * self.range
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        for number in range(iterations):
            share = number / iterations
            live = x.detach().requires_grad_()
            value = self._misfit(live, tolerance.at(share), early=share < measured)
            value = value + tv / self.range * _variation(live)
            (slope,) = torch.autograd.grad(value.sum(), live)
            mean = mean.lerp(slope, 1 - _DECAY[0])
            square = square.lerp(slope.square(), 1 - _DECAY[1])
            # Adam's correction of the bias of means that start at zero.
            first, second = (1 - decay ** (number + 1) for decay in _DECAY)
            move = mean / first / ((square / second).sqrt() + 1e-12)
            x = torch.clamp(x - step * (0.01 + 0.99 * (1 + cos(pi * share)) / 2) * move, *self.bounds)
        with torch.no_grad():
            return x, self._misfit(x, tolerance.last, early=False) / self.entries

    def _misfit(self, x: Tensor, tolerance: float, *, early: bool) -> Tensor:
        """Return half the squared misfit [V] of the update at images, with the errors held."""
        inputs, outputs = self._forward(x)
        on = [self._on(number, inputs, outputs) for number in range(len(self.layers))]
        total = x.new_zeros(len(x))
        error: Tensor | None = None
        for number in range(len(self.layers) - 1, -1, -1):
            layer, link = self.layers[number], self.layers[number].link
            with torch.no_grad():
                error = self._top(outputs[-1].detach()) if error is None else self._back(number, error, outputs, on)
                flat = error.flatten(1)
                held = layer.measured if early else layer.exact
                error = torch.where(held, layer.errors, flat).view_as(error) if link.outer else error
            # Factored inputs stand for the entries, never both: each entry counts once. Behind noise, the entries have
            # the last word.
            known = layer.factored & (early or layer.weight.noise == 0)
            if link.outer and bool(known.any()):
                total = total + torch.where(known, self._features(number, inputs, outputs, on[number], tolerance), 0.0)
            if not link.outer or not bool(known.all()):
                misfit = layer.weight.misfit(_gradient(link, inputs[number], error), tolerance)
                total = total + torch.where(known, 0.0, misfit)
            if layer.bias is not None and not link.outer:
                total = total + layer.bias.misfit(error.flatten(2).sum(2), tolerance)
        return total

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return every layer's inputs and outputs."""
        inputs, outputs = list[Tensor](), list[Tensor]()
        for layer in self.layers:
            link = layer.link
            x = x.reshape(len(x), *link.taken)
            inputs.append(x)
            weight, bias = self.params[link.weight], None if link.bias is None else self.params[link.bias]
            if isinstance(link.layer, nn.Linear):
                x = F.linear(x, weight, bias)
            else:
                x = F.conv2d(x, weight, bias, link.layer.stride, link.layer.padding, link.layer.dilation)
            outputs.append(x)
            for bend in link.bends:
                x = bend.step(x)
        return inputs, outputs

    def _top(self, outputs: Tensor) -> Tensor:
        """Return the loss's error at the outputs, times the factor by which a clip has shortened the update."""
        with torch.enable_grad():
            live = outputs.requires_grad_()
            (error,) = torch.autograd.grad(self.loss(live).sum(), live)
        layer = self.layers[-1]
        known = layer.measured & layer.scale.isfinite().unsqueeze(1)
        # Least-squares factor between the image's error and the measured one. A clip only shortens.
        product = torch.where(known, error * layer.errors, 0.0).sum(1, keepdim=True)
        size = torch.where(known, error.square(), 0.0).sum(1, keepdim=True)
        factor = torch.where(product > 0, product / size.clamp_min(1e-30), 1.0).clamp_max(1.0)
        return error * factor

    def _back(self, number: int, error: Tensor, outputs: Sequence[Tensor], on: Sequence[Tensor | None]) -> Tensor:
        """Return the error at a layer's outputs, given that at the outputs of the layer above."""
        above, link = self.layers[number + 1].link, self.layers[number].link
        weight = self.params[above.weight]
        if isinstance(above.layer, nn.Linear):
            below = error @ weight
        else:
            shape = (len(error), *above.taken)
            layer = above.layer
            steps: Any = (layer.stride, layer.padding, layer.dilation)
            below = conv2d_input(shape, weight, error, *steps)
        below, z = below.view(len(error), *link.given), outputs[number].detach()
        slopes = torch.ones_like(z)
        for bend in link.bends:
            slopes, z = slopes * bend.slope(z), bend.step(z)
        # Where the inputs of the layer above are factored, they say which units are on, instead of this image.
        gates = on[number + 1]
        return below * (slopes if gates is None else gates.to(slopes).view_as(slopes))

    def _on(self, number: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor | None:
        """Mark the inputs of a layer that are positive [V, C], if it is behind a ReLU and any are factored."""
        layer = self.layers[number]
        flat = inputs[number].detach().flatten(1)
        if not number or not self.layers[number - 1].link.cuts or layer.inputs.shape[1] != flat.shape[1]:
            return None
        known = layer.deviation.isfinite()
        if not bool(known.any()):
            return None
        sure = known & (layer.inputs > _SURE * layer.deviation)
        # Before the ReLU units that are off differ, too: those nearest to zero are hidden rather than the others.
        order = torch.where(known, -torch.inf, outputs[number - 1].detach().flatten(1))
        # The second argsort turns the order into places: the `hidden` largest outputs are chosen.
        chosen = ~known & (order.argsort(1, descending=True).argsort(1) < layer.hidden.unsqueeze(1))
        exact = known & (layer.deviation <= _EXACT * layer.inputs.abs())
        certain = exact | (layer.settled.unsqueeze(1) & ~known)
        return torch.where(certain, sure | chosen, sure | (flat > 0))

    def _features(
        self, number: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], on: Tensor | None, tolerance: float
    ) -> Tensor:
        """Return half the squared misfit [V] of a layer's inputs, up to the uncertain common factor.

        An input without an estimate counts by how far it is from what its absence allows.
        """
        layer, value = self.layers[number], _taking(self.layers[number].link, inputs[number])
        if on is not None:  # units that are on are compared before their ReLU, which passes no slope while it is off
            value = torch.where(on, outputs[number - 1].flatten(1), value)
        known = layer.deviation.isfinite()
        size = layer.inputs.square().sum(1, keepdim=True) / (layer.inputs != 0).sum(1, keepdim=True).clamp_min(1)
        unit = torch.where(known, layer.deviation, 0.0).square() + tolerance**2 * size
        unit = unit.clamp_min(1e-12).sqrt()
        with torch.no_grad():
            # The factor f that minimises sum (value - f inputs)^2 / unit^2 + (f - 1)^2 / scale^2; without a scale the
            # prior is 0.
            share = torch.where(known, layer.inputs / unit.square(), 0.0)
            prior = 1 / layer.scale.unsqueeze(1).clamp_min(1e-6).square()
            factor = ((share * value).sum(1, keepdim=True) + prior) / (
                (share * layer.inputs).sum(1, keepdim=True) + prior
            )
            factor = factor.nan_to_num(1.0).clamp_min(1e-3)
        rest = value - factor * layer.inputs
        below, above = (bound.unsqueeze(1) for bound in (layer.below, layer.above))
        little, much = (value - below).clamp_min(0), (above - value).clamp_min(0)
        # Without an estimate, an input may be below `below` or above `above`.
        free = torch.minimum(little, much)
        free = torch.where(free.isfinite(), free, 0.0)
        if on is not None:
            # If the number of positive inputs is known: units that are on were cut as large, and units that are off are
            # zero.
            certain = torch.where(on, torch.where(much.isfinite(), much, 0.0), value.clamp_min(0))
            free = torch.where(layer.settled.unsqueeze(1), certain, free)
        # The estimate is scaled by the factor, and so is its deviation.
        return (torch.where(known, rest, free) / (unit * factor)).square().sum(1) / 2


def _taking(link: Link, inputs: Tensor) -> Tensor:
    """Return the inputs [V, C] in the order of a weight's columns."""
    layer = link.layer
    if isinstance(layer, nn.Linear):
        return inputs
    return F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride).flatten(1)  # pyright: ignore[reportArgumentType]


def _gradient(link: Link, inputs: Tensor, error: Tensor) -> Tensor:
    """Return the gradient of a layer's weight [V, R, C]."""
    if isinstance(link.layer, nn.Linear):
        return error.unsqueeze(2) * inputs.unsqueeze(1)
    layer = link.layer
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # pyright: ignore[reportArgumentType]
    return error.flatten(2) @ patches.transpose(1, 2)


def _variation(x: Tensor) -> Tensor:
    """Return the total variation [V], of all channels together: edges of one channel are edges of the others."""
    across = F.pad(x[..., 1:] - x[..., :-1], (0, 1))
    down = F.pad(x[..., 1:, :] - x[..., :-1, :], (0, 0, 0, 1))
    return ((across.square() + down.square()).sum(1) + _SOFT).sqrt().flatten(1).sum(1)
