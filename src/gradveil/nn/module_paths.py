"""Modules by path: find, replace, insert and observe them; and model calls with substituted tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import UNFIT, fail
from gradveil.core.tree import qualified
from gradveil.nn.stochastic import Stochastic


def call_on(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor, *, strict: bool = False) -> Tensor:
    """Run a model with substituted parameters and buffers, and restore its own afterwards.

    `torch.func.functional_call` alone does not restore modules that are registered under two names (`[block] * 3` in a
    `ModuleList`; torch 2.13).

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> model, weight = nn.Sequential(layer, layer), layer.weight
    >>> _ = call_on(model, {"0.weight": weight.detach() + 1}, weight.detach())
    >>> layer.weight is weight
    True
    """
    slots = [slot for module in model.modules() for slot in (vars(module)["_parameters"], vars(module)["_buffers"])]
    originals = [dict(slot) for slot in slots]
    try:
        return functional_call(model, dict(tensors), (inputs,), strict=strict)
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.update(original)


_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def last_layer(model: nn.Module, inputs: Tensor | None = None) -> str:
    """Return the path of the last linear layer: the classifier.

    The order is that of a forward pass, or that of definition without inputs.

    >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    '2'
    """
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise fail("model", "has no nn.Linear, so no last layer is known", "end the model with a linear classifier")
    if inputs is None:
        return linear[-1][0]
    ran = _order(model, inputs, dict(linear))
    if not ran:
        raise fail("model", "runs none of its nn.Linear layers", "end the model with a linear classifier")
    return next((path for path in reversed(ran) if _reaches_outputs(model, path, inputs)), ran[-1])


def logits_bias(model: nn.Module, inputs: Tensor) -> str:
    """Return the name of the bias of the linear layer whose output is the model's; empty without one."""
    given: dict[str, Tensor] = {}

    def noted(path: str) -> Callable[..., None]:
        return lambda _module, _inputs, out: given.update({path: out.detach().clone()})

    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(noted(path)) for path, module in linear.items() if module.bias is not None]
    try:
        with evaluating(model), torch.no_grad():
            outputs = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    same = [p for p, out in given.items() if isinstance(outputs, Tensor) and torch.equal(out, outputs)]
    return (f"{same[-1]}.bias" if same[-1] else "bias") if same else ""


