"""Gradients of one layer's weight, computed on demand from its inputs and errors.

The update of a weight goes by its parameter's name. A weight that torch computes (weight norm) is no parameter: the
update has the tensors that it is computed from, which determine the weight's gradient.
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
    """Units (or differences of units) of which one example has nearly all the error."""

    rows: Tensor
    """Indices of the units [n]."""
    owner: Tensor
    """The example of each unit [n]."""

    @staticmethod
    def of(sizes: Tensor, least: float) -> Owned:
        """Find units by sizes of errors [B, K]: one example has more than the share `least` of a unit's sum.

        >>> Owned.of(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), 0.99).rows
        tensor([0])
        """
        total, (most, owner) = sizes.sum(0), sizes.max(0)
        rows = ((most > least * total) & (total > 0)).nonzero().flatten()
        return Owned(rows, owner[rows])

    @property
    def examples(self) -> frozenset[int]:
        """The examples that own a unit."""
        return frozenset(self.owner.tolist())


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of a layer's weight for chosen examples, computed on demand from its inputs and errors."""

    module: nn.Module
    parts: list[Part]

    def total(self, examples: slice) -> Tensor | None:
        """Sum the gradients [K, ...] of some examples; None for a padding without a formula here."""
        module: Any = self.module
        summed: Tensor | None = None
        for x, errors in self.parts:
            if isinstance(module, nn.Linear):
                part = errors[examples].flatten(0, -2).T @ x[examples].flatten(0, -2)
            elif isinstance(module.padding, str) or module.padding_mode != "zeros":
                return None
            else:
                how = (module.stride, module.padding, module.dilation, module.groups)
                part = _GRADIENTS[x.ndim](x[examples], module.weight.shape, errors[examples], *how).flatten(1)
            summed = part if summed is None else summed + part
        return summed

    def shown(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the examples whose gradient has an owned row equal to the sent one, up to a factor."""
        examples: set[int] = set()
        for example in owned.examples:
            gradient = self.total(slice(example, example + 1))
            rows = owned.rows[owned.owner == example]
            if gradient is not None and bool((1 - agreement(gradient[rows], sent.flatten(1)[rows]) < most).any()):
                examples.add(example)
        return frozenset(examples)

    def unchanged(self, owned: Owned, sent: Tensor, most: float) -> frozenset[int]:
        """Return the owners of rows that are sent as in the batch's gradient, up to a factor."""
        gradient = self.total(slice(None)) if len(owned.rows) else None
        if gradient is None:
            return frozenset()
        same = 1 - agreement(gradient[owned.rows], sent.flatten(1)[owned.rows]) < most
        return frozenset(owned.owner[same].tolist())

    def agrees(self, sent: Tensor) -> float:
        """Return cos^2 of the whole gradient with the sent update; 1 if there is no formula."""
        gradient = self.total(slice(None))
        return 1.0 if gradient is None else float(agreement(gradient.flatten()[None], sent.flatten()[None]))


def agreement(rows: Tensor, sent: Tensor) -> Tensor:
    """Return cos^2 of each pair of rows."""
    rows, sent = rows.double(), sent.double()
    sizes = rows.norm(dim=1) * sent.norm(dim=1)
    return ((rows * sent).sum(1) / sizes.clamp(min=1e-300)).square()


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
    """Return the gradients, in one row, of the tensors from which a layer computes its weight."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in sources.items()}
    with torch.enable_grad():
        outputs = [call_on(module, leaves, x.to(next(iter(leaves.values())))) for x, _ in parts]
        errors = [part.to(out) for (_, part), out in zip(parts, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), errors)
    return torch.cat([value.flatten() for value in gradients])[None]
