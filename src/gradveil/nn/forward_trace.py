"""Traces of a forward pass: the modules that run, and the torch functions that each of them calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}
"""Methods behind `x += y` and its like, and behind `x[i] = y`."""


def overwrites(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a torch function overwrites its first argument.

    >>> from torch.nn import functional as F
    >>> overwrites(F.relu_, (), {}), overwrites(F.relu, (None, True), {}), overwrites(F.relu, (None,), {})
    (True, True, False)
    """
    name = getattr(func, "__name__", "")
    if name in AUGMENTED or (name.endswith("_") and not name.endswith("__")):
        return True
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    place = inplace_argument(func)
    return place is not None and place < len(args) and args[place] is True


@cache
def inplace_argument(func: Any) -> int | None:
    """Return the position of a function's argument `inplace`, None if it has none."""
    code = getattr(func, "__code__", None)
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount] if code else ()
    return names.index("inplace") if "inplace" in names else None


@dataclass
class Visit:
    """One call of a module: its path, inputs and outputs."""

    path: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()


@dataclass(eq=False)
class Trace(TorchFunctionMode):
    """Visits of a forward pass in the order in which they end, and the torch functions that each module calls."""

    done: list[Visit] = field(default_factory=list)
    under_way: list[Visit] = field(default_factory=list)
    overwriting: dict[str, list[str]] = field(default_factory=dict)
    """The in-place calls of each module, by name."""
    functions: dict[str, list[Any]] = field(default_factory=dict)
    """The torch functions that each module calls itself."""
    values: bool = True
    """Whether visits keep copies of inputs and outputs."""

    def __post_init__(self) -> None:
        """Create the mode, not yet active."""
        super().__init__()

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a call with its module."""
        name = getattr(func, "__name__", "")
        calls = self.functions.setdefault(self.where, [])
        calls += [func] if func not in calls else []
        if overwrites(func, args, kwargs or {}):
            calls = self.overwriting.setdefault(self.where, [])
            calls += [name] if name not in calls else []
        return func(*args, **(kwargs or {}))

    @property
    def where(self) -> str:
        """Path of the module that is running, or was when the pass stopped."""
        return self.under_way[-1].path if self.under_way else "model"

    def enter(self, path: str, inputs: Any) -> None:
        """Begin a visit."""
        self.under_way.append(Visit(path or "model", tensors_in(inputs) if self.values else ()))

    def leave(self, outputs: Any) -> None:
        """End the visit under way."""
        visit = self.under_way.pop()
        visit.outputs = tensors_in(outputs) if self.values else ()
        self.done.append(visit)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Return copies of the tensors in a (nested) argument: a later in-place call does not change them."""
    if isinstance(value, Tensor):
        return (value.detach().clone(),)
    if isinstance(value, list | tuple):
        return tuple(tensor for part in value for tensor in tensors_in(part))
    return ()


def follow(model: nn.Module, run: Callable[[], Any], trace: Trace) -> Any:
    """Call `run`, recording the model's forward pass in the trace."""
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
