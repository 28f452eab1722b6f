"""What a batch says without running the model on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradveil.core.errors import Problem
from gradveil.core.types import Batch

Bounds = tuple[float | Tensor, float | Tensor]
"""Least and greatest allowed inputs: numbers, or tensors that broadcast."""
_SUM_TOLERANCE = 1e-3


def batch_problems(model: nn.Module, batch: Batch, bounds: Bounds | None, classes: int | None) -> list[Problem]:
    """Return the problems of the inputs, then those of the targets."""
    if not isinstance(batch, tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        remedy = "give gradveil.core.types.Batch(inputs, targets), both tensors"
        return [Problem("batch", f"is a {type(batch).__name__}, not a pair of tensors", remedy)]
    inputs, targets = batch
    if inputs.dim() == 0 or inputs.numel() == 0:
        what = f"is empty: inputs of shape {tuple(inputs.shape)}"
        return [Problem("batch.inputs", what, "give at least one example, [B, C, H, W]")]
    problems = _input_problems(model, inputs)
    if inputs.dtype.is_floating_point and not inputs.is_meta:
        problems += _bound_problems(inputs, bounds)
    if targets.device != inputs.device:
        what = f"lies on {targets.device}, the inputs on {inputs.device}"
        problems.append(Problem("batch.targets", what, f"targets.to('{inputs.device}')"))
    if targets.is_meta:
        return problems
    if targets.dim() == 0 or len(targets) != len(inputs):
        what = f"has shape {tuple(targets.shape)} for {len(inputs)} examples"
        problems.append(Problem("batch.targets", what, "give one target an example"))
        return problems
    return problems + target_problems(targets, classes)


def _input_problems(model: nn.Module, inputs: Tensor) -> list[Problem]:
    where = "batch.inputs"
    if not inputs.dtype.is_floating_point:
        what = f"has dtype {inputs.dtype}, in which nothing can be reconstructed by gradients"
        return [Problem(where, what, "convert to floating point: inputs.float() / 255 for bytes")]
    problems = []
    bad = torch.zeros(1, 1) if inputs.is_meta else ~inputs.detach().isfinite()
    if bad.any():
        examples = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
        what = (
            f"holds NaN or infinity in {int(bad.sum())} of {inputs.numel()} entries, in the examples {_some(examples)}"
        )
        problems.append(Problem(where, what, "leave these examples out, or correct how they are read"))
    parameter = next((p for p in model.parameters() if not is_lazy(p)), None)
    if parameter is not None and inputs.dtype != parameter.dtype:
        what = f"has dtype {inputs.dtype}, the model {parameter.dtype}"
        problems.append(Problem(where, what, f"inputs.to({parameter.dtype})"))
    if parameter is not None and inputs.device != parameter.device:
        what = f"lies on {inputs.device}, the model on {parameter.device}"
        problems.append(Problem(where, what, f"inputs.to('{parameter.device}')"))
    return problems


def _bound_problems(inputs: Tensor, bounds: Bounds | None) -> list[Problem]:
    if bounds is None:
        return []
    lower, upper = (torch.as_tensor(bound, dtype=inputs.dtype, device=inputs.device) for bound in bounds)
    try:
        torch.broadcast_tensors(inputs, lower, upper)
    except RuntimeError:
        what = f"of shapes {tuple(lower.shape)} and {tuple(upper.shape)} do not fit inputs {tuple(inputs.shape)}"
        return [Problem("bounds", what, "give numbers, or one bound a channel in the shape [C, 1, 1]")]
    outside = int(((inputs < lower - 1e-6) | (inputs > upper + 1e-6)).sum())
    if not outside:
        return []
    low, high = inputs.min().item(), inputs.max().item()
    allowed = f"[{lower.min().item():.4g}, {upper.max().item():.4g}]"
    what = f"{outside} of {inputs.numel()} entries lie outside the bounds {allowed}: they span [{low:.4g}, {high:.4g}]"
    remedy = "normalise the inputs as the bounds say, or give the bounds of normalised inputs"
    return [Problem("batch.inputs", what, remedy)]


def target_problems(targets: Tensor, classes: int | None) -> list[Problem]:
    """Return the problems of class numbers [B] or class probabilities [B, K], for a known number of classes."""
    where = "batch.targets"
    if targets.dim() == 1 and not targets.dtype.is_floating_point and targets.dtype != torch.bool:
        return _label_problems(targets, classes)
    if targets.dim() != 2 or not targets.dtype.is_floating_point:
        what = f"has shape {tuple(targets.shape)} and dtype {targets.dtype}"
        return [
            Problem(where, what, "give class numbers [B] (integers) or class probabilities [B, K] (floating point)")
        ]
    problems = []
    if classes is not None and targets.shape[1] != classes:
        what = f"holds probabilities of {targets.shape[1]} classes, there are {classes}"
        problems.append(Problem(where, what, f"give probabilities [B, {classes}]"))
    wrong = (targets < 0).any(1) | ((targets.sum(1) - 1).abs() > _SUM_TOLERANCE) | ~targets.isfinite().all(1)
    if wrong.any():
        what = f"the examples {_some(wrong.nonzero().flatten().tolist())} hold no probabilities"
        problems.append(Problem(where, what, "each row must be at least 0 and sum to 1; softmax(logits) does"))
    return problems


def _label_problems(targets: Tensor, classes: int | None) -> list[Problem]:
    where = "batch.targets"
    if targets.dtype != torch.long:
        remedy = "targets.long()"
        return [Problem(where, f"has dtype {targets.dtype}; losses take class numbers as int64", remedy)]
    problems = []
    if (targets < 0).any():
        what = f"holds negative class numbers: {_some(targets[targets < 0].tolist())}"
        problems.append(Problem(where, what, "number the classes from 0"))
    if classes is not None and (targets >= classes).any():
        what = f"holds class numbers beyond {classes - 1}: {_some(targets[targets >= classes].tolist())}"
        problems.append(Problem(where, what, f"number the {classes} classes from 0, or give more classes"))
    return problems


def _some(values: list[int]) -> str:
    """Show the first few of a list.

    >>> _some([1, 2, 3, 4, 5, 6, 7])
    '1, 2, 3, 4, 5, ...'
    """
    return ", ".join(str(value) for value in values[:5]) + (", ..." if len(values) > 5 else "")
