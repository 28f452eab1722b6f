"""Problems of layers, parameters and batches that are visible without running the model."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradveil.core.errors import Problem
from gradveil.core.types import Batch
from gradveil.nn.formulas import by_formula
from gradveil.nn.surgery import (
    BATCHNORMS,
    CELLS,
    DROPOUTS,
    INSTANCENORMS,
    RECURRENT,
    BatchNorm,
    InstanceNorms,
    replaceable,
    uses_batch,
)
from gradveil.nn.token_layout import TokenModel

Bounds = tuple[float | Tensor, float | Tensor]
"""Smallest and largest allowed inputs: numbers, or tensors that broadcast."""
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
        problems.append(Problem("batch.targets", what, "give one target per example"))
        return problems
    return problems + target_problems(targets, classes)


def _input_problems(model: nn.Module, inputs: Tensor) -> list[Problem]:
    where = "batch.inputs"
    if isinstance(model, TokenModel) and inputs.dtype == torch.int64:
        return []
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
        problems.append(Problem(where, what, "remove these examples, or correct how they are read"))
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
        return [Problem("bounds", what, "give numbers, or one bound per channel in the shape [C, 1, 1]")]
    outside = int(((inputs < lower - 1e-6) | (inputs > upper + 1e-6)).sum())
    if not outside:
        return []
    low, high = inputs.min().item(), inputs.max().item()
    allowed = f"[{lower.min().item():.4g}, {upper.max().item():.4g}]"
    what = f"{outside} of {inputs.numel()} entries lie outside the bounds {allowed}: they span [{low:.4g}, {high:.4g}]"
    remedy = "normalise the inputs to these bounds, or give the bounds of normalised inputs"
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


SURGERY = "gradveil.nn"
"""Module with the remedies of these problems."""
_NEVER_EXPLICIT = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def layer_problems(model: nn.Module) -> list[Problem]:
    """Return the problems of all layers, then those of all parameters."""
    problems: list[Problem] = []
    for path, module in model.named_modules():
        problems += [
            Problem(path or "model", what, remedy)
            for what, remedy in (check(module) for check in (_randomness, _norm, _inplace, _recurrent, _shortened))
            if what
        ]
    return problems + _parameter_problems(model)


def _randomness(module: nn.Module) -> tuple[str, str]:
    kind = type(module).__name__
    if not module.training:
        return "", ""
    if isinstance(module, DROPOUTS) and module.p > 0:
        what = f"{kind} draws its mask from the global generator, so no attacker can replay the update"
        if replaceable(module, DROPOUTS):
            return what, f"replace it: {SURGERY}.replace_dropout(model)"
        remedy = "replace it by gradveil.nn.Dropout: only torch's own types without hooks are replaced"
        return what, remedy
    if isinstance(module, _NEVER_EXPLICIT):
        what = f"{kind} in training mode draws from the global generator, so no attacker can replay the update"
        return what, "replace it by gradveil.nn.Dropout, or put the module into evaluation mode"
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
        what = f"{kind} drops out inside (dropout={module.dropout}), from the global generator"
        return what, "set its dropout to 0 and use gradveil.nn.Dropout outside of it"
    return "", ""


def _norm(module: nn.Module) -> tuple[str, str]:
    kind = type(module).__name__
    if by_formula(module):
        return "", ""
    if isinstance(module, BatchNorm) and uses_batch(module):
        ways = f"{SURGERY}.replace_batchnorm(model, 'batch_statistics'), or 'frozen' or 'group'"
        ways = ways if replaceable(module, BATCHNORMS) else f"{BY_FORMULA}; or put it into evaluation mode"
        if module.running_mean is not None:
            return f"{kind} in training mode changes its running statistics in every forward pass", ways
        return f"batched derivatives through {kind}, which uses the batch's statistics, are wrong in torch", ways
    if isinstance(module, InstanceNorms) and module.track_running_stats:
        what = f"{kind} keeps running statistics"
        return what, f"make it with track_running_stats=False, then {SURGERY}.replace_layernorm(model)"
    if isinstance(module, nn.LayerNorm | InstanceNorms) and _forward_is_torchs(module):
        what = f"batched derivatives through torch's {kind} are silently wrong"
        explicit = f"replace it by an explicit one: {SURGERY}.replace_layernorm(model)"
        return what, explicit if replaceable(module, (nn.LayerNorm, *INSTANCENORMS)) else BY_FORMULA
    return "", ""


BY_FORMULA = f"compute it by its formula: {SURGERY}.prepare(model, batch=batch)"
"""The remedy for layers that are not replaced, since a subclass or a hook may compute something else."""


def _forward_is_torchs(module: nn.Module) -> bool:
    """Return whether a layer runs torch's own forward pass; others are tested by running them."""
    return type(module).forward in (nn.LayerNorm.forward, InstanceNorms.forward)


