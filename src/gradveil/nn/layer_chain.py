"""A model as a chain of layers: linear maps with invertible steps between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.tree import Tensors
from gradveil.nn.module_paths import call_on, evaluating

LARGEST = 8192
"""How many values a convolution may take: their equations are solved all at once."""
_ENTRIES = 2**28
"""How many entries a convolution may have that is written as a matrix: 2 GiB."""
_REMEDY = "choose another attack, such as ig; this one is for plain chains of layers (cnn6, lenet-zhu, scheliga-cnn)"
_FAR = -100
_ROUNDED = 1e-2
"""How far a layer's output may lie from what its weight says, beside the largest: rounding, in half precision too."""
_CLEAR = 4.0
"""How many times as large as the largest negative value an output of a ReLU must be, so as not to be a zero itself."""
_SEEN = 0.75
"""What share of an image must be told at least, so that the rest can be filled in."""
_EDGE = 1e-9
"""How near to the ends of a bounded range a value may lie that is taken back through the step."""


@dataclass(frozen=True)
class Bend:
    """An elementwise step: from what came out of it to what went in, where that is known."""

    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """The derivative, by what went in."""
    known: Callable[[Tensor], Tensor] = torch.isfinite
    """Where an output says what the input was."""


@dataclass(frozen=True)
class Link:
    """A linear layer, the shapes of what it takes and gives of one image, and the steps that follow it."""

    path: str
    layer: nn.Linear | nn.Conv2d
    taken: tuple[int, ...]
    given: tuple[int, ...]
    bends: tuple[Bend, ...] = ()

    @property
    def equations(self) -> float:
        """Count those of its gradient and those of its outputs: half of them after a ReLU, whose zeros say nothing."""
        halved = any(bend.known is _above_zero for bend in self.bends)
        return self.layer.weight.numel() + prod(self.given) * (0.5 if halved else 1)

    @property
    def weight(self) -> str:
        """The name of the layer's weight."""
        return _named(self.path, "weight")

    @property
    def bias(self) -> str | None:
        """The name of the layer's bias, if it has one."""
        return None if self.layer.bias is None else _named(self.path, "bias")


def chained(
    model: nn.Module, params: Tensors, shape: tuple[int, ...], trained: Collection[str]
) -> tuple[tuple[Link, ...], list[Problem]]:
    """Read a model as a chain, or say why it is none.

    Nothing is presumed of the model but what it does with two images, the second much larger and of the other sign,
    which shows where a range ends: each module must take what the one before it gave.
    """
    image = torch.linspace(-0.7, 1, prod(shape)).view(1, *shape).to(next(iter(params.values())))
    read = [_read(model, params, probe, trained) for probe in (image, _FAR * image)]
    links, problems = next((each for each in read if each[1]), read[0])
    return tuple(links), problems


def settles(links: Sequence[Link]) -> bool:
    """Say whether every layer has as many equations as values; of the image's a quarter may be missing, and filled in.

    Half the outputs of a ReLU are counted, and a fully connected layer's gradient shows its input whatever comes out
    of it. As many equations need not be as many different ones: this says where a closed form is worth a try.
    """
    return all(
        isinstance(link.layer, nn.Linear) or link.equations >= prod(link.taken) * (_SEEN if link is links[0] else 1)
        for link in links
    )


def _read(
    model: nn.Module, params: Tensors, image: Tensor, trained: Collection[str]
) -> tuple[list[Link], list[Problem]]:
    """Follow one image through a model: its links, and why it is no chain."""
    links: list[Link] = []
    problems: list[Problem] = []
    last = image
    for path, module, taken, given in _passed(model, params, image):
        if not _same(taken, last):
            source = "the image" if last is image else "what the module before it gives"
            return [], [Problem("model", f"is no plain chain: {path} does not take {source}", _REMEDY)]
        last = given
        bend = _bend(module)
        if isinstance(module, nn.Linear | nn.Conv2d):
            link = Link(path, module, tuple(taken.shape[1:]), tuple(given.shape[1:]))
            problems += _layer_problems(model, link, links, trained)
            if not _is_linear(link, params, taken, given):
                what = f"'{path}' is a {type(module).__name__} that does not give what a layer of its weight would give"
                problems.append(Problem("model", what, _REMEDY))
            links.append(link)
        elif bend is not None and links:
            links[-1] = replace(links[-1], bends=(*links[-1].bends, bend))
        elif not _same(taken, given):  # else it reshapes, or does nothing here
            what = f"'{path}' is a {type(module).__name__}, of which what came out does not show what went in"
            problems.append(Problem("model", what, _REMEDY))
    if not links or not isinstance(links[-1].layer, nn.Linear) or links[-1].bends:
        problems.append(Problem("model", "does not end with a linear classifier", _REMEDY))
    return links, problems