def _reaches_outputs(model: nn.Module, path: str, inputs: Tensor) -> bool:
    """Whether a model's outputs depend on what a module gives: a second head's do not."""
    given: list[Tensor] = []

    def leaf(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        given.append(out.detach().requires_grad_())
        return given[-1].clone()  # which may be overwritten

    hook = at(model, path).register_forward_hook(leaf)
    try:
        with evaluating(model), torch.enable_grad():
            outputs = model(inputs)
            if not isinstance(outputs, Tensor):
                return True
            slopes = torch.autograd.grad(outputs.sum(), given, allow_unused=True) if outputs.requires_grad else ()
            return any(slope is not None for slope in slopes)
    finally:
        hook.remove()


def first_layer(model: nn.Module, inputs: Tensor) -> str:
    """Return the path of the first linear layer or convolution of a forward pass, else of the first parameters."""
    ran = _order(model, inputs, _owners(model))
    if not ran:
        raise fail("model", "runs no module with parameters", "give it layers that are trained")
    return next((path for path in ran if isinstance(at(model, path), _LINEAR)), ran[0])


def features(model: nn.Module, inputs: Tensor, path: str | None = None) -> Tensor:
    """Return the differentiable input of the last layer (or of the layer at `path`) for a batch."""
    with caught_inputs(model, path or last_layer(model)) as caught:
        model(inputs)
    return caught[-1]


@contextmanager
def caught_by_linear(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Collect (path, input) of each linear layer, in the order of the forward passes inside."""
    caught: list[tuple[str, Tensor]] = []

    def catch(path: str) -> Callable[..., None]:
        return lambda _module, arguments: caught.append((path, arguments[0]))

    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(catch(path)) for path, module in linear]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def caught_inputs(model: nn.Module, path: str) -> Iterator[list[Tensor]]:
    """Collect the inputs of the module at a path in the forward passes inside."""
    caught: list[Tensor] = []
    hook = at(model, path).register_forward_pre_hook(lambda _module, arguments: caught.append(arguments[0]))
    try:
        yield caught
    finally:
        hook.remove()


def downstream(model: nn.Module, inputs: Tensor) -> set[str]:
    """Return the names of the parameters that a forward pass reaches after the noise of a bottleneck.

    `noisy_from` of a stochastic module names its first submodule after the noise; all modules from there on count. A
    module that is not called itself, such as the projection inside an attention, counts with its parent.
    """
    ran = _order(model, inputs, dict(model.named_modules()))
    entries: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, Stochastic) and module.noisy_from and path in ran:
            entry = qualified(path, module.noisy_from)
            if entry not in ran:
                problem = f"declares that its noise enters '{module.noisy_from}', which a forward pass does not run"
                raise fail(path or "model", problem, "set noisy_from to the first submodule after the noise")
            entries.add(entry)
    first = next((i for i, path in enumerate(ran) if path in entries), len(ran))
    before = set(ran[:first])
    reached = set(ran[first:]) - before
    return {name for name, _ in model.named_parameters() if _called(name.rpartition(".")[0], {*ran}) in reached}


def _called(path: str, ran: Collection[str]) -> str:
    """Return the path of the module, or of its nearest parent, that a forward pass runs."""
    while path and path not in ran:
        path = path.rpartition(".")[0]
    return path


def count_classes(model: nn.Module, inputs: Tensor, known: int = 2) -> int:
    """Return the number of classes: at least `known`, at least the model's outputs, and two for a single output.

    Models that cannot be run on these inputs have the known classes.
    """
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(model)(inputs)
    except UNFIT:
        return max(known, 2)
    return max(outputs.shape[-1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 1, known, 2)


def output_shape(model: nn.Module, path: str, inputs: Tensor) -> tuple[int, ...]:
    """Return the output shape of the module at a path, by one forward pass without gradients."""
    shapes: list[tuple[int, ...]] = []
    hook = at(model, path).register_forward_hook(lambda _module, _inputs, out: shapes.append(tuple(out.shape)))
    _run(model, inputs, [hook])
    if not shapes:
        raise fail(path, "is not run by the model's forward pass", "choose a module that is")
    return shapes[-1]


def at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; raise if there is none."""
    known = dict(model.named_modules())
    if path not in known:
        paths = ", ".join(name for name in known if name) or "none"
        raise fail(path or "model", "is not a module of this model", f"its modules: {paths}")
    return known[path]


def called(model: nn.Module, place: str) -> str:
    """Describe the module, parameter or buffer at each path; other texts stay as they are.

    >>> called(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "1")
    "module '1' (BatchNorm1d)"
    """
    modules = {path: module for path, module in model.named_modules() if path not in ("", "model")}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def described(path: str) -> str:
        if path in modules:
            return f"module '{path}' ({type(modules[path]).__name__})"
        if path in parameters:
            return f"parameter '{path}'"
        return f"buffer '{path}'" if path in buffers else path

    return ", ".join(described(path) for path in place.split(", "))


def put(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Set the module at a path, in place, and return the model; the path "" is the model itself."""
    if path == "":
        return module
    parent, _, name = path.rpartition(".")
    at(model, parent)._modules[name] = module
    return model


class Joined(nn.Sequential):
    """The child `inner`, a layer of a model, and a layer that runs before or after it.

    Other attributes are read from `inner`, since the model's own code may ask for its weight or its sizes.
    """

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or child, or what `inner` has of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)


def insert_after(model: nn.Module, path: str, name: str, module: nn.Module) -> nn.Module:
    """Run `module` after the module at a path, in place; return the model.

    It is appended to an `nn.Sequential`, so that parameters keep their names. Any other module becomes the child
    `inner` of a `Joined`.
    """
    before = at(model, path)
    if type(before) is not nn.Sequential:
        return put(model, path, Joined(OrderedDict([("inner", before), (name, module)])))
    taken = dict(before.named_children())
    free = next(n for n in (name, *(f"{name}{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    before.add_module(free, module)
    return model


def insert_before(model: nn.Module, path: str, name: str, module: nn.Module) -> nn.Module:
    """Run `module` before the module at a path, in place; both become children of one `Joined`."""
    return put(model, path, Joined(OrderedDict([(name, module), ("inner", at(model, path))])))


def like(module: nn.Module, model: nn.Module) -> nn.Module:
    """Move a module to the device and dtype of a model's parameters."""
    parameter = next(model.parameters(), None)
    return module if parameter is None else module.to(parameter.device, parameter.dtype)


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold parameters directly."""
    return {p: m for p, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}


def _order(model: nn.Module, inputs: Tensor, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of these modules in the order of a forward pass."""
    ran: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda _module, _inputs: ran.append(path)

    _run(model, inputs, [module.register_forward_pre_hook(note(path)) for path, module in modules.items()])
    return ran


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model into evaluation mode inside, so that running statistics stay; restore its modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield model
    finally:
        for module in training:
            module.training = True


def _run(model: nn.Module, inputs: Tensor, hooks: list) -> None:
    """Run a forward pass that does not change the model, then remove the hooks."""
    try:
        with evaluating(model), torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
