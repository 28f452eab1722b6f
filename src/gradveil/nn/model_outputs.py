"""Logits of models that return more than a tensor: an object or dictionary with `logits`, or a tuple that starts so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.errors import FOREIGN
from gradveil.nn.copyable import copyable


def logits_in(outputs: Any) -> Tensor | None:
    """Return the logits among a model's outputs, None if nothing shows which they are.

    >>> logits_in({"logits": torch.zeros(1, 2), "hidden_states": None})
    tensor([[0., 0.]])
    """
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return named
    first = outputs[0] if isinstance(outputs, tuple) and outputs else None
    rest = outputs[1:] if isinstance(outputs, tuple) else ()
    alone = isinstance(first, Tensor) and first.dim() == 2 and not any(_alike(first, other) for other in rest)
    return first if alone else None


def _alike(first: Tensor, other: Any) -> bool:
    """Return whether another output has the shape of logits, too, so that nothing tells them apart."""
    return isinstance(other, Tensor) and other.shape == first.shape


@dataclass(eq=False)
class LogitsOnly:
    """The forward pass of a model, without what it returns next to its logits."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code."""
        outputs = self.forward(*args, **kwargs)
        logits = None if isinstance(outputs, Tensor) else logits_in(outputs)
        return outputs if logits is None else logits


def returning_logits(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a copy of a model that returns its logits alone; the model itself if it does, or fails on the inputs."""
    other = deepcopy(model)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            outputs = other(inputs.detach().clone())
    except FOREIGN:
        return model
    if isinstance(outputs, Tensor) or logits_in(outputs) is None:
        return model
    return logits_only(model)


def logits_only(model: nn.Module) -> nn.Module:
    """Return a copy of a model that returns the logits among its outputs; outputs without them stay as they are."""
    result = deepcopy(model)
    result.forward = LogitsOnly(result.forward)
    return result


def adopted(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a user's model as an audit or a training needs it: it can be copied, returns logits, knows `input_shape`.

    The model itself is returned where it does all of this already, and is never changed.
    """
    try:
        model = returning_logits(copyable(model), inputs)
        if not hasattr(model, "input_shape"):
            model = copy(model)
            object.__setattr__(model, "input_shape", tuple(inputs.shape[1:]))
    except FOREIGN:  # `gradveil.nn.check` reports a model that cannot be copied
        pass
    return model
