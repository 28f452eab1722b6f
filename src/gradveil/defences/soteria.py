"""Soteria: hide the features that tell most of the inputs, by columns of the classifier's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vjp, vmap

from gradveil.core.allowed import Choice, Range, collect
from gradveil.core.errors import fail, refuse
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Context, Stage, Transform
from gradveil.defences.prune import below
from gradveil.defences.selection import smallest_mask

PERCENTILE = Range(0, 100, high_open=True)
"""A percentile below the largest."""
DELTA = Range(0, low_open=True)
"""What keeps the quotient by a feature finite."""
VARIANT = Choice(("paper", "published_code"))
"""The paper's choice of features, or that of the authors' program."""
AT_ONCE = 64
"""Features differentiated in one batch: each holds one more backward pass."""


@dataclass(frozen=True)
class Soteria(Transform):
    """Zero the columns of the last linear layer's weight gradient whose q_f is below the p-th percentile.

    q_f = sum over the batch of ||dr_f/dx_b|| / (|r_bf| + delta), where r_b [F] is what that layer takes for example b
    (Sun et al. 2021, after their sec. 4). Biases and other layers stay. Of equal features the first go first, and
    ceil(p (F - 1) / 100) go, as a percentile has it. delta = 0.1 is the authors' program's.

    `variant="published_code"` divides by r_bf + delta, and zeroes where |q_f| is below the percentile of the signed q:
    the same wherever features are above -delta, but for ties; where many are negative, fewer columns go, or none.

    The mask is an intermediate `mask.<weight>` [F], a constant for the derivative; the zero columns show it.
    """

    percentile: float = 60.0
    delta: float = 0.1
    variant: Literal["paper", "published_code"] = "paper"
    stage: ClassVar[Stage] = Stage.PRUNE

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, all at once."""
        settings = (("percentile", PERCENTILE), ("delta", DELTA), ("variant", VARIANT))
        refuse(collect("soteria", ((name, allowed, getattr(self, name)) for name, allowed in settings)))

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Draw nothing; refuse a client that trains no linear layer before its first update."""
        classifier(params)
        return NoiseSpec()

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the mask of features, which may be pinned."""
        name = classifier(params)
        shape, law = (params[name].shape[1],), Bernoulli(1 - self.percentile / 100)
        dtype = params[name].dtype
        mask = Noise(shape, law, neutral=1.0, dtype=dtype, lower=0.0, upper=1.0, discrete=True)
        return NoiseSpec({f"mask.{name}": mask})

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Multiply the columns by the mask, which is computed from the batch unless it is pinned."""
        if not self.percentile:
            return update, state
        name = classifier(update)
        pinned = noise.get(f"mask.{name}")
        mask = self._mask(name, context) if pinned is None else pinned
        return {**update, name: update[name] * mask.to(update[name].dtype)}, state

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Read the mask off the zero columns."""
        name = classifier(sent)
        return {f"mask.{name}": (sent[name] != 0).any(0).to(sent[name].dtype)}

    def _mask(self, name: str, context: Context) -> Tensor:
        with torch.no_grad():
            layer, relevance = self.relevance(context)
        if f"{layer}.weight" != name:
            what = f"acts on '{layer}.weight', and the last matrix that this client trains is '{name}'"
            raise fail("soteria", what, "train the last linear layer, and nothing of two dimensions after it")
        if self.variant == "published_code":
            return relevance.abs() >= percentile(relevance, self.percentile)
        return ~smallest_mask(relevance, below(self.percentile, len(relevance)))

    def relevance(self, context: Context) -> tuple[str, Tensor]:
        """Compute the last linear layer's path and q [F], by one batched backward pass for every 64 features."""
        if context.features is None:
            what = "needs the features of the client's model, and its context has none"
            raise fail("soteria", what, "use it where the mean over the batch is defended, by a Client")
        features, targets = context.features, context.batch.targets
        layer = ""

        def values(inputs: Tensor) -> Tensor:
            nonlocal layer
            layer, found = features(Batch(inputs, targets))
            return found

        r, pull = vjp(values, context.batch.inputs.detach())[:2]
        if r.dim() != 2:
            what = f"takes features [B, F], and '{layer}' is given {tuple(r.shape)}"
            raise fail("soteria", what, "end the model with a linear classifier of one vector an example")

        def lengths(direction: Tensor) -> Tensor:
            return pull(direction.expand_as(r))[0].flatten(1).norm(dim=1)

        directions = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        slopes = vmap(lengths, chunk_size=AT_ONCE)(directions).mT
        each = slopes / ((r.abs() if self.variant == "paper" else r) + self.delta)
        taken = context.included
        if taken is not None:  # who was not drawn may be no number
            weights = taken.to(each.dtype).unsqueeze(1)
            each = torch.where(weights != 0, weights * each, 0.0)
        return layer, each.sum(0)

    def smallest(self) -> Mapping[str, Any]:
        """No column goes."""
        return {"percentile": 0.0}


def percentile(values: Tensor, share: float) -> Tensor:
    """Return NumPy's percentile of numbers [F], in between two of them by a straight line.

    >>> percentile(torch.tensor([4.0, 1.0, 2.0]), 75)
    tensor(3.)
    """
    ordered = values.sort().values
    place = share / 100 * (len(values) - 1)
    low = int(place)
    return torch.lerp(ordered[low], ordered[min(low + 1, len(values) - 1)], place - low)


def classifier(params: Mapping[str, Tensor]) -> str:
    """Name the weight of the last linear layer among parameters in the model's order: the last of two dimensions.

    >>> classifier({"conv": torch.zeros(2, 1, 3, 3), "head.weight": torch.zeros(3, 2), "head.bias": torch.zeros(3)})
    'head.weight'
    """
    matrices = [name for name, value in params.items() if value.dim() == 2]
    if not matrices:
        what = "finds no weight of a linear layer among the parameters that are sent"
        raise fail("soteria", what, "train the model's classifier, or choose another defence")
    return matrices[-1]
