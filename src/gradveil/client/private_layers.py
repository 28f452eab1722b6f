"""Private layers: a lock that a client draws in its first round, trains, and never sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, select, under
from gradveil.core.types import Batch
from gradveil.gradients.objective import Objective
from gradveil.nn.stochastic import free_of, kept_noise, moved_to

_MODEL = "model"


@dataclass(frozen=True)
class PrivateLayers:
    """A model's own tensors, by the names of the client's noise: `model.<path>.<name>`.

    Local training optimises `free` coordinates of them beside the parameters. These are named with a dot in front,
    as no parameter is.
    """

    objective: Objective
    adaptive: bool
    """Whether the local optimiser's steps are as long whatever the gradient's size: Adam's are."""

    @cached_property
    def layers(self) -> NoiseSpec:
        """Declare the tensors, which are drawn in a client's first round; the model is searched once."""
        return kept_noise(self.objective.model).under(_MODEL)

    def free(self, kept: Mapping[str, Tensor]) -> Tensors:
        """Return the coordinates that local training optimises."""
        return under("", free_of(self.objective.model, select(kept, _MODEL), self.adaptive))

    def moved(self, kept: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Tensors:
        """Return what is kept where those coordinates have come to be; `now` may hold parameters too."""
        own = moved_to(self.objective.model, select(kept, _MODEL), select(now, ""), self.adaptive)
        return under(_MODEL, own)

    def gradient(
        self,
        params: Mapping[str, Tensor],
        batch: Batch,
        noise: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        free: Mapping[str, Tensor],
        weights: Tensor | None = None,
    ) -> Tensors:
        """Compute the gradient of the batch's mean loss with respect to the coordinates.

        With `weights` [B] it is that of sum_b w_b loss_b instead, each example computed by itself: as where defences
        act on each example, or some of them are drawn. `noise` is the model's.
        """

        def loss(now: Tensors, some: Batch, inner: Mapping[str, Tensor]) -> Tensor:
            wide = spread(self.moved(kept, now), len(some.inputs))
            return self.objective.value(params, some, {**inner, **select(wide, _MODEL)})

        def value(now: Tensors) -> Tensor:
            if weights is None:
                return loss(now, batch, noise)

            def one(inputs: Tensor, targets: Tensor, inner: Tensors) -> Tensor:
                single = Batch(inputs.unsqueeze(0), targets.unsqueeze(0))
                return loss(now, single, {name: v.unsqueeze(0) for name, v in inner.items()})

            # What has no weight may be no number, and zero times that is none either.
            counted = weights.view(-1, *[1] * (batch.inputs.dim() - 1)) != 0
            inputs = torch.where(counted, batch.inputs, 0.0)
            return weights.to(batch.inputs.dtype) @ vmap(one)(inputs, batch.targets, dict(noise))

        return grad(value)(dict(free))


def spread(kept: Mapping[str, Tensor], examples: int) -> Tensors:
    """Give every example what the client keeps: the model's noise has the batch in front."""
    return {name: value.expand(examples, *value.shape) for name, value in kept.items()}
