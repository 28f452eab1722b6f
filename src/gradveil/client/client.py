"""The client: what it sends is a pure function of parameters, batch, named noise and state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.client.declarations import Declared, trained_names
from gradveil.client.defended_gradient import Defended
from gradveil.client.local_training import Batching, Drawn, Local, LocalSteps, of_batch
from gradveil.client.many_clients import Abreast, Many, Trainee
from gradveil.client.private_layers import Own, spread
from gradveil.client.sending import Sending, steady
from gradveil.core.chain import split
from gradveil.core.errors import fail
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, select, under
from gradveil.core.types import Batch, BatchTransform, Domain, Loss, Transform
from gradveil.gradients.inner_products import LARGE
from gradveil.gradients.objective import Objective, caught_outputs, cross_entropy
from gradveil.nn.normalisation import batch_statistics, running_statistics


@dataclass(frozen=True)
class Client:
    """One participant of federated training, with its defences inside it.

    Without `local` it sends the mean gradient of its batch. With `local` it trains T steps on the batch (all its N
    examples; the named tensor `schedule` [T, B], or `inclusion` [T, N], says who is in which step) and sends parameters
    in minus out.
    """

    model: nn.Module
    loss: Loss = cross_entropy
    local: Local | None = None
    batch: tuple[BatchTransform, ...] = ()
    step: Transform | None = None
    send: Transform | None = None
    trainable: tuple[str, ...] | None = None
    """Patterns of the parameters that are trained and sent (`"head.*"`); None for all that require a gradient."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Buffers that replace the model's own (running statistics of a later round)."""
    messages: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Public messages of the round, the same for all clients; those for `send` are named `send.<...>`."""
    domain: Domain | None = None
    """What its examples are: batch defences ask."""

    def __post_init__(self) -> None:
        """Refuse a transform of single examples where there is but one update."""
        if split(self.send)[0] is not None:
            what = "acts on each example, and what is sent is one update"
            raise fail("client.send", what, "give it as step=chain(...)")

    @property
    def members(self) -> int:
        """Count the clients of whom one update is seen: one, but for `summed`."""
        return 1

    @property
    def member(self) -> Client:
        """One of them, who sends an update of its own."""
        return self

    @cached_property
    def objective(self) -> Objective:
        """The model and loss."""
        return Objective(self.model, self.loss, self.buffers)

    def params(self) -> Tensors:
        """Return the model's own parameters, detached: the global parameters of round zero."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def trained(self) -> list[str]:
        """Name the parameters that are trained and sent, in the model's order. It is looked at once."""
        return list(self._trained)

    @cached_property
    def _trained(self) -> list[str]:
        return trained_names(self.model, self.trainable)

    @cached_property
    def _kept(self) -> NoiseSpec:
        """What the model has of the client's own: drawn once, never sent. It is looked at once."""
        return self._own.spec()

    @cached_property
    def _declared(self) -> Declared:
        return Declared(self.model, self._kept, self._batching, self.local, self.step, self.send)

    @cached_property
    def _defended(self) -> Defended:
        expected = self.local.batch if self.local else 0
        return Defended(self.objective, self._trained, self.step, expected, self.domain)

    @cached_property
    def _sending(self) -> Sending:
        return Sending(self.send, self.messages, self._defended, self.local is not None)

    @cached_property
    def _many(self) -> Many:
        return Many(self._defended, self._sending)

    @cached_property
    def _own(self) -> Own:
        return Own(self.objective, self.local is not None and self.local.optimiser == "adam")

    def trains_its_own(self) -> bool:
        """Say whether local training changes something that the client keeps to itself and never sends."""
        return self.local is not None and bool(self._own.free(self._kept.neutral()))

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        return self._declared.init(self._sent(params))

    def noise_spec(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseSpec:
        """Declare every random tensor of one update for a batch of these shapes."""
        return self._declared.noise(self._sent(params), batch)

    def round_spec(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseSpec:
        """Declare what an update draws once: for the batch of one gradient, for what is sent, the order of examples."""
        return self._declared.of_round(self._sent(params), batch)

    def epoch_spec(self, batch: Batch) -> NoiseSpec:
        """Declare what local training draws in every epoch: `noise_spec` has one of these for each that is begun."""
        return self._declared.of_epoch(batch)

    def step_spec(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseSpec:
        """Declare what each gradient draws: `noise_spec` has T of these, one for every local step."""
        return self._declared.of_step(self._sent(params), batch)

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the intermediates of the sent update (masks, scales) that an attacker may pin through the noise."""
        return self._declared.intermediates(self._sent(params))

    def evidence(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Say what a sent update gives away about the intermediates."""
        return self._declared.evidence({name: sent[name] for name in self._trained if name in sent})  # in order

    def update(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute what the client sends, and its next state. Pure: no global state, no hidden randomness.

        A round whose update or state would not be finite leaves the state as it was; the update is sent as it is.
        """
        return self.trained_update(params, batch, noise, *self._batching.by_number(noise, self._kept), state)

    def trained_on(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Return what the batch defences make of a batch: the examples that the client computes with.

        In local training an example is changed anew again and again: here it is as it was the first time.
        """
        if not self.batch:
            return batch
        if self.local is None:
            return self._batching.changed(batch, noise)
        return self._batching.first_seen(batch, noise)

    def batch_spec(self, batch: Batch) -> NoiseSpec:
        """Declare what the batch defences draw for one pass over a batch, whatever is computed with it later."""
        return self._once.spec(batch)

    def transformed(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Apply the batch defences once to a batch, with what `batch_spec` declares."""
        return self._once.changed(batch, noise)

    @property
    def _once(self) -> Batching:
        return Batching(self.batch, self.domain, None)

    @cached_property
    def _batching(self) -> Batching:
        return Batching(self.batch, self.domain, self.local)

    def trained_update(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        of_step: Drawn,
        of_epoch: Drawn,
        state: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Compute `update`, asking for the noise of a local step when it comes: thousands of steps' would fill memory.

        `noise` holds what `round_spec` declares, `of_step(t)` what `step_spec` does, `of_epoch(e)` what `epoch_spec`
        does; without local training all of it is in `noise`.
        """
        batch = batch if self.local else self._batching.changed(batch, noise)
        own, kept = select(state, "step"), self.own(noise, state)
        whole = self._sending.noise(batch, noise, kept)
        if self.local is None:
            with caught_outputs() as outputs:
                update, step_state = self._defended(params, batch, whole, own)
        else:
            outputs = []
            examples = self._batching.steps(batch, noise[self.local.order], of_epoch)
            steps = LocalSteps(self.local, self._defended, self._own)
            update, step_state, kept = steps(params, noise[self.local.order], examples, of_step, own, kept)
        after = under("kept", {"joined": torch.ones_like(state["kept.joined"]), **kept} if kept else {})
        after = under("step", step_state) | after
        sent, after = self._sending(params, batch, whole, state, update, after, *outputs[-1:])
        return sent, steady(sent, after, state)

    def idle_update(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute what the client sends if its training comes to zeros: what is sent is still transformed.

        The batch tells how many examples there are; `noise` holds what `round_spec` declares.
        """
        update = {name: torch.zeros_like(params[name]) for name in self._trained}
        whole = self._sending.noise(batch, noise, self.own(noise, state))
        sent, after = self._sending(params, batch, whole, state, update, state)
        return sent, steady(sent, after, state)

    def first_given(
        self, batch: Batch, noise: Mapping[str, Tensor], of_step: Drawn, of_epoch: Drawn, state: Tensors
    ) -> tuple[Batch, Tensors]:
        """Return the examples and the noise that the model gets for the first gradient of `trained_update`."""
        own = self.own(noise, state)
        if self.local is None:
            whole = self._batching.changed(batch, noise)
            return whole, self._of_model({**noise, **own}, len(whole.inputs))
        drawn, inner = noise[self.local.order], of_step(0)
        examples = self._batching.steps(batch, drawn, of_epoch)(0, inner)
        given = self._of_model({**inner, **own}, len(examples.inputs))
        if self.local.sampling != "poisson":
            return examples, given
        taken = drawn[0].nonzero().flatten()
        return Batch(*(value[taken] for value in examples)), {name: value[taken] for name, value in given.items()}

    @property
    def apart(self) -> bool:
        """Whether `abreast` is not for it, since it has something of its own."""
        return bool(self._kept)

    def abreast(self, params: Tensors, trainees: Sequence[Trainee]) -> list[tuple[Tensors, Tensors]]:
        """Compute `trained_update` of several clients, their gradients at once: equal but for rounding."""
        assert not self.apart
        return Abreast(self._defended, self._batching, self._sending)(params, trainees)

    def own(self, noise: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensors:
        """Return what the client keeps to itself before a round: drawn in its first one, state in all later ones."""
        if not self._kept:
            return {}
        joined = state["kept.joined"] > 0
        return {name: torch.where(joined, state[f"kept.{name}"], noise[name]) for name in self._kept}

    def updates(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the updates of many clients with the same parameters: everything but `params` has a leading V.

        The gradients are computed in one batched sweep where `batched_obstacle` finds none.
        """
        noise = dict(noise)
        if self.local is None and not self._kept:
            found = self._many.updates(params, self._prepared(batch, noise), noise, state)
            if found is not None:
                return found
        return self.updates_reference(params, batch, noise, state)

    def cosines(
        self,
        params: Tensors,
        batch: Batch,
        noise: Mapping[str, Tensor],
        targets: Tensors,
        squares: Tensor,
        off: Collection[str] = (),
    ) -> Tensor | None:
        """Compute 1 - cosine between many clients' updates and targets [V, *shape], |targets|^2 given, by a short way.

        None where there is none: the updates must be gradients times masks at most, of a network with large layers.
        `off` names the noise that is off.
        """
        if not any(params[name].numel() >= LARGE for name in self._trained):  # before the images are transformed
            return None
        masks = self.only_masks(params, batch.inputs.shape[1], noise, off)
        if masks is None or self._kept:
            return None
        return self._many.cosines(params, self._prepared(batch, noise), noise, targets, squares, masks)

    def only_masks(
        self, params: Mapping[str, Tensor], examples: int, noise: Mapping[str, Tensor], off: Collection[str] = ()
    ) -> Tensors | None:
        """Return the masks that the mean gradient of so many examples is multiplied by, if little else is done to it.

        As `Transform.only_masks` has it: none of them where it keeps its direction, None where more may be done.
        """
        if self.local is not None:
            return None
        return self._declared.only_masks(self._sent(params), examples, noise, off)

    def updates_reference(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the same by `vmap` over targets: works for every client, and is what the fast path is held to."""
        return vmap(self.update, in_dims=(None, 0, 0, 0))(params, batch, dict(noise), state)

    def statistics(self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> Tensors:
        """Compute what enters the normalisation layers for batches [V, B, ...]: mean and variance, each [V, channels].

        Names are `<layer>.mean` and `<layer>.var`. What local steps draw is for parts of the batch: it is switched off.
        """
        if self.local is not None:
            once, device = replace(self, local=None), batch.inputs.device
            spec = once.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
            off = {n: v.to(device).expand(len(batch.inputs), *v.shape) for n, v in spec.neutral().items()}
            return once.statistics(params, batch, {**off, **{name: noise[name] for name in self._kept}})

        def one(own: Batch, own_noise: Tensors) -> Tensors:
            with batch_statistics(self.model) as found:
                self.objective.outputs(params, own.inputs, self._of_model(own_noise, own.inputs.shape[0]))
            return found

        return vmap(one)(self._prepared(batch, noise), dict(noise))

    def _of_model(self, noise: Mapping[str, Tensor], examples: int) -> Tensors:
        """Return the model's noise, and what it has of the client's own, for so many examples in one pass."""
        kept = select({name: noise[name] for name in self._kept}, "model")
        return select(noise, "model") | spread(kept, examples)

    def running(self) -> Tensors:
        """Return the running statistics of the model's BatchNorm layers, under the names of `statistics`."""
        return running_statistics(self.model)

    def batched_obstacle(self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> str | None:
        """Say why `updates` runs `updates_reference` for a batch [V, B, ...] of these shapes; None if it does not."""
        if self.local is not None:
            return "the client trains several local steps"
        if self._kept:
            return "the model has something of every client's own"
        return self._many.obstacle(params, self._prepared(batch, noise), noise)

    def _prepared(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Apply the batch transforms of every target client."""
        return vmap(self.trained_on)(batch, of_batch(noise)) if self.batch else batch

    def _sent(self, params: Mapping[str, Tensor]) -> Tensors:
        return {name: params[name] for name in self.trained()}

    def undefended_update(self) -> Client:
        """Return this client without its step and send defences: what a naive attacker believes in.

        The model stays: whoever sends the parameters knows the architecture.
        """
        return replace(self, batch=(), step=None, send=None)
