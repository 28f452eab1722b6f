"""Models as chains of linear layers with invertible elementwise steps between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.tree import Tensors, qualified
from gradveil.nn.module_paths import call_on, evaluating

LARGEST = 8192
"""Most input values of a convolution: their equations are solved at once."""
_ENTRIES = 2**28
"""Most entries of a convolution written as a matrix: 2 GiB."""
_REMEDY = "choose another attack, such as ig; this one is for plain chains of layers (cnn6, lenet-zhu, scheliga-cnn)"
_FAR = -100
_ROUNDED = 1e-2
"""Tolerance of a layer's output, relative to the largest: rounding, in half precision too."""
_CLEAR = 4.0
"""A ReLU output is above zero if it exceeds the most negative value by this factor."""
_SEEN = 0.75
"""Smallest share of an image that the equations must determine; the rest is filled in."""
_EDGE = 1e-9
"""Smallest distance of a value from the ends of a bounded range when the step is inverted."""


@dataclass(frozen=True)
class Bend:
    """An elementwise step and its inverse, where that is known."""

    step: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """The derivative, as a function of the input."""
    known: Callable[[Tensor], Tensor] = torch.isfinite
    """Mask of the outputs that determine their input."""


@dataclass(frozen=True)
class Link:
    """A linear layer, the shapes of its input and output for one image, and the steps that follow it."""

    path: str
    layer: nn.Linear | nn.Conv2d
    taken: tuple[int, ...]
    given: tuple[int, ...]
    bends: tuple[Bend, ...] = ()

    @property
    def equations(self) -> float:
        """Number of equations: of the gradient and of the outputs, half of them after a ReLU, as zeros tell nothing."""
        return self.layer.weight.numel() + prod(self.given) * (0.5 if self.cuts else 1)

    @property
    def cuts(self) -> bool:
        """Return whether a ReLU follows, whose slope is zero or one."""
        return any(bend.known is _above_zero for bend in self.bends)

    @property
    def outer(self) -> bool:
        """Return whether the gradient of one image is an outer product: every input takes part in one output position.

        That is a fully connected layer, or a convolution whose output is one position.
        """
        return isinstance(self.layer, nn.Linear) or prod(self.given[1:]) == 1

    @property
    def weight(self) -> str:
        """The name of the layer's weight."""
        return qualified(self.path, "weight")

    @property
    def bias(self) -> str | None:
        """The name of the layer's bias, if it has one."""
        return None if self.layer.bias is None else qualified(self.path, "bias")


def chained(
    model: nn.Module, params: Tensors, shape: tuple[int, ...], trained: Collection[str]
) -> tuple[tuple[Link, ...], list[Problem]]:
    """Return the links of a model, and the reasons why it is not a chain.

    The model is tested by running it on two images: each module must take the output of the one before it. The second
    image, much larger and of opposite sign, finds limits of activations.
    """
    image = torch.linspace(-0.7, 1, prod(shape)).view(1, *shape).to(next(iter(params.values())))
    results = [_read(model, params, probe, trained) for probe in (image, _FAR * image)]
    links, problems = next((result for result in results if result[1]), results[0])
    return tuple(links), problems


def settles(links: Sequence[Link]) -> bool:
    """Return whether every layer has enough equations for its input; a quarter of the image's may be missing.

    Half the outputs of a ReLU count. A fully connected layer's gradient always determines its input. Equations may be
    dependent, so True only means that analytic reconstruction is worth a try.
    """
    return all(
        isinstance(link.layer, nn.Linear) or link.equations >= prod(link.taken) * (_SEEN if link is links[0] else 1)
        for link in links
    )


def _read(
    model: nn.Module, params: Tensors, image: Tensor, trained: Collection[str]
) -> tuple[list[Link], list[Problem]]:
    """Follow one image through a model; return its links, and the reasons why it is not a chain."""
    links: list[Link] = []
    problems: list[Problem] = []
    last = image
    for path, module, inputs, outputs in _passed(model, params, image):
        if not _same(inputs, last):
            source = "the image" if last is image else "the output of the module before it"
            return [], [Problem("model", f"is no plain chain: {path} does not take {source}", _REMEDY)]
        last = outputs
        bend = _bend(module)
        if isinstance(module, nn.Linear | nn.Conv2d):
            link = Link(path, module, tuple(inputs.shape[1:]), tuple(outputs.shape[1:]))
            problems += _layer_problems(model, link, links, trained)
            if not _is_linear(link, params, inputs, outputs):
                what = f"'{path}' is a {type(module).__name__} that computes more than its weight and bias"
                problems.append(Problem("model", what, _REMEDY))
            links.append(link)
        elif bend is not None and links:
            links[-1] = replace(links[-1], bends=(*links[-1].bends, bend))
        elif not _same(inputs, outputs):  # otherwise it only reshapes, or is the identity here
            what = f"'{path}' is a {type(module).__name__}, whose output does not determine its input"
            problems.append(Problem("model", what, _REMEDY))
    if not links or not isinstance(links[-1].layer, nn.Linear) or links[-1].bends:
        problems.append(Problem("model", "does not end with a linear classifier", _REMEDY))
    return links, problems


