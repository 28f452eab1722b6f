"""Modules whose randomness is an argument.

A stochastic module holds its noise in non-persistent buffers, supplied by `functional_call(..., strict=True)`: a client
cannot forget one, and `vmap` (with its default `randomness="error"`) raises for modules that draw random numbers. While
a buffer is an empty placeholder (a plain `model(x)`), the module behaves neutrally.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.core.noise import Noise, NoiseSpec
from gradveil.core.tree import Tensors, qualified

_penalties: ContextVar[list[Tensor] | None] = ContextVar("penalties", default=None)


def penalise(value: Tensor) -> None:
    """Add a scalar to the loss of the current forward pass (a bottleneck's KL term); no effect outside one."""
    collected = _penalties.get()
    if collected is not None:
        collected.append(value)


@contextmanager
def collect_penalties() -> Iterator[list[Tensor]]:
    """Collect the penalties of one forward pass."""
    collected: list[Tensor] = []
    token = _penalties.set(collected)
    try:
        yield collected
    finally:
        _penalties.reset(token)


class Stochastic(nn.Module):
    """Base of modules with named noise. Subclasses call `declare` in `__init__` and implement `noise`.

    The first dimension of every noise tensor is the batch, so that per-example gradients can split it.
    """

    noisy_from: ClassVar[str | None] = None
    """The first submodule after the noise, for a module that passes its whole input through noise: a bottleneck."""

    def declare(self, *names: str) -> None:
        """Create the empty placeholders of the noise buffers."""
        for name in names:
            self.register_buffer(name, torch.empty(0), persistent=False)

    @abstractmethod
    def noise(self, x: Tensor) -> Mapping[str, Noise]:
        """Describe the noise buffers needed for this input."""

    def kept(self) -> Mapping[str, Noise]:
        """Describe tensors that a client draws once and keeps, the same for all examples (no batch dimension)."""
        return {}

    def free(self, kept: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return the kept tensors that local training optimises, in coordinates that suit the optimiser.

        The step length of `adaptive` optimisers (Adam) does not depend on the gradient's norm.
        """
        return {}

    def moved(self, kept: Mapping[str, Tensor], free: Mapping[str, Tensor], adaptive: bool) -> Tensors:
        """Return the kept tensors with new values of `free`."""
        return dict(kept)

    def supplied(self, name: str) -> Tensor | None:
        """Return the noise, or None while the placeholder is there."""
        value = getattr(self, name)
        return None if value.numel() == 0 else value


def kept_noise(model: nn.Module) -> NoiseSpec:
    """Describe the tensors that a client of this model draws once and keeps private, over steps and rounds."""
    return NoiseSpec(
        {
            qualified(path, name): noise
            for path, module in model.named_modules()
            if isinstance(module, Stochastic)
            for name, noise in module.kept().items()
        }
    )


def free_of(model: nn.Module, kept: Mapping[str, Tensor], adaptive: bool) -> Tensors:
    """Return the kept tensors that local training optimises, under the names of `kept_noise`."""
    return {
        name: value
        for path, module in _keeping(model)
        for name, value in _named(path, module.free(_of(path, module, kept), adaptive)).items()
    }


def moved_to(model: nn.Module, kept: Mapping[str, Tensor], free: Mapping[str, Tensor], adaptive: bool) -> Tensors:
    """Return the kept tensors with new values of `free_of`."""
    return {
        name: value
        for path, module in _keeping(model)
        for moved in [module.moved(_of(path, module, kept), _of(path, module, free), adaptive)]
        for name, value in _named(path, moved).items()
    }


def _keeping(model: nn.Module) -> Iterator[tuple[str, Stochastic]]:
    for path, module in model.named_modules():
        if isinstance(module, Stochastic) and module.kept():
            yield path, module


def _named(path: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {qualified(path, name): value for name, value in tensors.items()}


def _of(path: str, module: Stochastic, tensors: Mapping[str, Tensor]) -> Tensors:
    names = {name: qualified(path, name) for name in module.kept()}
    return {name: tensors[whole] for name, whole in names.items() if whole in tensors}


def noise_names(model: nn.Module) -> set[str]:
    """Return the names of all noise buffers of a model, supplied or not."""
    return {
        qualified(path, name)
        for path, module in model.named_modules()
        if isinstance(module, Stochastic)
        for name, _ in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


def buffer_places(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return (name, module, local name) of each buffer that is not noise."""
    carried = {name for name, _ in model.named_buffers()} - noise_names(model)
    places: list[tuple[str, nn.Module, str]] = []
    for path, module in model.named_modules():
        for local, _ in module.named_buffers(recurse=False):
            name = qualified(path, local)
            if name in carried:
                places.append((name, module, local))
    return places


def model_noise(model: nn.Module, inputs: Tensor) -> NoiseSpec:
    """Describe every noise buffer of a model for a batch of inputs, by one forward pass without gradients."""
    noise_by_name: dict[str, Noise] = {}

    def record(path: str):
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            assert isinstance(module, Stochastic)
            for name, noise in module.noise(arguments[0]).items():
                noise_by_name[qualified(path, name)] = noise

        return hook

    stochastic = [(path, module) for path, module in model.named_modules() if isinstance(module, Stochastic)]
    if not stochastic:
        return NoiseSpec()
    hooks = [module.register_forward_pre_hook(record(path)) for path, module in stochastic]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()  # a forward pass in training mode would move running statistics
        with torch.no_grad():
            model(inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    return NoiseSpec(noise_by_name)


def bottleneck_noise(model: nn.Module, inputs: Tensor) -> NoiseSpec:
    """Describe the noise buffers of a model's bottlenecks for a batch of inputs."""
    paths = [path for path, module in model.named_modules() if isinstance(module, Stochastic) and module.noisy_from]
    spec = model_noise(model, inputs) if paths else NoiseSpec()
    return NoiseSpec({name: noise for name, noise in spec.items() if name.rpartition(".")[0] in paths})


def switched_off(model: nn.Module, inputs: Tensor) -> Tensors:
    """Return the neutral values of all noise buffers for a batch of inputs, including private kept ones."""
    # Neutral values are the same for all examples: one example shows the shapes.
    rows, alone = len(inputs), inputs[:1].detach()
    drawn = {name: value.squeeze(0) for name, value in model_noise(model, alone).neutral().items()}
    off = {**drawn, **kept_noise(model).neutral()}
    dtype = inputs.dtype if inputs.is_floating_point() else None  # token numbers say nothing of the precision
    return {n: v.to(device=inputs.device, dtype=dtype).expand(rows, *v.shape) for n, v in off.items()}
