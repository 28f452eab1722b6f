"""Follow a forward pass through the modules: where it fails, what is random, what is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}


@dataclass
class Visit:
    """One call of one module: its path, what went in, what came out."""

    path: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()


@dataclass(eq=False)
class Trace(TorchFunctionMode):
    """Record the visits of a forward pass in the order in which they end, and the in-place calls within them."""

    done: list[Visit] = field(default_factory=list)
    under_way: list[Visit] = field(default_factory=list)
    overwriting: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start as a mode that is not active."""
        super().__init__()

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note a call that overwrites a tensor, with the module that makes it."""
        name = getattr(func, "__name__", "")
        if name in _AUGMENTED or (name.endswith("_") and not name.endswith("__")):
            path = self.under_way[-1].path if self.under_way else "model"
            calls = self.overwriting.setdefault(path, [])
            calls += [name] if name not in calls else []
        return func(*args, **(kwargs or {}))

    @property
    def where(self) -> str:
        """The module that was running when the pass stopped."""
        return self.under_way[-1].path if self.under_way else "model"

    def enter(self, path: str, inputs: Any) -> None:
        """Begin a visit."""
        self.under_way.append(Visit(path or "model", tensors_in(inputs)))

    def leave(self, outputs: Any) -> None:
        """End the visit under way."""
        visit = self.under_way.pop()
        visit.outputs = tensors_in(outputs)
        self.done.append(visit)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Return copies of the tensors in a (nested) argument: a later in-place call does not change them."""
    if isinstance(value, Tensor):
        return (value.detach().clone(),)
    if isinstance(value, list | tuple):
        return tuple(tensor for part in value for tensor in tensors_in(part))
    return ()


def follow(model: nn.Module, run: Callable[[], Any], trace: Trace) -> Any:
    """Run something that runs the model, recording it in the trace."""
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _m, inputs, path=path: trace.enter(path, inputs)))
        hooks.append(module.register_forward_hook(lambda _m, _inputs, outputs: trace.leave(outputs)))
    try:
        with trace:
            return run()
    finally:
        for hook in hooks:
            hook.remove()


def first_random(first: Trace, second: Trace) -> str | None:
    """Name the first module that gave different outputs for equal inputs in two passes."""
    for one, two in zip(first.done, second.done, strict=False):
        if one.path != two.path:
            return one.path
        if _same(one.inputs, two.inputs) and not _same(one.outputs, two.outputs):
            return one.path
    return None


def _same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return len(first) == len(second) and all(
        one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(first, second, strict=True)
    )
