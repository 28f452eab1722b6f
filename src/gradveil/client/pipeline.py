"""The one way from a client's examples to what it sends.

    examples = batch transforms                        (each local step draws its own)
    for t in steps:  g = gradient of the loss          (one sweep, or `vmap` of the reference)
                     g = step transform
    sent, state = send transform                       (of g, or of parameters in minus parameters out)

One client goes this way alone, the clients of a round go it in lockstep, and the many clients that an attacker
simulates go it in one sweep. Only the gradients are computed in different ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.client.defended_gradient import DefendedGradient
from gradveil.client.local_training import BatchDefences, LazyNoise, Local, train
from gradveil.client.private_layers import PrivateLayers, spread
from gradveil.core.chain import split
from gradveil.core.tree import Tensors, alike, all_finite, plain, select, stack, take, under, wide
from gradveil.core.types import Batch, Transform
from gradveil.gradients.objective import Objective, caught_outputs
from gradveil.gradients.per_client import obstacle, per_client_cosines, per_client_gradients, shortens
from gradveil.nn.stochastic import switched_off


class Task(NamedTuple):
    """What one client computes an update of, besides the parameters."""

    batch: Batch
    noise: LazyNoise
    state: Tensors


class Computed(NamedTuple):
    """What a client has computed before it sends."""

    batch: Batch
    """The examples it computed with; before local training, which transforms them again and again."""
    update: Tensors
    """The gradient, or parameters in minus parameters out."""
    state: Tensors
    """That of its steps, and of its private layers."""
    outputs: Tensor | None = None
    """The model's outputs for the batch, where they are at hand."""


class StepInput(NamedTuple):
    """What one client computes a gradient with, besides parameters and state."""

    batch: Batch
    noise: Mapping[str, Tensor]
    included: Tensor | None = None
    """[B] 1 for the examples that Poisson sampling took."""


