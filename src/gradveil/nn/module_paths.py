"""Modules of a model by path: find, replace, insert, observe; and calls with other tensors than its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import UNFIT, fail
from gradveil.nn.stochastic import Stochastic


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


_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def last_layer(model: nn.Module, inputs: Tensor | None = None) -> str:
    """Return the path of the last linear layer: the classifier.

    Last by the order in which a forward pass runs them; by that in which they were defined where no inputs are given.

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
    return ran[-1]


def first_layer(model: nn.Module, inputs: Tensor) -> str:
    """Return the path of the first linear layer or convolution that a forward pass runs.

    If it runs none: of the first module with parameters.
    """
    ran = _order(model, inputs, _owners(model))
    if not ran:
        raise fail("model", "runs no module with parameters", "give it layers that are trained")
    return next((path for path in ran if isinstance(at(model, path), _LINEAR)), ran[0])


def features(model: nn.Module, inputs: Tensor, path: str | None = None) -> Tensor:
    """Return the input of the last layer (or of the layer at the path) for a batch; it can be differentiated."""
    with caught_inputs(model, path or last_layer(model)) as caught:
        model(inputs)
    return caught[-1]


@contextmanager
def caught_by_linear(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Collect what each linear layer takes, by its path, in the order of the forward passes inside."""
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
    """Collect what the module at a path takes in the forward passes inside."""
    caught: list[Tensor] = []
    hook = at(model, path).register_forward_pre_hook(lambda _module, arguments: caught.append(arguments[0]))
    try:
        yield caught
    finally:
        hook.remove()


def downstream(model: nn.Module, inputs: Tensor) -> set[str]:
    """Name the parameters that the noise of the model's bottlenecks reaches, in the order of a forward pass.

    A stochastic module says itself where its noise enters: `noisy_from` names its first submodule behind it. From there
    on every module counts; none does in a model without such a module. A module that is not called itself, as the
    projection inside an attention, counts with the one that holds it.
    """
    ran = _order(model, inputs, dict(model.named_modules()))
    entries: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, Stochastic) and module.noisy_from and path in ran:
            entry = f"{path}.{module.noisy_from}" if path else module.noisy_from
            if entry not in ran:
                what = f"says that its noise enters '{module.noisy_from}', which a forward pass does not run"
                raise fail(path or "model", what, "let noisy_from name the first submodule behind the noise")
            entries.add(entry)
    first = next((place for place, path in enumerate(ran) if path in entries), len(ran))
    before = set(ran[:first])
    reached = set(ran[first:]) - before
    return {name for name, _ in model.named_parameters() if _called(name.rpartition(".")[0], {*ran}) in reached}


def _called(path: str, ran: Collection[str]) -> str:
    """Return the path itself, or that of the nearest module around it that a forward pass runs."""
    while path and path not in ran:
        path = path.rpartition(".")[0]
    return path


def count_classes(model: nn.Module, inputs: Tensor, known: int = 2) -> int:
    """Count the classes that a model tells apart: its outputs, perhaps more than are `known`; one output tells two.

    A model that cannot be run on these inputs has those that are known.
    """
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(model)(inputs)
    except UNFIT:
        return max(known, 2)
    return max(outputs.shape[-1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 1, known, 2)


def output_shape(model: nn.Module, path: str, inputs: Tensor) -> tuple[int, ...]:
    """Return the shape of what the module at a path puts out, by one forward pass without gradients."""
    shapes: list[tuple[int, ...]] = []
    hook = at(model, path).register_forward_hook(lambda _module, _inputs, out: shapes.append(tuple(out.shape)))
    _run(model, inputs, [hook])
    if not shapes:
        raise fail(path, "is not run by the model's forward pass", "choose a module that is")
    return shapes[-1]


def at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; refuse a path that is not there."""
    known = dict(model.named_modules())
    if path not in known:
        paths = ", ".join(name for name in known if name) or "none"
        raise fail(path or "model", "is not a module of this model", f"its modules: {paths}")
    return known[path]


def called(model: nn.Module, place: str) -> str:
    """Say what a path names: a module, parameter or buffer of the model; anything else stays as it is.

    >>> called(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "1")
    "module '1' (BatchNorm1d)"
    """
    modules = {path: module for path, module in model.named_modules() if path not in ("", "model")}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def one(path: str) -> str:
        if path in modules:
            return f"module '{path}' ({type(modules[path]).__name__})"
        if path in parameters:
            return f"parameter '{path}'"
        return f"buffer '{path}'" if path in buffers else path

    return ", ".join(one(path) for path in place.split(", "))


def put(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Set the module at a path, in place, and return the model; the path "" is the model itself."""
    if path == "":
        return module
    parent, _, name = path.rpartition(".")
    at(model, parent)._modules[name] = module
    return model


def insert_after(model: nn.Module, path: str, name: str, module: nn.Module) -> nn.Module:
    """Run `module` after the module at a path, in place; return the model.

    It is appended to an `nn.Sequential`, whose parameters so keep their names; any other module is wrapped with it into
    one, as its child `inner`.
    """
    place = at(model, path)
    if type(place) is not nn.Sequential:
        return put(model, path, nn.Sequential(OrderedDict([("inner", place), (name, module)])))
    taken = dict(place.named_children())
    free = next(n for n in (name, *(f"{name}{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    place.add_module(free, module)
    return model


def insert_before(model: nn.Module, path: str, name: str, module: nn.Module) -> nn.Module:
    """Run `module` before the module at a path, in place; both become children of one `nn.Sequential`."""
    return put(model, path, nn.Sequential(OrderedDict([(name, module), ("inner", at(model, path))])))


def like(module: nn.Module, model: nn.Module) -> nn.Module:
    """Bring a module to the device and dtype of a model's parameters."""
    parameter = next(model.parameters(), None)
    return module if parameter is None else module.to(parameter.device, parameter.dtype)


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that have parameters of their own."""
    return {p: m for p, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}


def _order(model: nn.Module, inputs: Tensor, modules: Mapping[str, nn.Module]) -> list[str]:
    """List some modules as a forward pass runs them."""
    ran: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda _module, _inputs: ran.append(path)

    _run(model, inputs, [module.register_forward_pre_hook(note(path)) for path, module in modules.items()])
    return ran


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model into evaluation mode inside, so that no running statistics move, and leave it as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield model
    finally:
        for module in training:
            module.training = True


def _run(model: nn.Module, inputs: Tensor, hooks: list) -> None:
    """Run a forward pass that leaves the model as it was."""
    try:
        with evaluating(model), torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
