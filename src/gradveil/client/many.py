"""Many clients with the same parameters and one gradient each: one sweep computes all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.func import vmap

from gradveil.client.batched import obstacle, shortens, victim_cosines, victim_gradients
from gradveil.client.defended import Defended
from gradveil.client.sending import Sending
from gradveil.client.steady import steady
from gradveil.core.tree import Tensors, select, under
from gradveil.core.types import Batch


@dataclass(frozen=True)
class Many:
    """How clients come from batches [V, B, ...] to what they send: model, loss and defences are the same for all.

    Their batches are those that they compute with, after the batch defences.
    """

    gradient: Defended
    sending: Sending

    def obstacle(self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> str | None:
        """Say why the gradients of batches of these shapes are not computed in one sweep; None if they are."""
        return obstacle(
            self.gradient.objective, *self.gradient.parted(params), *self._apart(batch, select(noise, "model"))
        )

    def updates(self, params: Tensors, batch: Batch, noise: Tensors, state: Tensors) -> tuple[Tensors, Tensors] | None:
        """Compute what everybody sends, and the states after it; None where there is an obstacle."""
        given = self.gradient.objective, *self.gradient.parted(params), *self._apart(batch, select(noise, "model"))
        if obstacle(*given) is not None:
            return None
        sent, after = self._transformed(victim_gradients(*given), params, batch, noise, state)
        # An attacker who differentiates what he simulates would pay for it in every iteration.
        simulated = any(value.requires_grad for value in sent.values())
        return sent, after if simulated or not after else vmap(steady)(sent, after, dict(state))

    def cosines(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        targets: Tensors,
        squares: Tensor,
        masks: Tensors,
    ) -> Tensor | None:
        """Compute 1 - cosine between everybody's gradient times masks and targets, without the gradients.

        None where there is an obstacle, or where that is no shorter.
        """
        given = self.gradient.objective, *self.gradient.parted(params), batch, select(noise, "model")
        if obstacle(*given) is not None or not shortens(*given):
            return None
        return victim_cosines(*given, targets, squares, masks)

    def _apart(self, batch: Batch, inner: Tensors) -> tuple[Batch, Tensors]:
        """Take [V, B] examples apart into [V B, 1], where a defence acts on each example's gradient."""
        step = self.gradient.step
        if step is None or step.split()[0] is None:
            return batch, inner
        single = Batch(*(value.flatten(0, 1).unsqueeze(1) for value in batch))
        return single, {name: value.flatten(0, 1).unsqueeze(1) for name, value in inner.items()}

    def _transformed(
        self, gradients: Tensors, params: Tensors, batch: Batch, noise: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Apply the transforms to the gradients: of each victim, or [V B] of each example if one acts on those."""
        step = self.gradient.step
        each, mean = step.split() if step else (None, None)
        if each is not None:
            gradients = {name: value.unflatten(0, batch.inputs.shape[:2]) for name, value in gradients.items()}
        elif mean is None and self.sending.send is None:
            return gradients, {}

        def transform(g: Tensors, own: Batch, own_noise: Tensors, own_state: Tensors) -> tuple[Tensors, Tensors]:
            if each is not None:
                g = self.gradient.averaged(each, g, params, own, own_noise)
            g, after = self.gradient.of_mean(mean, g, params, own, own_noise, select(own_state, "step"))
            return self.sending(params, own, own_noise, own_state, g, under("step", after))

        return vmap(transform)(gradients, batch, noise, state)
