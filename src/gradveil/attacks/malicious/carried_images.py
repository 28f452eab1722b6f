"""The way of an image to a hidden fully connected layer, and convolutions that carry it there.

A kernel that is one at a single place passes its input on, shifted. Several such kernels for one channel keep what a
stride would skip; where channels are too few, kernels average neighbouring pixels. The bias of the first of them keeps
values positive, so that a ReLU changes nothing. The features are then an affine function of the image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from gradveil.nn.module_paths import at, evaluating, features
from gradveil.nn.normalisation import KINDS, FrozenNorm, LayerNorm

NORMS = (*KINDS, LayerNorm, nn.LayerNorm)
"""Normalisations behind a layer whose biases can take the place of the layer's."""
_MARGIN = 0.05
"""Smallest value of a carried pixel, in units of its range: rounding must not close a ReLU."""
_AFFINE = 1e-4
"""Relative difference from an affine function up to which features count as one."""
_DOUBT = 1e-4
"""Variance of a pixel that public images do not show, and of a feature's error, in units of the mean variance."""


@dataclass(frozen=True)
class Way:
    """The modules that an image passes up to a hidden layer, and the next ones behind it."""

    convolutions: tuple[str, ...]
    layer: str
    norm: str
    """The normalisation directly behind the layer, or ""."""
    behind: str
    """The next fully connected layer."""


@dataclass(frozen=True)
class _Run:
    path: str
    module: nn.Module
    taken: tuple[int, ...]
    given: tuple[int, ...]


def way(model: nn.Module, shape: tuple[int, ...]) -> Way | None:
    """Find the first hidden layer that is one matrix, behind convolutions at most; None if there is none.

    A convolution with kernels as large as its input is one matrix too.
    """
    runs = _runs(model, shape)
    linear = [place for place, run in enumerate(runs) if _is_matrix(run)]
    if len(linear) < 2:
        return None
    place = linear[0]
    owners = [run for run in runs[:place] if next(run.module.parameters(), None) is not None]
    convolutions = [run.path for run in owners if isinstance(run.module, nn.Conv2d)]
    if len(convolutions) + sum(isinstance(run.module, FrozenNorm) for run in owners) < len(owners):
        return None
    behind = runs[place + 1]
    norm = behind.path if isinstance(behind.module, NORMS) and hasattr(behind.module, "weight") else ""
    return Way(tuple(convolutions), runs[place].path, norm, runs[linear[1]].path)


def _runs(model: nn.Module, shape: tuple[int, ...]) -> list[_Run]:
    """List the modules without children that run, with the shapes of their inputs and outputs."""
    runs: list[_Run] = []

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            runs.append(_Run(path, module, tuple(inputs[0].shape[1:]), tuple(output.shape[1:])))

        return hook

    leaves = [(path, module) for path, module in model.named_modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(note(path)) for path, module in leaves]
    like = next(model.parameters())
    try:
        with evaluating(model), torch.no_grad():
            model(like.new_zeros((1, *shape)))
    finally:
        for hook in hooks:
            hook.remove()
    return runs


def _is_matrix(run: _Run) -> bool:
    if isinstance(run.module, nn.Linear):
        return len(run.taken) == 1
    module = run.module
    if not isinstance(module, nn.Conv2d) or isinstance(module.padding, str):
        return False
    return module.kernel_size == run.taken[1:] and not any(module.padding) and module.groups == 1


def carrying(model: nn.Module, course: Way, lower: Tensor, upper: Tensor) -> None:
    """Change a model's convolutions such that they carry images between two bounds [C, H, W].

    Fixed normalisations between the convolutions become identities.
    """
    runs = _runs(model, tuple(lower.shape))
    channels, first = len(lower), True
    with torch.no_grad():
        for run in runs[: [run.path for run in runs].index(course.layer)]:
            layer = run.module
            if isinstance(layer, nn.Conv2d):
                sources, channels = channels, _carry(layer, channels)
                if layer.bias is not None:
                    layer.bias[:channels] = 0
                if layer.bias is not None and first:
                    # No kernel is negative: its smallest output is its sum times the lower bound. The bias lifts this
                    # to the margin, so that no ReLU closes.
                    least = layer.weight[:channels].sum((2, 3)) @ lower.amin((1, 2))[:sources]
                    layer.bias[:channels] = _MARGIN * (upper - lower).max() - least
                first = False
            if isinstance(layer, FrozenNorm) and layer.weight is not None and layer.bias is not None:
                layer.running_mean[:channels] = 0
                layer.running_var[:channels] = 1
                # Cancels the division by sqrt(var + eps).
                layer.weight[:channels] = (1 + layer.eps) ** 0.5
                layer.bias[:channels] = 0


