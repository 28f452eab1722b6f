"""Checks of a model and a batch before an audit: every problem with its module path and a fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import Problem
from gradveil.core.types import Batch
from gradveil.nn.check.running import run_problems
from gradveil.nn.check.static import Bounds, batch_problems, layer_problems
from gradveil.nn.recurrence import PACKED

__all__ = ["check"]

_RECURRENCE = "replace_recurrent(model)"
"""Ends the remedy of recurrent layers that take tensors."""


def check(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    bounds: Bounds | None = None,
    classes: int | None = None,
) -> list[Problem]:
    """Return every problem that would stop an audit or falsify its results; raise for none.

    Checks the layers, the batch, a forward pass, the gradient, its derivative with respect to the inputs, and the
    batched form of both. The runs use a copy prepared by `gradveil.nn.surgery.prepare`, so they report problems that
    remain afterwards. `loss` defaults to cross-entropy; `bounds` are the smallest and largest allowed inputs (numbers,
    or tensors that broadcast), `classes` is the number of classes of the data set.
    """
    of_layers, of_batch = layer_problems(model), batch_problems(model, batch, bounds, classes)
    is_lazy = any("no shape yet" in problem.what for problem in of_layers)
    blocked = is_lazy or any(problem.severity == "error" for problem in of_batch)
    of_runs = [] if blocked else run_problems(model, batch, loss or F.cross_entropy)
    if any(problem == PACKED for problem in of_runs):
        of_layers = [replace(p, remedy=PACKED.remedy) if _RECURRENCE in p.remedy else p for p in of_layers]
    shortened = {problem.where for problem in of_layers if "max_norm" in problem.what}  # no two passes are the same
    of_runs = [problem for problem in of_runs if problem.where not in shortened]
    reported = {(problem.where, problem.remedy) for problem in of_layers}
    return of_layers + of_batch + [p for p in of_runs if (p.where, p.remedy) not in reported]
