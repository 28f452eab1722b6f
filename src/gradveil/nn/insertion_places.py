"""Places for the layers of a defence in a model that declares none: its activations, as a forward pass runs them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import FOREIGN
from gradveil.nn.forward_trace import Trace, follow
from gradveil.nn.stochastic import Stochastic
from gradveil.nn.token_layout import TokenModel

_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip
_FUNCTIONS = {
    "relu", "relu_", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus",
    "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh",
}  # fmt: skip


@dataclass(frozen=True)
class ForwardPass:
    """The modules that a forward pass on two examples runs, without those inside of a defence's own layers."""

    names: dict[str, list[str]]
    """Each module that ran, with all paths that it has."""
    modules: dict[str, nn.Module]
    visits: list[tuple[str, tuple[int, ...]]]
    """Path and shape of the output of every call, in the order in which they end."""
    functions: dict[str, str]
    """Path of a module -> an activation that it calls as a function."""

    def calls(self, path: str) -> list[tuple[int, ...]]:
        """Return the shape of the output of each call of a module."""
        return [shape for name, shape in self.visits if name == path]

    def several_shapes(self, path: str) -> str:
        """Say that the calls of a module give different shapes; nothing where they do not."""
        shapes = self.calls(path)
        return f"'{path}' runs {len(shapes)} times, with different shapes" if len({*shapes}) > 1 else ""

    def hidden_activations(self) -> tuple[dict[str, int], str]:
        """Return the activations before the last linear layer with their number of calls, or why there are none.

        All of them or none: a part would be less than what a user asks for.
        """
        last = max(
            (n for n, (path, _) in enumerate(self.visits) if isinstance(self.modules[path], nn.Linear)), default=0
        )
        before, after = ({path for path, _ in part} for part in (self.visits[:last], self.visits[last:]))
        places = {
            p: len(self.calls(p)) for p in self.modules if p in before and isinstance(self.modules[p], _ACTIVATIONS)
        }
        reasons = [f"'{path}' calls {name} as a function" for path, name in self.functions.items()]
        if not places:
            reasons.append("no activation module runs before a last linear layer")
        for path in places:
            if path in after:
                reasons.append(f"'{path}' runs after the last linear layer too")
            if len(self.names[path]) > 1:
                reasons.append(f"'{path}' is '{self.names[path][1]}' too")
            reasons += [reason] if (reason := self.several_shapes(path)) else []
            if any(shape[:1] != (_EXAMPLES,) for shape in self.calls(path)):
                reasons.append(f"the values of '{path}' do not have the batch first")
        return ({}, reasons[0]) if reasons else (places, "")

    def maps(self) -> Iterator[str]:
        """Yield the activations that run once, on the feature maps of a convolution."""
        fed: tuple[int, ...] = ()
        for path, shape in self.visits:
            if isinstance(self.modules[path], nn.Conv2d):
                fed = shape
            once = len(self.calls(path)) == 1 and len(self.names[path]) == 1
            if (
                isinstance(self.modules[path], _ACTIVATIONS)
                and once
                and shape == fed
                and len(shape) == 4
                and shape[2] * shape[3] > 1
            ):
                yield path


_EXAMPLES = 2


def forward_pass(model: nn.Module, inputs: Tensor) -> ForwardPass | None:
    """Run a copy of a model on two examples of an input [1, ...]; None if it cannot be run on it."""
    trace = Trace()
    try:
        copy = deepcopy(model).eval()
        with torch.random.fork_rng(), torch.no_grad():
            follow(copy, lambda: copy(inputs.repeat(_EXAMPLES, *[1] * (inputs.dim() - 1))), trace)
    except FOREIGN:
        return None
    own = tuple(f"{path}." for path, module in copy.named_modules() if isinstance(module, Stochastic))
    modules = {path: module for path, module in copy.named_modules() if not f"{path}.".startswith(own)}
    every = list(copy.named_modules(remove_duplicate=False))
    names = {path: [name for name, other in every if other is module] for path, module in modules.items()}
    visits = [(v.path, tuple(v.outputs[0].shape)) for v in trace.done[:-1] if v.path in modules and v.outputs]
    called = {
        path: next((func.__name__ for func in found if getattr(func, "__name__", "") in _FUNCTIONS), "")
        for path, found in trace.functions.items()
        if not isinstance(modules.get(path, model), _ACTIVATIONS) and not f"{path}.".startswith(own)
    }
    return ForwardPass(names, modules, visits, {path: name for path, name in called.items() if name})


def blank_input(model: nn.Module) -> Tensor | None:
    """Return one example of zeros, of token numbers where the model reads them; None without an `input_shape` of it."""
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple | list) or not all(isinstance(side, int) for side in shape):
        return None
    zeros = next(model.parameters(), torch.zeros(())).detach().new_zeros(1, *shape)
    return zeros.long() if isinstance(model, TokenModel) else zeros