def _is_linear(link: Link, params: Tensors, inputs: Tensor, outputs: Tensor) -> bool:
    """Return whether a layer computes only its weight and bias: a subclass may do more."""
    layer = link.layer
    if link.weight not in params:
        return True  # `_layer_problems` reports that it is not sent
    weight, bias = params[link.weight], None if link.bias is None else params.get(link.bias, layer.bias)
    if isinstance(layer, nn.Linear):
        plain = F.linear(inputs, weight, bias)
    elif layer.padding_mode != "zeros":
        return True  # `_layer_problems` reports the padding
    else:
        plain = F.conv2d(inputs, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    room = _ROUNDED * float(outputs.abs().max().nan_to_num(0.0))
    return plain.shape == outputs.shape and torch.allclose(plain, outputs, rtol=_ROUNDED, atol=room, equal_nan=True)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel() or a.dtype != b.dtype:
        return False
    return torch.allclose(a.flatten(), b.flatten(), rtol=0, atol=0, equal_nan=True)


def _passed(model: nn.Module, params: Tensors, image: Tensor) -> list[tuple[str, nn.Module, Tensor, Tensor]]:
    """List the modules without children as they ran, with inputs and outputs; last, the model's answer.

    The answer reveals operations after the last module: without any, it equals that module's output.
    """
    ran: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    inputs: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(_copy(next(iter((*args, *kwargs.values())), None)))

    def after(path: str) -> Callable[..., None]:
        def record(module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: object) -> None:
            ran.append((path, module, inputs.pop(), _copy(output)))

        return record

    hooks = []
    for path, module in model.named_modules():
        if not any(module.children()):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        with evaluating(model), torch.no_grad():
            answer = call_on(model, params, image)
    finally:
        for hook in hooks:
            hook.remove()
    return [*ran, ("its answer", nn.Identity(), answer, answer)]


def _copy(value: object) -> Tensor:
    """Copy a tensor, as a later activation may overwrite it; anything else becomes an empty tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else torch.empty(0)


def _layer_problems(model: nn.Module, link: Link, before: list[Link], trained: Collection[str]) -> list[Problem]:
    """Return the reasons why a layer has no equations."""
    problems: list[Problem] = []
    layer, values, used = link.layer, prod(link.taken), {other.path for other in before}
    if link.weight not in trained:
        problems.append(Problem("update", f"{link.weight} is not sent", _REMEDY))
    for name, value in (("weight", layer.weight), ("bias", layer.bias)):
        uses = sum(other is value for _, other in model.named_parameters(remove_duplicate=False))
        if value is not None and (uses > 1 or link.path in used):
            what = f"uses the {name} of '{link.path}' twice: their gradients are summed"
            problems.append(Problem("model", what, _REMEDY))
    if isinstance(layer, nn.Linear):
        if len(link.taken) != 1:
            problems.append(Problem("model", f"'{link.path}' acts on several tokens of one image", _REMEDY))
        return problems
    if layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        what = f"'{link.path}' is a convolution with groups, named padding, or padding other than zeros"
        problems.append(Problem("model", what, _REMEDY))
    if values * prod(link.given) > _ENTRIES:
        what = f"'{link.path}' as a matrix has {values} x {prod(link.given)} entries, more than {_ENTRIES}"
        problems.append(Problem("model", what, "give smaller images, or choose ig"))
    if values > LARGEST:
        what = f"'{link.path}' takes {values} values, and their equations are solved at once"
        problems.append(Problem("model", what, f"give images of at most {LARGEST} values per layer, or choose ig"))
    return problems


def _bend(module: nn.Module) -> Bend | None:
    """Return the inverse of an activation, if it is known."""
    if isinstance(module, nn.Sigmoid):
        return Bend(
            torch.sigmoid,
            lambda x: torch.logit(x.clamp(_EDGE, 1 - _EDGE)),
            lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z)),
        )
    if isinstance(module, nn.Tanh):
        return Bend(torch.tanh, lambda x: x.clamp(_EDGE - 1, 1 - _EDGE).atanh(), lambda z: 1 - torch.tanh(z).square())
    if isinstance(module, nn.LeakyReLU) and module.negative_slope > 0:
        slope = module.negative_slope
        return Bend(
            lambda z: F.leaky_relu(z, slope),
            lambda x: torch.where(x < 0, x / slope, x),
            lambda z: torch.where(z < 0, slope, 1.0).to(z),
        )
    if isinstance(module, nn.ReLU):
        return Bend(F.relu, lambda x: x.clamp_min(0), lambda z: (z > 0).to(z), _above_zero)
    if isinstance(module, nn.ELU) and module.alpha == 1:
        return Bend(
            F.elu, lambda x: torch.where(x < 0, x.clamp(_EDGE - 1, 0).log1p(), x), lambda z: z.clamp_max(0).exp()
        )
    if isinstance(module, nn.Softplus) and module.beta == 1:
        # log(e^x - 1), written so that e^x does not overflow.
        return Bend(F.softplus, lambda x: x + torch.log(-torch.expm1(-x.clamp_min(_EDGE))), torch.sigmoid)
    return None


def _above_zero(x: Tensor) -> Tensor:
    """Mark outputs that are surely above zero; negative values measure the error of a reconstructed zero."""
    return x > _CLEAR * (-x).amax().clamp_min(0)
