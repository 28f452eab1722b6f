"""First layers whose gradient reveals their input exactly.

Where z_t is the gradient at output t of a linear layer and x_t its input there, the weight's gradient is
dW = sum_t z_t x_t^T. If some parameter is added to the output, its gradient holds the z_t themselves, and x is the
solution of linear equations: the bias of a fully connected layer (Phong et al. 2017), the position embedding of a
vision transformer (Lu et al. 2022, "APRIL").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.tree import Tensors
from gradveil.nn.module_paths import at, call_on, caught_inputs, evaluating, first_layer

_REMEDY = "choose another attack, such as ig; this one is for models whose first layer shows its input"
_EQUAL = 1e-4
"""Gradients that differ by this share of their size are one and the same."""


@dataclass(frozen=True)
class InputEquations:
    """Where the equations of the first layer's T inputs are: dW = sum_t z_t x_t^T."""

    path: str
    errors: str
    """The parameter whose gradient holds the z_t."""
    read: Callable[[Tensor], Tensor]
    """[V, gradient of that parameter] -> [V, T, D]."""
    pixels: Tensor
    """[T, P] which pixel each value of x_t is."""

    @property
    def weight(self) -> str:
        """The layer's weight."""
        return f"{self.path}.weight"


def shown(
    model: nn.Module, params: Tensors, shape: tuple[int, ...], trained: Collection[str]
) -> tuple[InputEquations | None, list[Problem]]:
    """Find the equations that show the input of the model's first layer, or say why there are none.

    Nothing is known of the model but what it does: the first layer that runs must take every pixel exactly once, and
    the gradient of its outputs must be that of a parameter which is trained.
    """
    example = next(iter(params.values()))
    path = first_layer(model, example.new_zeros((1, *shape)))
    layer = at(model, path)
    kind = type(layer).__name__
    pixels = _pixels(model, path, layer, shape, example)
    if pixels is None:
        what = f"begins with a {kind} '{path}', not with a linear layer of the {prod(shape)} pixels or of their patches"
        return None, [Problem("model", what, _REMEDY)]
    outputs = _outputs(layer)
    if f"{path}.weight" not in trained:
        return None, [Problem("update", f"{path}.weight is not sent", _REMEDY)]
    if len(pixels) > outputs:
        what = f"has {len(pixels)} patches and only {outputs} outputs of each: more unknowns than equations"
        return None, [Problem("model", what, _REMEDY)]
    found = _added(model, params, path, shape, len(pixels), outputs, trained)
    if found is None:
        what = f"nothing that is sent is added to each output of its first layer '{path}' alone (a bias, positions)"
        return None, [Problem("model", what, _REMEDY)]
    if _used_again(model, params, path, shape):
        what = f"uses the weight of its first layer '{path}' again: the gradient shows more than went into that layer"
        return None, [Problem("model", what, _REMEDY)]
    return InputEquations(path, *found, pixels), []


def _used_again(model: nn.Module, params: Tensors, path: str, shape: tuple[int, ...]) -> bool:
    """Whether the weight of the first layer, which runs once, is another layer's too, and has a gradient from there."""
    weight, image = params[f"{path}.weight"].detach().clone().requires_grad_(), _some_image(params, shape)
    layer, kept = at(model, path), list[tuple[Tensor, Tensor]]()

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append((inputs[0].detach(), output))

    hook = layer.register_forward_hook(keep)
    try:
        with evaluating(model), torch.enable_grad():
            loss = _some_loss(call_on(model, {**params, f"{path}.weight": weight}, image))
            whole, error = torch.autograd.grad(loss, [weight, kept[0][1]])
    finally:
        hook.remove()
    (own,) = torch.autograd.grad(call_on(layer, {"weight": weight}, kept[0][0]), weight, error)
    return bool((whole - own).norm() > max(_EQUAL, 10 * torch.finfo(own.dtype).eps) * own.norm())


def _some_image(params: Tensors, shape: tuple[int, ...]) -> Tensor:
    example = next(iter(params.values()))
    return torch.linspace(-1, 1, prod(shape)).cos().view(1, *shape).to(example)