def _carry(layer: nn.Conv2d, channels: int) -> int:
    """Let a convolution pass the first input channels on. Returns the number of output channels that hold them."""
    outputs = len(layer.weight)
    # A stride of s sees each pixel at one of s x s offsets around the kernel's centre: the others would be repetitions.
    sides = [
        range((k - min(k, s)) // 2, (k - min(k, s)) // 2 + min(k, s))
        for k, s in zip(layer.kernel_size, layer.stride, strict=True)
    ]
    offsets = list(product(*sides))
    parts = min(len(offsets), max(1, outputs // channels))
    used = min(outputs, channels * parts)
    layer.weight[:used] = 0
    for channel in range(channels):
        for part in range(parts):
            chosen = offsets[part::parts]
            for row, column in chosen:
                # Where outputs are fewer than channels, several channels share one, which then holds their mean.
                layer.weight[(channel * parts + part) % used, channel, row, column] = 1.0
    layer.weight[:used] /= layer.weight[:used].sum((1, 2, 3), keepdim=True)
    return used


def carried(model: nn.Module, course: Way, shape: tuple[int, ...]) -> int:
    """Count the features, the first of those that the layer takes, that hold the image in a model that carries it."""
    runs = {run.path: run for run in _runs(model, shape)}
    features_taken, channels = prod(runs[course.layer].taken), shape[0]
    if not course.convolutions:
        return features_taken
    for path in course.convolutions:
        layer = at(model, path)
        assert isinstance(layer, nn.Conv2d)
        channels = _carry(copy.deepcopy(layer).requires_grad_(False), channels)
    # Features are flattened channel by channel: the carried ones come first.
    return channels * (features_taken // runs[course.convolutions[-1]].given[0])


def is_carried(model: nn.Module, course: Way, images: Tensor) -> bool:
    """Return whether the features that should hold an image are an affine function of it, between two images."""
    copied, shape = copy.deepcopy(model), tuple(images.shape[1:])
    carrying(copied, course, images.amin(0), images.amax(0))
    with torch.no_grad(), evaluating(copied):
        inputs = torch.cat([images, images.mean(0, keepdim=True)])
        values = features(copied, inputs, course.layer).flatten(1)[:, : carried(copied, course, shape)]
    apart = (values[:2].mean(0) - values[2]).norm()
    return bool(apart <= _AFFINE * (values[0] - values[1]).norm())


@dataclass(frozen=True)
class Decoder:
    """Likeliest images of carried features: x = mean + gain (f - f(mean)), by the law of public images."""

    mean: Tensor
    at_mean: Tensor
    gain: Tensor

    @staticmethod
    def fitted(model: nn.Module, course: Way, public: Tensor) -> Decoder | None:
        """Fit the decoder of a model that carries images; None if its features are the pixels."""
        if not course.convolutions:
            return None
        images = public.flatten(1).double()
        mean = public.mean(0, keepdim=True).requires_grad_()
        count = carried(model, course, tuple(public.shape[1:]))
        with evaluating(model), torch.enable_grad():
            values = features(model, mean, course.layer).flatten()[:count]
            eye = torch.eye(count, dtype=values.dtype, device=values.device)
            (slopes,) = torch.autograd.grad(values, mean, eye, is_grads_batched=True)
        slope = slopes.flatten(1).double()
        spread = (images - images.mean(0)) / len(images) ** 0.5
        doubt = _DOUBT * spread.square().sum() / images.shape[1]
        # S A' and A S A' with the covariance S = spread' spread + doubt, which is never written down.
        seen = spread @ slope.T
        crossed = spread.T @ seen + doubt * slope.T
        own = slope @ crossed
        own.diagonal().add_(_DOUBT * own.diagonal().mean())
        gain = torch.linalg.solve(own, crossed.T).T
        return Decoder(images.mean(0), values.detach().double(), gain)

    def __call__(self, values: Tensor) -> Tensor:
        """Decode features [n, F] to flattened images [n, N]."""
        return self.mean + (values - self.at_mean) @ self.gain.T
