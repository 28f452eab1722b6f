"""What passes through a model's normalisation layers: the mean and variance of each channel over a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.tree import Tensors
from gradveil.nn.norms import BatchStatistics, FrozenNorm

KINDS = (FrozenNorm, BatchStatistics, _BatchNorm)
"""Normalisations over the batch, or by what was once over it."""


def running_statistics(model: nn.Module) -> Tensors:
    """Return the running statistics that the model carries, as `<layer>.mean` and `<layer>.var`, in order.

    Layers that nothing has passed have the initial 0 and 1, which say nothing: they are left out.
    """
    found: Tensors = {}
    for path, module in model.named_modules():
        if not isinstance(module, KINDS):
            continue
        mean, var = module.running_mean, module.running_var
        if mean is not None and var is not None and bool((mean != 0).any() | (var != 1).any()):
            found[f"{path}.mean"], found[f"{path}.var"] = mean, var
    return found


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[Tensors]:
    """Collect mean and variance [channels] of what enters each normalisation layer during the forward passes inside."""
    found: Tensors = {}

    def record(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            over = (0, *range(2, x.dim()))
            mean = x.mean(over, keepdim=True)
            found[f"{path}.mean"] = mean.flatten()
            found[f"{path}.var"] = torch.square(x - mean).mean(over).flatten()

        return hook

    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, KINDS)]
    hooks = [module.register_forward_pre_hook(record(path)) for path, module in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
