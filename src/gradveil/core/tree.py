"""Arithmetic over updates: flat dictionaries from parameter name to tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by name: parameters, an update, noise, a state. Dots separate the levels of a name (`under`, `select`)."""


def qualified(path: str, name: str) -> str:
    """Name a tensor of the module at a path as the model does; the model itself has the empty path.

    >>> qualified("head", "weight"), qualified("", "weight")
    ('head.weight', 'weight')
    """
    return f"{path}.{name}" if path else name


def multiplied(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensors:
    """Multiply tensors that are in both dictionaries; keep those that are in only one."""
    product = {name: value * first[name] if name in first else value for name, value in second.items()}
    return {**first, **product}


def tmap(function: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tensors:
    """Apply a function to the tensors of each name.

    >>> tmap(torch.add, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    {'w': tensor([2.])}
    """
    return {name: function(value, *(other[name] for other in rest)) for name, value in first.items()}


def squared_norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all tensors: ||g||^2 of the concatenated vector."""
    return torch.stack([value.square().sum() for value in tensors.values()]).sum()


def norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm of the concatenated vector; its derivative at zero is zero."""
    return root(squared_norm(tensors))


def root(square: Tensor) -> Tensor:
    """Square root of a non-negative tensor; its derivative at zero is zero, not infinite."""
    if plain(square):
        return square.sqrt()
    # Both sides of a `where` are differentiated, and 0 times the infinite slope at 0 is NaN: so the root gets a 1
    # there.
    safe = torch.where(square > 0, square, torch.ones_like(square))
    return torch.where(square > 0, safe.sqrt(), torch.zeros_like(square))


def all_finite(*tensors: Mapping[str, Tensor]) -> Tensor:
    """Return whether every entry of all tensors is finite, shape [].

    >>> bool(all_finite({"w": torch.ones(2)})), bool(all_finite({"w": torch.tensor([1.0, torch.inf])}))
    (True, False)
    """
    values = [v.detach() for each in tensors for v in each.values() if v.numel() and v.is_floating_point()]
    if not values:
        return torch.tensor(True)
    # The extremes need no tensor of truth values, and unlike a sum they cannot overflow; both are NaN where one is.
    ends = [end for value in values for end in torch.aminmax(value)]
    return torch.stack(ends).isfinite().all()


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors below a prefix, without the prefix.

    >>> select({"send.noise.w": torch.zeros(1), "step.w": torch.ones(1)}, "send.noise")
    {'w': tensor([0.])}
    """
    start = prefix + "."
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}


def below(prefix: str, names: Iterable[str]) -> list[str]:
    """Return the names below a prefix, without the prefix."""
    start = prefix + "."
    return [name[len(start) :] for name in names if name.startswith(start)]


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Put a prefix before every name."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def stack(rows: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Stack dictionaries of equal names along a new first dimension (target clients).

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
    torch.Size([2, 2])
    """
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def take(tensors: Mapping[str, Tensor], rows: Tensor | slice | Iterable[int]) -> Tensors:
    """Index every tensor along its first dimension."""
    index = rows if isinstance(rows, Tensor | slice) else torch.tensor(list(rows), dtype=torch.long)
    return {name: value[index] for name, value in tensors.items()}


def straight_through(exact: Tensor, surrogate: Tensor) -> Tensor:
    """Return the value of `exact`, to the last bit, with the derivative of `surrogate`.

    >>> x = torch.tensor([0.3], requires_grad=True)
    >>> y = straight_through(x.sign(), x)
    >>> y.item(), torch.autograd.grad(y, x)[0].item()
    (1.0, 1.0)
    """
    return exact.detach() + (surrogate - surrogate.detach())


def peak(value: Tensor, otherwise: float = 0.0) -> Tensor:
    """Return the largest entry, or `otherwise` for an empty tensor.

    >>> peak(torch.tensor([1.0, 3.0])), peak(torch.zeros(0, 2))
    (tensor(3.), tensor(0.))
    """
    return value.amax() if value.numel() else value.new_full((), otherwise)


def wide(tensors: Mapping[str, Tensor]) -> Tensors:
    """Convert half-precision tensors to single precision.

    In float16, squares of values below 2e-4 are 0 and those of values above 256 are infinite, so norms are wrong.

    >>> {name: value.dtype for name, value in wide({"a": torch.ones(1).half(), "b": torch.ones(1).double()}).items()}
    {'a': torch.float32, 'b': torch.float64}
    """
    return {n: v.to(single(v.dtype)) if v.is_floating_point() else v for n, v in tensors.items()}


def alike(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """Convert tensors to the dtypes of the tensors of the same name: the inverse of `wide`."""
    return {name: value.to(like[name].dtype) if name in like else value for name, value in tensors.items()}


def single(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, or float32 if it is narrower."""
    return torch.promote_types(dtype, torch.float32)


def counter(params: Mapping[str, Tensor]) -> Tensor:
    """Return a zero to count rounds from, on the parameters' device, in at least single precision.

    Half precision cannot count far: bfloat16 has no number between 256 and 258.

    >>> counter({"w": torch.zeros(2, dtype=torch.bfloat16)}).dtype, counter({"w": torch.zeros(2).double()}).dtype
    (torch.float32, torch.float64)
    """
    first = next(iter(params.values()))
    return first.new_zeros((), dtype=single(first.dtype))


def plain(*tensors: Tensor) -> bool:
    """Return whether the tensors are neither differentiated nor batched, as in a client's real update.

    Code may then branch on their values and skip intermediate tensors.

    >>> plain(torch.ones(1)), torch.vmap(lambda x: x * plain(x))(torch.ones(1)).item()
    (True, 0.0)
    """
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 # pyright: ignore[reportPrivateUsage]
    differentiated = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
    return not differentiated and functorch.peek_interpreter_stack() is None
