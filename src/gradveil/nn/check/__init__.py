"""Can this model be audited with this batch? All the reasons why not, with module paths and remedies."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.types import Batch
from gradveil.nn.check.running import run_problems
from gradveil.nn.check.static import Bounds, batch_problems, layer_problems

__all__ = ["check"]


def check(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    bounds: Bounds | None = None,
    classes: int | None = None,
) -> list[Problem]:
    """Return every problem that would stop or spoil an audit; never raise for one.

    Looks at the layers, at the batch, and at what a forward pass, the gradient, its derivative with respect to the
    inputs and the batched form of both do. The runs are made on a copy, on which the surgeries of
    `gradveil.nn.surgery.prepare` have been done: they show what would be left after those. `loss` is cross-entropy if
    none is given; `bounds` are the least and greatest allowed inputs (numbers, or tensors that broadcast), `classes` is
    the number of classes of the data set.
    """
    problems = layer_problems(model)
    found = batch_problems(model, batch, bounds, classes)
    problems += found
    blocked = any(problem.severity == "error" for problem in found) or _is_lazy(problems)
    return problems if blocked else problems + run_problems(model, batch, loss or F.cross_entropy)


def _is_lazy(problems: list[Problem]) -> bool:
    return any("no shape yet" in problem.what for problem in problems)