def _is_linear(link: Link, params: Tensors, taken: Tensor, given: Tensor) -> bool:
    """Say whether a layer does what its weight says: a class of one's own may do more."""
    layer = link.layer
    if link.weight not in params:
        return True  # said elsewhere: it is not sent
    weight, bias = params[link.weight], None if link.bias is None else params.get(link.bias, layer.bias)
    if isinstance(layer, nn.Linear):
        plain = F.linear(taken, weight, bias)
    elif layer.padding_mode != "zeros":
        return True  # refused for that
    else:
        plain = F.conv2d(taken, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    room = _ROUNDED * float(given.abs().max().nan_to_num(0.0))
    return plain.shape == given.shape and torch.allclose(plain, given, rtol=_ROUNDED, atol=room, equal_nan=True)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        return False
    return torch.allclose(one.flatten(), other.flatten(), rtol=0, atol=0, equal_nan=True)


def _named(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _passed(model: nn.Module, params: Tensors, image: Tensor) -> list[tuple[str, nn.Module, Tensor, Tensor]]:
    """List the modules without children in the order in which they ran, with what each took and gave; the answer last.

    What the model does behind its last module shows there: its answer must be what that gave.
    """
    ran: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: object) -> None:
            ran.append((path, module, taken.pop(), _copy(output)))

        return keep

    taken: list[Tensor] = []

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append(_copy(next(iter((*args, *kwargs.values())), None)))

    leaves = {path: module for path, module in model.named_modules() if not any(module.children())}
    hooks = [hook for path, leaf in leaves.items() for hook in _hooks(leaf, look, note(path))]
    try:
        with evaluating(model), torch.no_grad():
            answer = call_on(model, params, image)
    finally:
        for hook in hooks:
            hook.remove()
    return [*ran, ("its answer", nn.Identity(), answer, answer)]


def _hooks(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list:
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _copy(value: object) -> Tensor:
    """Keep a tensor as it is now, as an activation may work in place; anything else is nothing that a chain passes."""
    return value.detach().clone() if isinstance(value, Tensor) else torch.empty(0)


def _layer_problems(model: nn.Module, link: Link, before: list[Link], trained: Collection[str]) -> list[Problem]:
    """Say why a layer's equations cannot be written down."""
    problems: list[Problem] = []
    layer, values, used = link.layer, prod(link.taken), {other.path for other in before}
    if link.weight not in trained:
        problems.append(Problem("update", f"{link.weight} is not sent", _REMEDY))
    for name, value in (("weight", layer.weight), ("bias", layer.bias)):
        if value is not None and (sum(other is value for other in _parameters(model)) > 1 or link.path in used):
            what = f"uses the {name} of '{link.path}' twice: their gradients are summed"
            problems.append(Problem("model", what, _REMEDY))
    if isinstance(layer, nn.Linear):
        if len(link.taken) != 1:
            problems.append(Problem("model", f"'{link.path}' acts on several tokens of one image", _REMEDY))
        return problems
    if layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        what = f"'{link.path}' is a convolution in groups, or padded by a word or with more than zeros"
        problems.append(Problem("model", what, _REMEDY))
    if values * prod(link.given) > _ENTRIES:
        what = f"'{link.path}' as a matrix has {values} x {prod(link.given)} entries, more than {_ENTRIES}"
        problems.append(Problem("model", what, "give smaller images, or choose ig"))
    if values > LARGEST:
        what = f"'{link.path}' takes {values} values, and their equations are solved all at once"
        problems.append(Problem("model", what, f"give images of at most {LARGEST} values a layer, or choose ig"))
    return problems


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters under every name that they have."""
    return [value for _, value in model.named_parameters(remove_duplicate=False)]


def _bend(module: nn.Module) -> Bend | None:
    """Describe an elementwise step that can be taken back."""
    if isinstance(module, nn.Sigmoid):
        return Bend(
            lambda x: torch.logit(x.clamp(_EDGE, 1 - _EDGE)), lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z))
        )
    if isinstance(module, nn.Tanh):
        return Bend(lambda x: x.clamp(_EDGE - 1, 1 - _EDGE).atanh(), lambda z: 1 - torch.tanh(z).square())
    if isinstance(module, nn.LeakyReLU) and module.negative_slope > 0:
        slope = module.negative_slope
        return Bend(lambda x: torch.where(x < 0, x / slope, x), lambda z: torch.where(z < 0, slope, 1.0).to(z))
    if isinstance(module, nn.ReLU):
        return Bend(lambda x: x.clamp_min(0), lambda z: (z > 0).to(z), _above_zero)
    if isinstance(module, nn.ELU) and module.alpha == 1:
        return Bend(lambda x: torch.where(x < 0, x.clamp(_EDGE - 1, 0).log1p(), x), lambda z: z.clamp_max(0).exp())
    if isinstance(module, nn.Softplus) and module.beta == 1:
        return Bend(lambda x: x + torch.log(-torch.expm1(-x.clamp_min(_EDGE))), torch.sigmoid)
    return None


def _above_zero(x: Tensor) -> Tensor:
    """Mark what is surely above zero: what lies below shows how far from zero a zero may be found."""
    return x > _CLEAR * (-x).amax().clamp_min(0)
