"""Models that hold what cannot be copied, such as loggers, locks, open files, and tensors kept from a forward pass."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from gradveil.core.errors import FOREIGN


class Uncopied:
    """An object that copies of a model share: it stands for the object, and is never copied itself."""

    def __init__(self, value: Any) -> None:
        """Stand for an object."""
        self._value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        """Return the object itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._value(*args, **kwargs)

    def __enter__(self) -> Any:
        """Enter the object's context."""
        return self._value.__enter__()

    def __exit__(self, *error: Any) -> Any:
        """Leave the object's context."""
        return self._value.__exit__(*error)


def copyable(model: nn.Module) -> nn.Module:
    """Return a model that can be copied: the model itself if it can, or a copy that shares what cannot be.

    Tensors with a history (features kept from a forward pass) are cut from it. Parameters, buffers and modules are
    copied as always.

    >>> import threading
    >>> layer = nn.Linear(1, 1)
    >>> layer.lock = threading.Lock()
    >>> deepcopy(copyable(layer)).lock.locked()
    False
    """
    try:
        deepcopy(model)
    except FOREIGN:
        memo: dict[int, Any] = {}
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    _remember(value, memo)
        return deepcopy(model, memo)
    return model


def _remember(value: Any, memo: dict[int, Any]) -> None:
    """Say in a memo of `deepcopy` what takes the place of an object that cannot be copied."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            memo[id(value)] = value.detach().clone()
        return
    if isinstance(value, dict | list | tuple | set):
        for part in value.values() if isinstance(value, dict) else value:
            _remember(part, memo)
        return
    try:
        deepcopy(value)
    except FOREIGN:
        memo[id(value)] = Uncopied(value)
