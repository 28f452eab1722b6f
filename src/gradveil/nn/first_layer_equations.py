"""First layers whose gradient reveals the input exactly.

If z_t is the gradient at output t of a linear layer and x_t its input there, the weight's gradient is
dW = sum_t z_t x_t^T. A parameter that is added to the output has the z_t as its gradient, so that x solves linear
equations: the bias of a fully connected layer (Phong et al. 2017), or the position embedding of a vision transformer
(Lu et al. 2022, "APRIL").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.tree import Tensors, qualified
from gradveil.nn.module_paths import at, call_on, caught_inputs, evaluating, first_layer

_REMEDY = "choose another attack, such as ig; this one is for models whose first layer reveals its input"
_EQUAL = 1e-4
"""Relative difference up to which gradients are equal."""


@dataclass(frozen=True)
class InputEquations:
    """Equations for the first layer's T inputs: dW = sum_t z_t x_t^T."""

    path: str
    errors: str
    """The parameter whose gradient holds the z_t."""
    read: Callable[[Tensor], Tensor]
    """[V, gradient of that parameter] -> [V, T, D]."""
    pixels: Tensor
    """[T, P] index of the pixel of each value of x_t."""

    @property
    def weight(self) -> str:
        """Name of the layer's weight."""
        return qualified(self.path, "weight")


def shown(
    model: nn.Module, params: Tensors, shape: tuple[int, ...], trained: Collection[str]
) -> tuple[InputEquations | None, list[Problem]]:
    """Return the equations for the input of the model's first layer, or the reason why there are none.

    The model is tested by running it: the first layer that runs must take every pixel exactly once, and a trained
    parameter must have the same gradient as the layer's outputs.
    """
    example = next(iter(params.values()))
    path = first_layer(model, example.new_zeros((1, *shape)))
    layer = at(model, path)
    kind = type(layer).__name__
    pixels = _pixels(model, path, layer, shape, example)
    if pixels is None:
        parts = "pixels or of their patches" if len(shape) == 3 else "inputs"
        what = f"begins with a {kind} '{path}', not with a linear layer of the {prod(shape)} {parts}"
        return None, [Problem("model", what, _REMEDY)]
    outputs = _outputs(layer)
    if qualified(path, "weight") not in trained:
        return None, [Problem("update", f"{qualified(path, 'weight')} is not sent", _REMEDY)]
    if len(pixels) > outputs:
        what = f"has {len(pixels)} patches and only {outputs} outputs of each: more unknowns than equations"
        return None, [Problem("model", what, _REMEDY)]
    addend = _addend(model, params, path, shape, len(pixels), outputs, trained)
    if addend is None:
        what = f"no sent parameter is added to each output of its first layer '{path}' alone (a bias, positions)"
        return None, [Problem("model", what, _REMEDY)]
    if _is_shared(model, params, path, shape):
        what = f"uses the weight of its first layer '{path}' again: its gradient is not of that layer's input alone"
        return None, [Problem("model", what, _REMEDY)]
    return InputEquations(path, *addend, pixels), []


