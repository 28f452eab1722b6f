"""A function that torch cannot batch, called once for each member of a batch: slower, and differentiable as often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Plain = Callable[..., Tensor | tuple[Tensor, ...]]
"""A function of tensors that may decide by their values, and write in place."""


def repeated_call(function: Plain, *inputs: Tensor) -> Any:
    """Return function(*inputs); under `torch.vmap`, its answers for each member, one after the other.

    All that it is differentiated by has to be among the inputs, and not in what it closes over.
    """
    return _Repeated.apply(function, *inputs)


class _Repeated(Function):
    """Calls a function with plain tensors; its derivative is such a function again, so that it has one as well."""

    @staticmethod
    def forward(function: Plain, *inputs: Tensor) -> Any:  # type: ignore[override]
        return function(*(each.detach() for each in inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:  # type: ignore[override]
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        places = tuple(place for place, wanted in enumerate(needed) if wanted)
        found = iter(_Repeated.apply(_Derivative(ctx.function, places, len(inputs)), *inputs, *slopes))
        return None, *(next(found) if wanted else None for wanted in needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:  # type: ignore[override]
        inputs, moved = ctx.saved_tensors, tangents[1:]
        places = tuple(place for place, tangent in enumerate(moved) if tangent is not None)
        along = _AlongTangents(ctx.function, places, len(inputs))
        return _Repeated.apply(along, *inputs, *(tangent for tangent in moved if tangent is not None))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Plain, *inputs: Tensor) -> tuple[Any, Any]:
        answers = []
        for member in range(info.batch_size):
            chosen = (x if at is None else x.select(at, member) for x, at in zip(inputs, in_dims[1:], strict=True))
            answers.append(_Repeated.apply(function, *chosen))
        if isinstance(answers[0], Tensor):
            return torch.stack(answers), 0
        return tuple(map(torch.stack, zip(*answers, strict=True))), (0,) * len(answers[0])


@dataclass(frozen=True)
class _Derivative:
    """Returns the products of slopes with the derivatives of a function by some of its inputs."""

    function: Plain
    places: tuple[int, ...]
    count: int

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        # Inputs that are tracked are those of a derivative of this one, which needs its graph.
        nested = any(value.requires_grad for value in values)
        with torch.enable_grad():
            answers, chosen = _tracked(self.function, self.places, values[: self.count])
            answers = (answers,) if isinstance(answers, Tensor) else answers
            return _products(answers, chosen, values[self.count :], nested)


@dataclass(frozen=True)
class _AlongTangents:
    """Returns the derivatives of a function along tangents of some of its inputs.

    The products of slopes with derivatives are linear in the slopes; their own derivative by them is that.
    """

    function: Plain
    places: tuple[int, ...]
    count: int

    def __call__(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        nested = any(value.requires_grad for value in values)
        with torch.enable_grad():
            answers, chosen = _tracked(self.function, self.places, values[: self.count])
            several = (answers,) if isinstance(answers, Tensor) else answers
            slopes = [torch.zeros_like(answer).requires_grad_() for answer in several]
            found = _products(_products(several, chosen, slopes, True), slopes, values[self.count :], nested)
            return found[0] if isinstance(answers, Tensor) else found


def _tracked(function: Plain, places: Sequence[int], values: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Call a function with inputs that are tracked at some places; return its answers and these inputs."""
    inputs = list(values)
    for place in places:
        if not inputs[place].requires_grad:
            inputs[place] = inputs[place].detach().requires_grad_()
    return function(*inputs), [inputs[place] for place in places]


def _products(
    answers: Sequence[Tensor], chosen: Sequence[Tensor], slopes: Sequence[Tensor], keeps_graph: bool
) -> tuple[Tensor, ...]:
    """Return the products of the answers' slopes with their derivatives by chosen inputs; zero if there is none."""
    pairs = [(answer, slope) for answer, slope in zip(answers, slopes, strict=True) if answer.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, chosen))
    return torch.autograd.grad(
        [answer for answer, _ in pairs],
        chosen,
        [slope for _, slope in pairs],
        create_graph=keeps_graph,
        materialize_grads=True,
    )