def _inplace(module: nn.Module) -> tuple[str, str]:
    if not getattr(module, "inplace", False):
        return "", ""
    what = f"{type(module).__name__}(inplace=True) overwrites what the second derivative needs"
    return what, f"switch it off: {SURGERY}.remove_inplace(model)"


def _recurrent(module: nn.Module) -> tuple[str, str]:
    if not isinstance(module, _RECURRENT):
        return "", ""
    what = f"{type(module).__name__} is recurrent, and torch cannot batch its derivatives over target clients"
    whole = isinstance(module, nn.RNNBase) and replaceable(module, RECURRENT) and not module.proj_size
    if whole or replaceable(module, CELLS):
        return what, f"compute its steps one by one: {SURGERY}.replace_recurrent(model)"
    return what, "audit a model without recurrent layers, or write the recurrence with nn.Linear"


def _shortened(module: nn.Module) -> tuple[str, str]:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
        return "", ""
    kind, norm, limit = type(module).__name__, module.norm_type, module.max_norm
    what = f"{kind}(max_norm={limit:g}) shortens rows of its table in place in every forward pass, unlike a gradient"
    rows = f"module.weight.data.renorm_({norm:g}, 0, {limit:g})"
    return what, f"shorten them once, {rows}, and set module.max_norm = None; the gradient stays the same"


def _parameter_problems(model: nn.Module) -> list[Problem]:
    names: dict[int, list[str]] = defaultdict(list)
    problems: list[Problem] = []
    trained = any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        if len(names[id(parameter)]) > 1:
            continue
        if is_lazy(parameter):
            problems.append(Problem(name, "has no shape yet (a lazy layer)", "run one forward pass first"))
            continue
        problems += _value_problems(name, parameter)
        if trained and not parameter.requires_grad:
            what = "has requires_grad=False: it is not trained and not part of the update"
            problems.append(Problem(name, what, "parameter.requires_grad_(True), unless it is meant", "warning"))
    for name, buffer in model.named_buffers():
        if not is_lazy(buffer):
            problems += _value_problems(name, buffer)
    for shared in names.values():
        if len(shared) > 1:
            what = f"is the same tensor as {', '.join(shared[1:])}: the update holds it once, under this name"
            problems.append(Problem(shared[0], what, "untie them if each should have its own update", "warning"))
    if not names:
        what, remedy = "has no parameters, so there is no update to attack", "give a model with trainable layers"
        problems.append(Problem("model", what, remedy))
    elif not trained:
        what, remedy = "has no parameter with requires_grad=True", "model.requires_grad_(True)"
        problems.append(Problem("model", what, remedy))
    return problems + _mixture_problems(model)


def _value_problems(name: str, tensor: Tensor) -> list[Problem]:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return []
    bad = int((~tensor.detach().isfinite()).sum())
    if not bad:
        return []
    what = f"holds NaN or infinity in {bad} of {tensor.numel()} entries"
    return [Problem(name, what, "load or train the weights again; a smaller learning rate may help")]


def _mixture_problems(model: nn.Module) -> list[Problem]:
    problems = []
    for what, values in (
        ("device", {str(p.device) for p in model.parameters()}),
        ("dtype", {str(p.dtype) for p in model.parameters()}),
    ):
        if len(values) > 1:
            problem = f"its parameters have more than one {what}: {', '.join(sorted(values))}"
            problems.append(Problem("model", problem, f"choose one: model.to({what}=...)"))
    return problems