def _some_loss(answer: Tensor) -> Tensor:
    return answer.flatten(1).logsumexp(1).sum() - answer.flatten(1)[:, 0].sum()


def _pixels(model: nn.Module, path: str, layer: nn.Module, shape: tuple[int, ...], example: Tensor) -> Tensor | None:
    """Say which pixel each input of the layer is, [T, P]; None if they are not the pixels, each once."""
    count = prod(shape)
    # Each pixel's number as a fraction of a power of two: exact, and within [0, 1), as models may insist.
    scale = 1 << count.bit_length()
    numbered = torch.arange(count, dtype=example.dtype, device=example.device).view(1, *shape) / scale
    with evaluating(model), torch.no_grad(), caught_inputs(model, path) as caught:
        model(numbered)
    given = caught[0]
    if isinstance(layer, nn.Linear):
        tokens = given.reshape(-1, layer.in_features)
    elif isinstance(layer, nn.Conv2d) and _cuts(layer, shape) and given.shape == numbered.shape:
        size = (layer.kernel_size[0], layer.kernel_size[1])
        tokens = F.unfold(given, size, stride=size)[0].T
    else:
        return None
    if tokens.numel() != count or not torch.equal(tokens.flatten().sort().values, numbered.flatten()):
        return None
    return (tokens * scale).long()


def _cuts(layer: nn.Conv2d, shape: tuple[int, ...]) -> bool:
    """Whether a convolution cuts images of this shape into patches that neither overlap nor leave anything out."""
    tiles = all(side % kernel == 0 for side, kernel in zip(shape[1:], layer.kernel_size, strict=True))
    plain = layer.groups == 1 and layer.stride == layer.kernel_size and set(layer.dilation) == {1}
    return tiles and plain and layer.padding in ((0, 0), "valid")


def _outputs(layer: nn.Module) -> int:
    return int(layer.out_features) if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]


def _added(
    model: nn.Module,
    params: Tensors,
    path: str,
    shape: tuple[int, ...],
    tokens: int,
    outputs: int,
    trained: Collection[str],
) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Find the parameter whose gradient is that of the layer's outputs, by one backward pass at some image."""
    live = {name: value.detach().clone().requires_grad_(name in trained) for name, value in params.items()}
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        kept.append(output)

    hook = at(model, path).register_forward_hook(keep)
    try:
        with evaluating(model), torch.enable_grad():
            loss = _some_loss(call_on(model, live, _some_image(params, shape)))
            names = [name for name in params if name in trained and name != f"{path}.weight"]
            *grads, error = torch.autograd.grad(loss, [*(live[n] for n in names), kept[0]], allow_unused=True)
    finally:
        hook.remove()
    if error is None or not bool(error.any()):
        return None
    channels_first = isinstance(at(model, path), nn.Conv2d)
    wanted = error[0].flatten(1).T if channels_first else error.reshape(-1, outputs)
    for name, grad in zip(names, grads, strict=True):
        for lies_first in (False, True):
            rows = None if grad is None else _rows(grad.unsqueeze(0), outputs, lies_first)
            if rows is not None and (first := _place(rows[0], wanted)) is not None:
                return name, _reader(outputs, lies_first, first, tokens)
    return None


def _rows(value: Tensor, outputs: int, channels_first: bool) -> Tensor | None:
    """Read [V, ...] as [V, rows, outputs], the outputs last, or first as in a feature map."""
    flat = value.flatten(1)
    if flat.shape[1] % outputs:
        return None
    return flat.unflatten(1, (outputs, -1)).transpose(1, 2) if channels_first else flat.unflatten(1, (-1, outputs))


def _place(rows: Tensor, wanted: Tensor) -> int | None:
    """Return the row at which the wanted rows begin."""
    size = wanted.norm()
    for first in range(len(rows) - len(wanted) + 1):
        if (rows[first : first + len(wanted)] - wanted).norm() <= _EQUAL * size:
            return first
    return None


def _reader(outputs: int, channels_first: bool, first: int, tokens: int) -> Callable[[Tensor], Tensor]:
    def read(value: Tensor) -> Tensor:
        rows = _rows(value, outputs, channels_first)
        assert rows is not None, "the parameter was read so when it was found"
        return rows[:, first : first + tokens]

    return read
