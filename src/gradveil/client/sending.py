"""The last step of an update: what is sent is transformed, and the states of all slots are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.client.defended import Defended
from gradveil.core.tree import Tensors, alike, select, under, wide
from gradveil.core.types import Batch, Transform


@dataclass(frozen=True)
class Sending:
    """The transform of what is sent, the round's public messages, and how it may ask for gradients."""

    send: Transform | None
    messages: Mapping[str, Tensor]
    gradient: Defended

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
