"""Initial weights from an explicit generator instead of the global one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from gradveil.core.errors import Problem, refuse

_DRAWING = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
    *("trunc_normal_", "orthogonal_", "sparse_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
}
_LIKE = {"rand_like": torch.rand, "randn_like": torch.randn}
"""Functions without a generator in earlier versions of torch, and their substitutes."""
_AFFINE = ("weight", "bias")


class drawing_from(TorchFunctionMode):
    """Context in which torch functions draw from a generator instead of the global one.

    For custom factories, whose layers initialise themselves.

    >>> with drawing_from(torch.Generator().manual_seed(0)):
    ...     a = nn.Linear(2, 2).weight
    >>> with drawing_from(torch.Generator().manual_seed(0)):
    ...     b = nn.Linear(2, 2).weight
    >>> torch.equal(a, b)
    True
    """

    def __init__(self, generator: Generator) -> None:
        """Take the generator to draw from."""
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass the generator to a call that draws without one."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _LIKE:
            options = {"dtype": args[0].dtype, "device": args[0].device} | options
            func, args = _LIKE[name], (args[0].shape,)
        if (name in _DRAWING or name in _LIKE) and options.get("generator") is None:
            options["generator"] = self.generator
        return func(*args, **options)


@torch.no_grad()
def initialise(model: nn.Module, generator: Generator) -> nn.Module:
    """Initialise every parameter of a model in place, and return the model.

    Convolutions and linear layers follow PyTorch's law, U(-b, b) with b = 1/sqrt(fan_in) for weights and biases
    (`kaiming_uniform_` with a = sqrt(5)); U(-r, r) in a model with a `weight_range` r. Norms get weight 1, bias 0 and
    fresh statistics. Other modules with parameters implement `initialise(generator)`. Numbers are drawn on the CPU in
    float32, so that device and dtype do not change them.
    """
    weight_range = getattr(model, "weight_range", None)
    problems: list[Problem] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if module is not model and callable(getattr(module, "initialise", None)):
            module.initialise(generator)  # type: ignore[operator]
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            fan_in = module.weight[0].numel()
            bound = 1 / sqrt(fan_in) if weight_range is None else weight_range
            for parameter in own.values():
                draw_uniform(parameter, bound, generator)
        elif set(own) <= set(_AFFINE) and _is_norm(module):
            _reset_norm(module)
        elif own:
            what = f"no initial law is known for the parameters {', '.join(own)} of {type(module).__name__}"
            problems.append(Problem(path or "model", what, "give the module a method initialise(generator)"))
    refuse(problems)
    return model


def draw_uniform(parameter: Tensor, bound: float, generator: Generator) -> None:
    """Fill a parameter with U(-bound, bound)."""
    draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
    parameter.copy_((2 * draw - 1) * bound)


def draw_normal(parameter: Tensor, std: float, generator: Generator) -> None:
    """Fill a parameter with N(0, std^2)."""
    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ or type(module).__name__ == "BatchStatistics"


def _reset_norm(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if name in ("weight", "running_var"):
            tensor.fill_(1)
        elif name in ("bias", "running_mean", "num_batches_tracked"):
            tensor.fill_(0)