def _is_shared(model: nn.Module, params: Tensors, path: str, shape: tuple[int, ...]) -> bool:
    """Return whether another layer also uses the first layer's weight and contributes to its gradient."""
    weight, image = params[qualified(path, "weight")].detach().clone().requires_grad_(), _some_image(params, shape)
    layer, calls = at(model, path), list[tuple[Tensor, Tensor]]()

    def record(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((inputs[0].detach(), output))

    hook = layer.register_forward_hook(record)
    try:
        with evaluating(model), torch.enable_grad():
            loss = _some_loss(call_on(model, {**params, qualified(path, "weight"): weight}, image))
            whole, error = torch.autograd.grad(loss, [weight, calls[0][1]])
    finally:
        hook.remove()
    # The weight's gradient by this one use, from the same errors: what is missing comes from another use.
    (of_layer,) = torch.autograd.grad(call_on(layer, {"weight": weight}, calls[0][0]), weight, error)
    return bool((whole - of_layer).norm() > max(_EQUAL, 10 * torch.finfo(of_layer.dtype).eps) * of_layer.norm())


def _some_image(params: Tensors, shape: tuple[int, ...]) -> Tensor:
    example = next(iter(params.values()))
    return torch.linspace(-1, 1, prod(shape)).cos().view(1, *shape).to(example)


def _some_loss(answer: Tensor) -> Tensor:
    # Cross-entropy with the first output as the class: a loss in which every output has a gradient.
    return answer.flatten(1).logsumexp(1).sum() - answer.flatten(1)[:, 0].sum()


def _pixels(model: nn.Module, path: str, layer: nn.Module, shape: tuple[int, ...], example: Tensor) -> Tensor | None:
    """Return the pixel index of each input of the layer, [T, P]; None if its inputs are not the pixels, each once."""
    count = prod(shape)
    # The pixel index as a fraction of a power of two is exact, and in [0, 1), which models may require.
    scale = 1 << count.bit_length()
    numbered = torch.arange(count, dtype=example.dtype, device=example.device).view(1, *shape) / scale
    with evaluating(model), torch.no_grad(), caught_inputs(model, path) as caught:
        model(numbered)
    inputs = caught[0]
    if isinstance(layer, nn.Linear):
        tokens = inputs.reshape(-1, layer.in_features)
    elif isinstance(layer, nn.Conv2d) and _tiles(layer, shape) and inputs.shape == numbered.shape:
        size = (layer.kernel_size[0], layer.kernel_size[1])
        # [K, T] turned into [T, K], a patch's values in the order of the weight: channel, row, column.
        tokens = F.unfold(inputs, size, stride=size)[0].T
    else:
        return None
    if tokens.numel() != count or not torch.equal(tokens.flatten().sort().values, numbered.flatten()):
        return None
    return (tokens * scale).long()


def _tiles(layer: nn.Conv2d, shape: tuple[int, ...]) -> bool:
    """Return whether a convolution cuts images of this shape into patches without overlap or gaps."""
    divides = all(side % kernel == 0 for side, kernel in zip(shape[1:], layer.kernel_size, strict=True))
    plain = layer.groups == 1 and layer.stride == layer.kernel_size and set(layer.dilation) == {1}
    return divides and plain and layer.padding in ((0, 0), "valid")


def _outputs(layer: nn.Module) -> int:
    return int(layer.out_features) if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]


def _addend(
    model: nn.Module,
    params: Tensors,
    path: str,
    shape: tuple[int, ...],
    tokens: int,
    outputs: int,
    trained: Collection[str],
) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Return the parameter with the gradient of the layer's outputs, by one backward pass, and how to read it."""
    live = {name: value.detach().clone().requires_grad_(name in trained) for name, value in params.items()}
    answers: list[Tensor] = []

    def record(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        answers.append(output)

    hook = at(model, path).register_forward_hook(record)
    try:
        with evaluating(model), torch.enable_grad():
            loss = _some_loss(call_on(model, live, _some_image(params, shape)))
            names = [name for name in params if name in trained and name != qualified(path, "weight")]
            *grads, error = torch.autograd.grad(loss, [*(live[n] for n in names), answers[0]], allow_unused=True)
    finally:
        hook.remove()
    if error is None or not bool(error.any()):
        return None
    channels_first = isinstance(at(model, path), nn.Conv2d)
    # The z_t of one image [T, outputs]: a convolution has its outputs in front.
    wanted = error[0].flatten(1).T if channels_first else error.reshape(-1, outputs)
    for name, grad in zip(names, grads, strict=True):
        for outputs_first in (False, True):
            rows = None if grad is None else _rows(grad.unsqueeze(0), outputs, outputs_first)
            if rows is not None and (first := _index(rows[0], wanted)) is not None:
                return name, _reader(outputs, outputs_first, first, tokens)
    return None


def _rows(value: Tensor, outputs: int, channels_first: bool) -> Tensor | None:
    """Read [V, ...] as [V, rows, outputs], the outputs last, or first as in a feature map."""
    flat = value.flatten(1)
    if flat.shape[1] % outputs:
        return None
    return flat.unflatten(1, (outputs, -1)).transpose(1, 2) if channels_first else flat.unflatten(1, (-1, outputs))


def _index(rows: Tensor, wanted: Tensor) -> int | None:
    """Return the index at which the wanted rows start, if they occur."""
    size = wanted.norm()
    for first in range(len(rows) - len(wanted) + 1):
        if (rows[first : first + len(wanted)] - wanted).norm() <= _EQUAL * size:
            return first
    return None


def _reader(outputs: int, channels_first: bool, first: int, tokens: int) -> Callable[[Tensor], Tensor]:
    def read(value: Tensor) -> Tensor:
        rows = _rows(value, outputs, channels_first)
        assert rows is not None, "_addend read the parameter in the same way"
        return rows[:, first : first + tokens]

    return read
