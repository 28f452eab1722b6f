"""Gradients of one layer's weight, made from its inputs and errors where they are asked for.

What is sent of a weight goes by the name of its parameter. Weights that torch computes (weight norm) have none: of them
the tensors are sent that they are computed from, and whoever has these has the weight's gradient too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad

from gradveil.nn.module_paths import call_on

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GRADIENTS: dict[int, Callable[..., Tensor]] = {3: grad.conv1d_weight, 4: grad.conv2d_weight, 5: grad.conv3d_weight}

Part = tuple[Tensor, Tensor]
"""A layer's inputs and errors in one of its calls."""


@dataclass(frozen=True)
class Owned:
    """Units, or differences of units, of which one example has nearly all the error."""

    rows: Tensor
    """Their places [n]."""
    owner: Tensor
    """Their examples [n]."""

    @staticmethod
    def of(sizes: Tensor, least: float) -> Owned:
        """Find them in sizes of errors [B, K], on each unit's own scale, by an example's least share of a unit's sum.

        >>> Owned.of(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), 0.99).rows
        tensor([0])
        """
        total, (most, owner) = sizes.sum(0), sizes.max(0)
        rows = ((most > least * total) & (total > 0)).nonzero().flatten()
        return Owned(rows, owner[rows])

    @property
    def examples(self) -> frozenset[int]:
        """The examples."""
        return frozenset(self.owner.tolist())


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of a layer's weight, of some examples, made from its inputs and errors where they are asked for."""

    module: nn.Module
    parts: list[Part]

    def of(self, place: slice) -> Tensor | None:
        """Sum the gradients [K, ...] of the examples at a place; None where a padding has no formula here."""
        module: Any = self.module
        total: Tensor | None = None
        for x, errors in self.parts:
            if isinstance(module, nn.Linear):
                part = errors[place].flatten(0, -2).T @ x[place].flatten(0, -2)
            elif isinstance(module.padding, str) or module.padding_mode != "zeros":
                return None
            else:
                how = (module.stride, module.padding, module.dilation, module.groups)
                part = _GRADIENTS[x.ndim](x[place], module.weight.shape, errors[place], *how).flatten(1)
            total = part if total is None else total + part
        return total

    def shown(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the examples one of whose own rows is, up to a factor, the row that is sent."""
        found: set[int] = set()
        for example in owned.examples:
            own = self.of(slice(example, example + 1))
            rows = owned.rows[owned.owner == example]
            if own is not None and bool((1 - agreement(own[rows], sent.flatten(1)[rows]) < most).any()):
                found.add(example)
        return frozenset(found)

    def kept(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the owners of rows that are sent as the whole batch made them, up to a factor."""
        own = self.of(slice(None)) if len(owned.rows) else None
        if own is None:
            return frozenset()
        same = 1 - agreement(own[owned.rows], sent.flatten(1)[owned.rows]) < most
        return frozenset(owned.owner[same].tolist())

    def agrees(self, sent: Tensor) -> float:
        """Return cos^2 of the whole gradient with what is sent; 1 where it cannot be computed."""
        own = self.of(slice(None))
        return 1.0 if own is None else float(agreement(own.flatten()[None], sent.flatten()[None]))


def agreement(own: Tensor, sent: Tensor) -> Tensor:
    """Return cos^2 of each pair of rows."""
    own, sent = own.double(), sent.double()
    sizes = own.norm(dim=1) * sent.norm(dim=1)
    return ((own * sent).sum(1) / sizes.clamp(min=1e-300)).square()


def as_linear(module: nn.Module, parts: list[Part]) -> Part | None:
    """Return inputs and errors [..., K] of a layer that is one matrix: linear, or a convolution with one position.

    >>> x, errors = torch.arange(8.0).view(1, 2, 4), torch.ones(1, 3, 1)
    >>> as_linear(nn.Conv1d(2, 3, 2, dilation=2, stride=4), [(x, errors)])[0]
    tensor([[0., 2., 4., 6.]])
    """
    if len(parts) != 1:
        return None
    if not isinstance(module, CONVOLUTIONS):
        return parts[0] if isinstance(module, nn.Linear) else None
    convolution: Any = module
    x, errors = parts[0]
    padded = isinstance(convolution.padding, str) or any(convolution.padding)
    if padded or convolution.groups > 1 or errors[0, 0].numel() != 1:
        return None
    reach = zip(convolution.kernel_size, convolution.dilation, strict=True)
    window = (slice(None), slice(None), *(slice(0, (size - 1) * step + 1, step) for size, step in reach))
    return x[window].flatten(1), errors.flatten(1)


def source_gradients(module: nn.Module, sources: Mapping[str, Tensor], parts: list[Part]) -> Tensor:
    """Return the gradients, in one row, of the tensors that a layer computes its weight from."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in sources.items()}
    with torch.enable_grad():
        outputs = [call_on(module, leaves, x.to(next(iter(leaves.values())))) for x, _ in parts]
        errors = [part.to(out) for (_, part), out in zip(parts, outputs, strict=True)]
        found = torch.autograd.grad(outputs, list(leaves.values()), errors)
    return torch.cat([value.flatten() for value in found])[None]
