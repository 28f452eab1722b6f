"""Compare what two versions of a model compute on a batch: outputs and gradients."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.errors import FOREIGN
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Loss

TOLERANCE_DOUBLE, TOLERANCE = 1e-5, 5e-2
"""Largest difference, relative to the norm, that counts as rounding: in double precision, and in any other."""
_SMALL = 1e-3
"""A gradient smaller than this share of the whole is compared with that share: it may be nothing but rounding."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The hidden dropout layers of torch that have an explicit counterpart."""
_EXAMPLES = 4


@dataclass(frozen=True)
class Answers:
    """The outputs of a model on a batch, and the gradients of its parameters; none where the loss has no gradient."""

    outputs: Any
    slopes: Tensors | None


@dataclass(frozen=True)
class Comparison:
    """A batch and a loss, on which models are compared."""

    batch: Batch
    loss: Loss

    def difference(self, before: nn.Module, after: nn.Module) -> str | None:
        """Describe how outputs or gradients differ by more than rounding; None where they agree.

        None too where the model before cannot be run on the batch, which `gradveil.nn.check` reports. Both see the same
        random numbers, and torch's own dropout layers are switched off in both. They compute in double precision, since
        single precision rounds the gradients of deep networks by up to a percent; a model that cannot, in its own.
        """
        for double in (True, False):
            try:
                old = self._answers(before, double)
            except FOREIGN:
                continue
            try:
                new = self._answers(after, double)
            except FOREIGN as error:
                return f"the forward pass fails: {type(error).__name__}: {error}"
            limit = TOLERANCE_DOUBLE if double else TOLERANCE
            return _outputs_differ(new.outputs, old.outputs, limit) or _slopes_differ(new.slopes, old.slopes, limit)
        return None

    def _answers(self, model: nn.Module, double: bool) -> Answers:
        copy = deepcopy(model)
        for module in copy.modules():
            if isinstance(module, DROPOUTS):
                module.eval()
        inputs, targets = (value.detach()[:_EXAMPLES].clone() for value in self.batch)
        if len(inputs) == 1:  # of which training-mode BatchNorm may refuse to take a variance
            inputs, targets = torch.cat([inputs, inputs.flip(-1)]), torch.cat([targets, targets])
        if double:
            copy, inputs = copy.double(), inputs.double()
            targets = targets.double() if targets.dtype.is_floating_point else targets
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = copy(inputs)
            params = {name: value for name, value in copy.named_parameters() if value.requires_grad}
            try:
                loss, every = self.loss(outputs, targets).mean(), list(params.values())
                slopes = torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True)
            except FOREIGN:
                return Answers(outputs, None)
        return Answers(outputs.detach(), dict(zip(params, slopes, strict=True)))


def _outputs_differ(new: Any, old: Any, limit: float) -> str | None:
    if not isinstance(old, Tensor):
        return None  # no model that can be audited
    if not isinstance(new, Tensor) or new.shape != old.shape:
        return f"the outputs have the shape {tuple(getattr(new, 'shape', ()))}, not {tuple(old.shape)}"
    return _differ("the outputs", new, old, limit)


def _slopes_differ(new: Tensors | None, old: Tensors | None, limit: float) -> str | None:
    if old is None:
        return None
    if new is None:
        return "the loss has no gradient"
    if new.keys() != old.keys():
        return f"the trained parameters are others: {', '.join(sorted(new.keys() ^ old.keys()))}"
    whole = float(torch.stack([_size(slope) for slope in old.values()]).norm()) if old else 0.0
    each = (_differ(f"the gradient of '{name}'", new[name], old[name], limit, _SMALL * whole) for name in old)
    return next((text for text in each if text), None)


def _differ(what: str, new: Tensor, old: Tensor, limit: float, least: float = 0.0) -> str | None:
    """Describe a difference relative to the larger of both norms, and of the `least` norm that counts."""
    error, size = float(_size(new - old)), max(float(_size(new)), float(_size(old)), least)
    return f"a difference of {100 * error / size:.3g}% in {what}" if error > limit * size else None


def _size(value: Tensor) -> Tensor:
    return value.detach().double().nan_to_num().norm()
