"""How much a computation writes: what it takes of memory, whatever the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Written(TorchDispatchMode):
    """Adds up the bytes that operations write.

    Saved-tensor hooks would say what is kept, but `torch.func.grad` refuses them; what an iteration writes is an upper
    bound of what it keeps, and grows with it.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def written_bytes(function: Callable[[], Any]) -> int:
    """Count the bytes that the operations of a function write."""
    with _Written() as counter:
        function()
    return counter.bytes
