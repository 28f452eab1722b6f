"""The last step of an update: what is sent is transformed, and the states of all slots are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.client.defended import Defended
from gradveil.client.own import spread
from gradveil.core.tree import Tensors, alike, select, under, wide
from gradveil.core.types import Batch, Transform
from gradveil.nn.stochastic import switched_off


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
