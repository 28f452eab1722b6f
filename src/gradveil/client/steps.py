"""Local training: T defended gradients, each where the last step left the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradveil.client.batching import Drawn
from gradveil.client.defended import Defended
from gradveil.client.local import Local, train
from gradveil.client.own import Own, spread
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Batch


@dataclass(frozen=True)
class Steps:
    """How a client trains: its local settings, its gradients, and what it keeps to itself."""

    local: Local
    gradient: Defended
    own: Own

    def __call__(
        self,
        params: Tensors,
        drawn: Tensor,
        examples: Callable[[int, Mapping[str, Tensor]], Batch],
        of_step: Drawn,
        state: Tensors,
        kept: Tensors,
    ) -> tuple[Tensors, Tensors, Tensors]:
        """Return parameters in minus parameters out, the state after it, and what is kept, which is trained with them.

        `drawn` [T, ...] says who is in which step, `examples(t, noise)` are those of step t.
        """
        current, poisson = state, self.local.sampling == "poisson"
        free = self.own.free(kept) if kept else {}
        step = self.gradient.step

        def gradient(t: int, now: Tensors) -> Tensors:
            nonlocal current
            included, inner = drawn[t] if poisson else None, of_step(t)
            batch = examples(t, inner)
            if not kept:
                g, current = self.gradient(now, batch, inner, current, included)
                return g
            at, held = {name: now[name] for name in params}, spread(self.own.moved(kept, now), len(batch.inputs))
            g, current = self.gradient(at, batch, {**inner, **held}, current, included)
            weights = None if included is None else included / self.local.batch
            if weights is None and step and step.split()[0]:
                weights = batch.inputs.new_full((len(batch.inputs),), 1 / len(batch.inputs))
            mine = {name: now[name] for name in free}
            return g | self.own.gradient(at, batch, select(inner, "model"), kept, mine, weights)

        out = train(self.local, {**params, **free}, drawn.shape[0], gradient)
        after = self.own.moved(kept, out) if kept else {}
        return {name: params[name] - out[name] for name in self.gradient.trained}, current, after
