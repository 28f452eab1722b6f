"""Normalisation layers that can be replayed and differentiated twice under `vmap`, and statistics of their inputs.

`vmap(grad)` followed by reverse mode gives silently wrong derivatives for `nn.LayerNorm`, `nn.InstanceNorm` and
training-mode BatchNorm (torch 2.13; confirmed by finite differences). The modules here compute the same values from
elementary operations, whose derivatives are right, and a forward pass does not change their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import fail
from gradveil.core.tree import Tensors


def standardise(x: Tensor, dimensions: Sequence[int], eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps), mean and (biased) variance taken over the given dimensions."""
    over = tuple(dimensions)
    centred = x - x.mean(over, keepdim=True)
    variance = (centred * centred).mean(over, keepdim=True)
    return centred / (variance + eps).sqrt()


def per_channel(value: Tensor, like: Tensor) -> Tensor:
    """Reshape a vector of channels so that it broadcasts over [B, C, ...]."""
    return value.reshape(1, -1, *[1] * (like.dim() - 2))


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimensions, y = (x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(
        self, shape: int | Sequence[int], eps: float = 1e-5, *, affine: bool = True, bias: bool = True
    ) -> None:
        """Start as the plain normalisation: weight 1, bias 0."""
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.shape)) if affine else None
        self.bias = nn.Parameter(torch.zeros(self.shape)) if affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each example (each token) by itself."""
        y = standardise(x, range(-len(self.shape), 0), self.eps)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.shape}, eps={self.eps}"


class _ChannelNorm(nn.Module):
    """A normalisation of [B, C, ...] with one weight and one bias per channel."""

    def __init__(self, channels: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def scaled(self, y: Tensor) -> Tensor:
        """Apply weight and bias."""
        if self.weight is None or self.bias is None:
            return y
        return y * per_channel(self.weight, y) + per_channel(self.bias, y)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.channels}, eps={self.eps}"


class InstanceNorm(_ChannelNorm):
    """Instance normalisation: each channel of each example by its own mean and variance over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, ...]."""
        return self.scaled(standardise(x, range(2, x.dim()), self.eps))


class BatchStatistics(_ChannelNorm):
    """Training-mode batch normalisation: each channel by the batch's mean and variance.

    Forward passes neither compute nor use running statistics. Those of the replaced BatchNorm are kept for attackers:
    the server has them, and the batch's statistics are probably close to them.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, channels: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        """Start without running statistics."""
        super().__init__(channels, eps, affine=affine)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, None, persistent=False)

    def remember(self, kept: Mapping[str, Tensor]) -> None:
        """Store the running statistics of a BatchNorm, unless they are still the initial 0 and 1."""
        mean, var, seen = (kept.get(name) for name in ("running_mean", "running_var", "num_batches_tracked"))
        if mean is not None and var is not None and (seen is None or bool(seen > 0)):
            self.running_mean, self.running_var = mean.clone(), var.clone()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, ...]."""
        return self.scaled(standardise(x, (0, *range(2, x.dim())), self.eps))


class FrozenNorm(_ChannelNorm):
    """Evaluation-mode batch normalisation: fixed statistics as buffers, in training mode too."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        """Start with the statistics of a fresh BatchNorm: mean 0, variance 1."""
        super().__init__(channels, eps, affine=affine)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, ...]."""
        scale = (per_channel(self.running_var, x) + self.eps).sqrt()
        return self.scaled((x - per_channel(self.running_mean, x)) / scale)


NORMS = ("batch", "group", "none")
"""Allowed values of `norm`."""


def norm_layer(kind: str, channels: int, groups: int) -> nn.Module | None:
    """Return the normalisation for a convolution's output by name; None for `"none"`."""
    if kind == "none":
        return None
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind != "group":
        raise fail("norm", f"unknown name '{kind}'", f"choose one of: {', '.join(NORMS)}")
    return group_norm(channels, groups)


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Return a GroupNorm; raise if the groups do not divide the channels."""
    if groups < 1 or channels % groups:
        divisors = ", ".join(str(n) for n in range(1, channels + 1) if channels % n == 0)
        raise fail("groups", f"{groups} groups do not divide {channels} channels", f"choose one of: {divisors}")
    return nn.GroupNorm(groups, channels)


KINDS = (FrozenNorm, BatchStatistics, _BatchNorm)
"""Normalisations by statistics of batches."""


def running_statistics(model: nn.Module) -> Tensors:
    """Return the model's running statistics as `<layer>.mean` and `<layer>.var`, without initial ones (0 and 1)."""
    statistics: Tensors = {}
    for path, module in model.named_modules():
        if not isinstance(module, KINDS):
            continue
        mean, var = module.running_mean, module.running_var
        if mean is not None and var is not None and bool((mean != 0).any() | (var != 1).any()):
            statistics[f"{path}.mean"], statistics[f"{path}.var"] = mean, var
    return statistics


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[Tensors]:
    """Collect mean and variance [channels] of each normalisation layer's input in the forward passes inside."""
    statistics: Tensors = {}

    def record(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            over = (0, *range(2, x.dim()))
            mean = x.mean(over, keepdim=True)
            statistics[f"{path}.mean"] = mean.flatten()
            statistics[f"{path}.var"] = torch.square(x - mean).mean(over).flatten()

        return hook

    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, KINDS)]
    hooks = [module.register_forward_pre_hook(record(path)) for path, module in layers]
    try:
        yield statistics
    finally:
        for hook in hooks:
            hook.remove()
