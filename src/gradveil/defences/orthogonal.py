"""CENSOR: send a vector at a right angle to each parameter's gradient, in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import fail
from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.settings import Checked, Count
from gradveil.core.tree import Tensors
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences.entry import DefenceEntry

_STEP = 1e-4
"""Length of the step after which losses are compared, in units of the gradient."""


@dataclass(frozen=True)
class Censor(Checked, Transform):
    """Send, for each parameter's gradient g, a random vector orthogonal to g, of the same norm (Zhang et al. 2025).

    With a random unit vector r: r - (r.g / g.g) g, scaled to the norm of g. Of T trials, the one with the least loss of
    the client's batch at w - 1e-4 times the trial is sent. The norm of every parameter's gradient, and all directions
    at a right angle to it, remain known to the server.

    `variant="published_code"` subtracts (r.g / |g|) g, as the authors' program does: orthogonal only where |g| = 1.
    """

    trials: Annotated[Count, "Random vectors, of which the one with the least loss is sent."] = 10
    variant: Annotated[
        Literal["paper", "published_code"], "Projection by g.g, or division by the norm as in the authors' program."
    ] = "paper"
    label: ClassVar[str] = "censor"
    stage: ClassVar[Stage] = Stage.STANDIN

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare one standard normal tensor a parameter and trial."""
        return NoiseSpec(
            {
                name: Noise((self.trials, *value.shape), Normal(), neutral=1.0, dtype=value.dtype)
                for name, value in params.items()
            }
        )

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Compute every trial, and send the one with the least loss."""
        trials = {name: self.across(value, noise[name]) for name, value in update.items()}
        if self.trials == 1:
            return {name: value[0] for name, value in trials.items()}, state
        if context.loss is None:
            problem = "needs the loss of the client's batch, and its context has none"
            raise fail("censor", problem, "use it where the mean over the batch is defended, by a Client")
        fixed = {name: value.detach() for name, value in trials.items()}
        params = {name: context.params[name].detach() for name in update}
        losses = torch.stack(
            [
                context.loss({name: params[name] - _STEP * fixed[name][trial] for name in update})
                for trial in range(self.trials)
            ]
        )
        # A mask in place of an index, which would be a tensor under vmap.
        chosen = torch.arange(self.trials, device=losses.device) == losses.argmin()
        sent = {
            name: (chosen.view(-1, *[1] * (value.ndim - 1)) * value).sum(0).to(update[name].dtype)
            for name, value in trials.items()
        }
        return sent, state

    def across(self, gradient: Tensor, drawn: Tensor) -> Tensor:
        """Return the trials [T, *shape] for one parameter; zeros where nothing is at a right angle to its gradient.

        >>> trials = Censor().across(torch.tensor([3.0, 0.0]), torch.tensor([[1.0, 1.0], [1.0, -2.0]]))
        >>> trials.round().abs().tolist()
        [[0.0, 3.0], [0.0, 3.0]]
        """
        g, r = gradient.flatten(), drawn.to(gradient.dtype).flatten(1)
        r = r / _length(r).unsqueeze(1)
        square = g.square().sum()
        size = torch.where(square > 0, square, 1.0)
        along = (r @ g) / (size if self.variant == "paper" else size.sqrt())
        rest = r - along.unsqueeze(1) * g
        length = _length(rest)
        # Nothing is at a right angle to a gradient of one entry: what is left is rounding, and must not be scaled up.
        scale = torch.where(length > _ROUNDED, torch.where(square > 0, size.sqrt(), 0.0) / length, 0.0)
        return (scale.unsqueeze(1) * rest).view(-1, *gradient.shape)


_ROUNDED = 1e-5
"""Length of a projected unit vector below which it is rounding."""


def _length(rows: Tensor) -> Tensor:
    square = rows.square().sum(1)
    return torch.where(square > 0, square, 1.0).sqrt()


ORTHOGONAL = (
    DefenceEntry(
        name="censor",
        factory=Censor,
        stage="censor",
        description="CENSOR: send a random vector at a right angle to each gradient, the best of some by the loss",
        changes=("step",),
        cost="a forward pass and a copy of the gradient a trial; all bytes",
        traits=("turns gradients",),
        citation="Zhang et al. 2025, CENSOR: Defense Against Gradient Inversion via Orthogonal Subspace Bayesian "
        "Sampling (NDSS)",
    ),
)
