"""A model run on other tensors than its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call


def call_on(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor, *, strict: bool = False) -> Tensor:
    """Run a model on tensors that take the place of its own, by name, and leave its own where they were.

    `torch.func.functional_call` by itself does not, where a module is registered under two names (`[block] * 3` in a
    `ModuleList`): such a module keeps what it was lent (torch 2.13).

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> model, own = nn.Sequential(layer, layer), layer.weight
    >>> _ = call_on(model, {"0.weight": own.detach() + 1}, own.detach())
    >>> layer.weight is own
    True
    """
    slots = [kept for module in model.modules() for kept in (vars(module)["_parameters"], vars(module)["_buffers"])]
    own = [dict(kept) for kept in slots]
    try:
        return functional_call(model, dict(tensors), (inputs,), strict=strict)
    finally:
        for kept, before in zip(slots, own, strict=True):
            kept.update(before)
