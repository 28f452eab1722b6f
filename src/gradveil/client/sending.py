"""The last step of an update: transform it, collect the states, restore them after a round that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.client.defended_gradient import Defended
from gradveil.client.private_layers import spread
from gradveil.core.tree import Tensors, alike, all_finite, plain, select, under, wide
from gradveil.core.types import Batch, Transform
from gradveil.nn.stochastic import switched_off


def steady(sent: Mapping[str, Tensor], after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the state `after` a round, or the one `before` if that or what is `sent` has a value that is not finite.

    NaN in a residual, a moment or a momentum never leaves it again: one bad batch would ruin every later update. So the
    round does not count for the client. What is sent stays as it is: not for the client to make look right.

    >>> state = {"m": torch.zeros(1)}
    >>> steady({"w": torch.ones(1)}, {"m": torch.ones(1)}, state)["m"], steady(
    ...     {"w": torch.tensor([torch.nan])}, {"m": torch.ones(1)}, state
    ... )["m"]
    (tensor([1.]), tensor([0.]))
    """
    if not after:
        return after
    finite = all_finite(sent, after)
    if plain(finite, *after.values(), *before.values()):
        return after if bool(finite) else {name: before[name] for name in after}
    return {name: torch.where(finite, value, before[name]) for name, value in after.items()}


@dataclass(frozen=True)
class Sending:
    """The transform of what is sent, the round's public messages, and how it may ask for gradients."""

    send: Transform | None
    messages: Mapping[str, Tensor]
    gradient: Defended
    after_steps: bool
    """Whether what is sent comes of local training: what its steps draw is for parts of the batch."""

    def noise(self, batch: Batch, noise: Mapping[str, Tensor], kept: Tensors) -> Tensors:
        """Return all noise that the transform may see, for all examples, whose gradient it may ask for.

        Of local training that is the model's noise switched off, but for what the client has `kept`.
        """
        off: Tensors = {}
        if self.after_steps and self.send is not None:
            off = under("model", switched_off(self.gradient.objective.model, batch.inputs))
        return {**noise, **off, **spread(kept, batch.inputs.shape[0])}

    def __call__(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        state: Tensors,
        update: Tensors,
        after: Tensors,
        outputs: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return what is sent and the next state; `after` has those of the slots before it."""
        send_state: Tensors = {}
        if self.send:
            inner, messages = select(noise, "model"), select(self.messages, "send")
            context = self.gradient.context(params, batch, inner, messages, outputs)
            update, send_state = self.send.apply(wide(update), select(state, "send"), select(noise, "send"), context)
        update = alike(update, params)
        after = after | under("send", send_state)
        after = {name: after[name] for name in state if name in after} | after  # in the order of `init`
        return update, after