def finite_or_before(sent: Mapping[str, Tensor], after: Tensors, before: Mapping[str, Tensor]) -> Tensors:
    """Return the state `after` a round, or the one `before` if that or what is `sent` has a value that is not finite.

    NaN in a residual, a moment or a momentum never leaves it again: one bad batch would ruin every later update. So the
    round does not count for the client. What is sent stays as it is: not for the client to make look right.

    >>> state = {"m": torch.zeros(1)}
    >>> finite_or_before({"w": torch.ones(1)}, {"m": torch.ones(1)}, state)["m"], finite_or_before(
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
class Pipeline:
    """The parts of a client that its updates come through: model, loss, settings and defences."""

    gradient: DefendedGradient
    batches: BatchDefences
    send: Transform | None
    messages: Mapping[str, Tensor]
    private: PrivateLayers

    def __call__(self, params: Tensors, tasks: Sequence[Task]) -> list[tuple[Tensors, Tensors]]:
        """Compute what each client sends, and its next state; several compute their gradients at once.

        The examples of a gradient have the same shapes for all. Local trainings may differ in length, the longest
        first: a client that has finished is left out of the later steps.
        """
        assert len(tasks) == 1 or not self.private.layers, "clients with private layers compute alone"
        local = self.batches.local
        computed = self._one_gradient(params, tasks) if local is None else self._trained(params, local, tasks)
        found: list[tuple[Tensors, Tensors]] = []
        for (batch, update, after, outputs), task in zip(computed, tasks, strict=True):
            sent, state = self._sent(params, batch, task.noise.once, task.state, update, after, outputs)
            found.append((sent, finite_or_before(sent, state, task.state)))
        return found

    @property
    def trains_private_layers(self) -> bool:
        """Whether local training changes something that the client never sends."""
        return self.batches.local is not None and bool(self.private.free(self.private.layers.neutral()))

    def of_zeros(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute what a client sends whose training comes to zeros; the batch tells how many examples there are."""
        update = {name: torch.zeros_like(params[name]) for name in self.gradient.trained}
        sent, after = self._sent(params, batch, noise, state, update, state)
        return sent, finite_or_before(sent, after, state)

    def first_input(self, task: Task) -> tuple[Batch, Tensors]:
        """Return the examples and the noise that the model gets for a client's first gradient."""
        batch, noise, state = task
        kept, local = self.kept(noise.once, state), self.batches.local
        if local is None:
            whole = self.batches.apply(batch, noise.once)
            return whole, self.model_noise({**noise.once, **kept}, len(whole.inputs))
        drawn, inner = noise.once[local.order], noise.step(0)
        examples = self.batches.steps(batch, drawn, noise.epoch)(0, inner)
        given = self.model_noise({**inner, **kept}, len(examples.inputs))
        if local.sampling != "poisson":
            return examples, given
        taken = drawn[0].nonzero().flatten()
        return Batch(*(value[taken] for value in examples)), {name: value[taken] for name, value in given.items()}

    def kept(self, noise: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensors:
        """Return the private layers before a round: drawn in a client's first one, state in all later ones.

        Noise and state may have clients in front.
        """
        found: Tensors = {}
        for name in self.private.layers:
            joined = state["kept.joined"] > 0
            joined = joined.view(*joined.shape, *[1] * (noise[name].dim() - joined.dim()))
            found[name] = torch.where(joined, state[f"kept.{name}"], noise[name])
        return found

    def model_noise(self, noise: Mapping[str, Tensor], examples: int) -> Tensors:
        """Return the model's noise, private layers included, for so many examples in one pass."""
        kept = {name: noise[name] for name in self.private.layers}
        return select({**noise, **spread(kept, examples)}, "model")

    def _one_gradient(self, params: Tensors, tasks: Sequence[Task]) -> list[Computed]:
        """Compute the gradient of each client's batch, all at the same parameters."""
        batches = [self.batches.apply(task.batch, task.noise.once) for task in tasks]
        kept = [self.kept(task.noise.once, task.state) for task in tasks]
        inputs: list[StepInput] = []
        for batch, task, own in zip(batches, tasks, kept, strict=True):
            noise = {n: v for n, v in task.noise.once.items() if n.startswith(("model.", "step."))}
            inputs.append(StepInput(batch, {**noise, **spread(own, len(batch.inputs))}))
        states = _together([select(task.state, "step") for task in tasks])
        with caught_outputs() as outputs:
            g, after = self._step(*self.gradient.parted(params), inputs, states, several=len(tasks) > 1, shared=True)
        last = outputs[-1] if outputs else None
        return [
            Computed(batches[i], _of(g, i, tasks), _after_steps(_of(after, i, tasks), kept[i], task), last)
            for i, task in enumerate(tasks)
        ]

    def _trained(self, params: Tensors, local: Local, tasks: Sequence[Task]) -> list[Computed]:
        """Train each client from the same parameters, all of them step by step."""
        drawn = [task.noise.once[local.order] for task in tasks]
        lengths = [len(own) for own in drawn]
        assert lengths == sorted(lengths, reverse=True)
        examples = [
            self.batches.steps(task.batch, own, task.noise.epoch) for task, own in zip(tasks, drawn, strict=True)
        ]
        start, frozen = self.gradient.parted(params)
        kept = self.kept(tasks[0].noise.once, tasks[0].state)
        free = self.private.free(kept) if kept else {}
        state = _together([select(task.state, "step") for task in tasks])
        computed: list[Computed] = []  # the last client's first
        several = len(tasks) > 1

        def finish(t: int, now: Tensors) -> None:
            """Keep where those have come who have had t steps."""
            nonlocal state
            # The longest come first: those with exactly t steps are the last of those who are left.
            for i in reversed(range(sum(length > t for length in lengths), len(tasks) - len(computed))):
                out = {name: value[i] for name, value in now.items()} if several else now
                update = {name: start[name] - out[name] for name in self.gradient.trained}
                moved = self.private.moved(kept, out) if kept else {}
                after = _after_steps(_of(state, i, tasks), moved, tasks[i])
                computed.append(Computed(tasks[i].batch, update, after))
                state = take(state, slice(i)) if several and i else state

        def gradient(t: int, now: Tensors) -> Tensors:
            nonlocal state
            finish(t, now)
            inputs: list[StepInput] = []
            for i in range(len(tasks) - len(computed)):
                noise = tasks[i].noise.step(t)
                batch = examples[i](t, noise)
                held = spread(self.private.moved(kept, now), len(batch.inputs)) if kept else {}
                inputs.append(StepInput(batch, {**noise, **held}, drawn[i][t] if local.sampling == "poisson" else None))
            # At the start all have the same parameters: without a dimension of clients, their gradients need one sweep
            # of shared weights.
            at = start if t == 0 else {name: now[name][: len(inputs)] if several else now[name] for name in start}
            g, state = self._step(at, frozen, inputs, state, several=several, shared=t == 0)
            g = alike(g, now)
            if free:
                g |= self._free_gradient({**frozen, **at}, inputs[0], kept, {name: now[name] for name in free})
            return {name: _filled(value, len(tasks)) for name, value in g.items()} if several else g

        begin = {name: value.expand(len(tasks), *value.shape) for name, value in start.items()} if several else start
        finish(lengths[0], train(local, begin | free, lengths[0], gradient))
        return computed[::-1]

    def _free_gradient(self, params: Tensors, given: StepInput, kept: Tensors, free: Tensors) -> Tensors:
        """Compute the gradient of the private layers, whose examples are weighted as those of the shared ones."""
        batch, noise, included = given
        weights = None if included is None else included / self.gradient.expected
        if weights is None and split(self.gradient.step)[0]:
            weights = batch.inputs.new_full((len(batch.inputs),), 1 / len(batch.inputs))
        return self.private.gradient(params, batch, select(noise, "model"), kept, free, weights)

    def _step(
        self,
        now: Tensors,
        frozen: Tensors,
        inputs: Sequence[StepInput],
        state: Tensors,
        *,
        several: bool,
        shared: bool,
    ) -> tuple[Tensors, Tensors]:
        """Compute the defended gradient and the next state, with a leading dimension where clients were `several`.

        That they keep to the last step, when only one may be left. Each has parameters of its own, unless `shared`.
        """

        def one(at: Tensors, batch: Batch, noise: Tensors, own: Tensors, *included: Tensor) -> tuple[Tensors, Tensors]:
            return self.gradient({**frozen, **at}, batch, noise, own, *included)

        included = [each.included for each in inputs if each.included is not None]
        if not several:
            return one(now, inputs[0].batch, dict(inputs[0].noise), state, *included)
        batch = Batch(*(torch.stack(values) for values in zip(*(each.batch for each in inputs), strict=True)))
        drawn = (torch.stack(included),) if included else ()
        places = (None if shared else 0, 0, 0, 0, *(0 for _ in drawn))
        return vmap(one, in_dims=places)(now, batch, stack([each.noise for each in inputs]), state, *drawn)

    def _sent(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        update: Tensors,
        after: Mapping[str, Tensor],
        outputs: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Transform what is sent; return it with the next state, which `after` has but for the transform's own.

        The transform may ask for gradients of all examples. What local steps drew is for parts of them: the model's
        noise is then off, but for private layers.
        """
        send_state: Tensors = {}
        if self.send is not None:
            examples, kept = len(batch.inputs), self.kept(noise, state)
            if self.batches.local is None:
                inner = self.model_noise({**noise, **kept}, examples)
            else:
                off = switched_off(self.gradient.objective.model, batch.inputs)
                inner = {**off, **select(spread(kept, examples), "model")}
            context = self.gradient.context(params, batch, inner, select(self.messages, "send"), outputs)
            update, send_state = self.send.apply(wide(update), select(state, "send"), select(noise, "send"), context)
        update = alike(update, params)
        after = {**after, **under("send", send_state)}
        return update, {name: after[name] for name in state if name in after} | after  # in the order of `init`

    def of_gradient(
        self, params: Tensors, g: Tensors, batch: Batch, noise: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return what is sent of a gradient, and the next state.

        `g` is that of each example, with a leading B, if the client defends those, else their mean.
        """
        each, mean = split(self.gradient.step)
        if each is not None:
            g = self.gradient.averaged(each, g, params, batch, noise)
        g, after = self.gradient.of_mean(mean, g, params, batch, noise, select(state, "step"))
        return self._sent(params, batch, noise, state, g, under("step", after))

    def obstacle(self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> str | None:
        """Return why `swept` does not serve for batches [V, B, ...] of these shapes; None if it does."""
        if self.batches.local is not None:
            return "the client trains several local steps"
        if self.private.layers:
            return "the model has private layers"
        return obstacle(*self._swept_inputs(params, self.batches.of_many(batch, noise), noise))

    def swept(self, params: Tensors, batch: Batch, noise: Tensors, state: Tensors) -> tuple[Tensors, Tensors] | None:
        """Compute what many clients send and their next states, everything with a leading V, in one sweep.

        None where that does not serve.
        """
        if self.batches.local is not None or self.private.layers:
            return None
        batch = self.batches.of_many(batch, noise)
        given = self._swept_inputs(params, batch, noise)
        if obstacle(*given) is not None:
            return None
        each, mean = split(self.gradient.step)
        gradients = per_client_gradients(*given)
        if each is not None:
            # [V B, ...] -> [V, B, ...]: in `_swept_inputs` each example is a target client.
            gradients = {
                name: value.reshape(*batch.inputs.shape[:2], *value.shape[1:]) for name, value in gradients.items()
            }
        elif mean is None and self.send is None:
            return gradients, {}

        sent, after = vmap(partial(self.of_gradient, params))(gradients, batch, noise, state)
        # An attack differentiates what it simulates, and would pay for this in every iteration.
        simulated = any(value.requires_grad for value in sent.values())
        return sent, after if simulated or not after else vmap(finite_or_before)(sent, after, state)

    def distances(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        targets: Tensors,
        squares: Tensor,
        masks: Mapping[str, Tensor],
    ) -> Tensor | None:
        """Compute 1 - cosine between many clients' masked gradients and targets, without the gradients.

        None where the sweep does not serve, or where that is no shorter.
        """
        objective, parted = self.gradient.objective, self.gradient.parted(params)
        given = objective, *parted, self.batches.of_many(batch, noise), select(noise, "model")
        if obstacle(*given) is not None or not shortens(*given):
            return None
        return per_client_cosines(*given, targets, squares, dict(masks))

    def _swept_inputs(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]
    ) -> tuple[Objective, Tensors, Tensors, Batch, Tensors]:
        """Return what the sweep takes; examples [V B, 1] where a transform acts on each of them."""
        inner = select(noise, "model")
        if split(self.gradient.step)[0] is not None:
            batch = Batch(*(value.flatten(0, 1).unsqueeze(1) for value in batch))
            inner = {name: value.flatten(0, 1).unsqueeze(1) for name, value in inner.items()}
        return self.gradient.objective, *self.gradient.parted(params), batch, inner


def _together(rows: Sequence[Tensors]) -> Tensors:
    return stack(rows) if len(rows) > 1 else rows[0]


def _of(tensors: Tensors, i: int, tasks: Sequence[Task]) -> Tensors:
    """Copy one client's tensors: a view keeps everybody's in memory, and sums depend on where a tensor lies."""
    return {name: value[i].clone() for name, value in tensors.items()} if len(tasks) > 1 else tensors


def _filled(value: Tensor, count: int) -> Tensor:
    """Give those who have finished a gradient of zero; where it takes them, nobody looks."""
    return value if len(value) == count else torch.cat([value, value.new_zeros(count - len(value), *value.shape[1:])])


def _after_steps(steps: Tensors, kept: Tensors, task: Task) -> Tensors:
    """Return the state after a client's steps; with private layers it has joined for good."""
    joined = under("kept", {"joined": torch.ones_like(task.state["kept.joined"]), **kept}) if kept else {}
    return under("step", steps) | joined
