"""Updates of many clients with the same parameters, in one batched sweep.

One client after the other spends most of a step on small batches with calling operations, not with arithmetic. Only
gradients are computed together: examples are gathered, noise is drawn and the update is sent as by one client alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.client.defended_gradient import Defended
from gradveil.client.local_training import Batching, Drawn, Local, train
from gradveil.client.sending import Sending, steady
from gradveil.core.chain import split
from gradveil.core.tree import Tensors, select, stack, take, under
from gradveil.core.types import Batch
from gradveil.gradients.per_client import obstacle, per_client_cosines, per_client_gradients, shortens


class Trainee(NamedTuple):
    """One of several clients who compute at once: what `Client.trained_update` takes besides the parameters."""

    batch: Batch
    noise: Mapping[str, Tensor]
    of_step: Drawn
    of_epoch: Drawn
    state: Tensors


class Way(NamedTuple):
    """How far a client has come before it sends."""

    batch: Batch
    """The examples it computed with; before local training, which changes them again and again."""
    update: Tensors
    """Parameters in minus parameters out, or the gradient."""
    state: Tensors
    """That of its steps."""


@dataclass(frozen=True)
class Abreast:
    """How clients come to what they send at once: model, loss, settings and defences are the same for all."""

    gradient: Defended
    batching: Batching
    sending: Sending

    def __call__(self, params: Tensors, trainees: Sequence[Trainee]) -> list[tuple[Tensors, Tensors]]:
        """Compute with everybody's examples from these parameters what each sends, and the next state.

        The shapes of a gradient's examples are the same for all. Local trainings may differ in length, the longest
        first: who has finished is left out of the later steps.
        """
        found: list[tuple[Tensors, Tensors]] = []
        for (batch, update, after), own in zip(self._ways(params, trainees), trainees, strict=True):
            noise = self.sending.noise(batch, own.noise, {})
            sent, state = self.sending(params, batch, noise, own.state, update, under("step", after))
            found.append((sent, steady(sent, state, own.state)))
        return found

    def _ways(self, params: Tensors, trainees: Sequence[Trainee]) -> list[Way]:
        states = [select(each.state, "step") for each in trainees]
        if self.batching.local is not None:
            return self._trained(params, self.batching.local, trainees, states)
        batches = [self.batching.changed(each.batch, each.noise) for each in trainees]
        noise = [{n: v for n, v in each.noise.items() if n.startswith(("model.", "step."))} for each in trainees]
        g, after = self._step(*self.gradient.parted(params), _joined(batches), stack(noise), stack(states), shared=True)
        return [Way(batch, _row(g, i), _row(after, i)) for i, batch in enumerate(batches)]

    def _trained(
        self, params: Tensors, local: Local, trainees: Sequence[Trainee], states: Sequence[Tensors]
    ) -> list[Way]:
        drawn = [each.noise[local.order] for each in trainees]
        examples = [
            self.batching.steps(each.batch, own, each.of_epoch) for each, own in zip(trainees, drawn, strict=True)
        ]
        lengths = [len(own) for own in drawn]
        assert lengths == sorted(lengths, reverse=True)
        start, frozen = self.gradient.parted(params)
        ways: list[Way] = []  # the last trainee's first
        current, poisson = stack(states), local.sampling == "poisson"

        def leave(t: int, now: Tensors) -> int:
            """Keep where those have come who have had t steps, and count the others."""
            nonlocal current
            there, left = len(trainees) - len(ways), sum(length > t for length in lengths)
            for i in reversed(range(left, there)):
                moved = {name: value - now[name][i] for name, value in start.items()}
                ways.append(Way(trainees[i].batch, moved, _row(current, i)))
            current = take(current, slice(left)) if left < there else current
            return left

        def gradient(t: int, now: Tensors) -> Tensors:
            nonlocal current
            there = leave(t, now)
            noise = [each.of_step(t) for each in trainees[:there]]
            batch = _joined([examples[i](t, own) for i, own in enumerate(noise)])
            included = torch.stack([own[t] for own in drawn[:there]]) if poisson else None
            at = start if t == 0 else take(now, slice(there))
            g, current = self._step(at, frozen, batch, stack(noise), current, included, shared=t == 0)
            return {name: _filled(value, len(trainees)) for name, value in g.items()}

        everybody = {name: value.expand(len(trainees), *value.shape) for name, value in start.items()}
        leave(lengths[0], train(local, everybody, lengths[0], gradient))
        return ways[::-1]

    def _step(
        self,
        now: Tensors,
        frozen: Tensors,
        batch: Batch,
        noise: Tensors,
        state: Tensors,
        included: Tensor | None = None,
        *,
        shared: bool,
    ) -> tuple[Tensors, Tensors]:
        """Compute everybody's defended gradient; in a first step all are at the same parameters."""

        def one(
            at: Tensors, own: Batch, own_noise: Tensors, own_state: Tensors, *who: Tensor
        ) -> tuple[Tensors, Tensors]:
            return self.gradient({**frozen, **at}, own, own_noise, own_state, *who)

        who = () if included is None else (included,)
        places = (None if shared else 0, 0, 0, 0, *(0 for _ in who))
        return vmap(one, in_dims=places)(now, batch, noise, state, *who)


def _joined(batches: Sequence[Batch]) -> Batch:
    return Batch(*(torch.stack(values) for values in zip(*batches, strict=True)))


def _row(tensors: Tensors, i: int) -> Tensors:
    """Copy one client's tensors: a view keeps everybody's in memory, and sums depend on where a tensor lies."""
    return {name: value[i].clone() for name, value in tensors.items()}


def _filled(value: Tensor, count: int) -> Tensor:
    """Give those who have finished a gradient of zero; where it takes them, nobody looks."""
    return value if len(value) == count else torch.cat([value, value.new_zeros(count - len(value), *value.shape[1:])])


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
        sent, after = self._transformed(per_client_gradients(*given), params, batch, noise, state)
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
        return per_client_cosines(*given, targets, squares, masks)

    def _apart(self, batch: Batch, inner: Tensors) -> tuple[Batch, Tensors]:
        """Take [V, B] examples apart into [V B, 1], where a defence acts on each example's gradient."""
        step = self.gradient.step
        if split(step)[0] is None:
            return batch, inner
        single = Batch(*(value.flatten(0, 1).unsqueeze(1) for value in batch))
        return single, {name: value.flatten(0, 1).unsqueeze(1) for name, value in inner.items()}

    def _transformed(
        self, gradients: Tensors, params: Tensors, batch: Batch, noise: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Apply the transforms to the gradients: of each target, or [V B] of each example if one acts on those."""
        step = self.gradient.step
        each, mean = split(step)
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
