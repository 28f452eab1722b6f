"""The client: what it sends is a pure function of parameters, batch, named noise and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, nn
from torch.func import vmap

from gradveil.client.declarations import Declared, NoiseParts, trained_names
from gradveil.client.defended_gradient import DefendedGradient
from gradveil.client.local_training import BatchDefences, Local
from gradveil.client.pipeline import Pipeline, Task
from gradveil.client.private_layers import PrivateLayers
from gradveil.core.chain import split
from gradveil.core.errors import fail
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, BatchTransform, Domain, Loss, Transform
from gradveil.gradients.objective import Objective, cross_entropy


@dataclass(frozen=True)
class Client:
    """One participant of federated training, with its defences inside it.

    Without `local` it sends the mean gradient of its batch. With `local` it trains T steps on the batch (all its N
    examples; the named tensor `schedule` [T, B], or `inclusion` [T, N], says who is in which step) and sends parameters
    in minus out.

    With `members` it is a group of clients with the same settings, of whom the server sees one update, their mean
    (secure aggregation). The batch then holds the members' examples one after the other; noise and state get a leading
    dimension of members.
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
    members: int = 1
    """Clients whose updates are averaged before the server sees them."""

    def __repr__(self) -> str:
        """Name the model, the training and the slots that a defence fills."""
        facts = {"local": self.local, "batch": self.batch, "step": self.step, "send": self.send}
        facts |= {"trainable": self.trainable, "members": self.members if self.members > 1 else None}
        filled = [f"{name}={value!r}" for name, value in facts.items() if value]
        return f"Client({', '.join([type(self.model).__name__, *filled])})"

    def __post_init__(self) -> None:
        """Refuse a transform of single examples where there is but one update."""
        if split(self.send)[0] is not None:
            what = "acts on each example, and what is sent is one update"
            raise fail("client.send", what, "give it as step=chain(...)")

    @cached_property
    def objective(self) -> Objective:
        """The model and loss."""
        return Objective(self.model, self.loss, self.buffers)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The way from examples to updates, of one of the members."""
        batches = BatchDefences(self.batch, self.domain, self.local)
        expected = self.local.batch if self.local else 0
        gradient = DefendedGradient(self.objective, self._trained, self.step, expected, self.domain)
        private = PrivateLayers(self.objective, self.local is not None and self.local.optimiser == "adam")
        return Pipeline(gradient, batches, self.send, self.messages, private)

    @cached_property
    def _declared(self) -> Declared:
        return Declared(self.pipeline)

    @cached_property
    def _trained(self) -> list[str]:
        return trained_names(self.model, self.trainable)

    @cached_property
    def _member(self) -> Client:
        return replace(self, members=1)

    def params(self) -> Tensors:
        """Return the model's own parameters, detached: the global parameters of round zero."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def trained(self) -> list[str]:
        """Name the parameters that are trained and sent, in the model's order."""
        return list(self._trained)

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        state = self._declared.init(self._sent(params))
        return state if self.members == 1 else {n: v.expand(self.members, *v.shape) for n, v in state.items()}

    def noise_spec(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseSpec:
        """Declare every random tensor of one update for a batch of these shapes."""
        if self.members > 1:
            own = Batch(*(value[0] for value in self._by_member(batch)))
            return self._member.noise_spec(params, own).times(self.members)
        return self._declared.noise(self._sent(params), batch)

    def noise_parts(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseParts:
        """Declare what one client draws once, in every local step and in every epoch: `noise_spec` in parts."""
        assert self.members == 1, "a group draws for each of its members"
        return self._declared.parts(self._sent(params), batch)

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the intermediates of the sent update (masks, scales) that an attacker may pin through the noise."""
        return self._declared.intermediates(self._sent(params)) if self.members == 1 else NoiseSpec()

    def evidence(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Return the intermediates that a sent update gives away; a sum gives away none of any member."""
        if self.members > 1:
            return {}
        return self._declared.evidence({name: sent[name] for name in self._trained if name in sent})  # in order

    def update(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute what the client sends, and its next state. Pure: no global state, no hidden randomness.

        A round whose update or state would not be finite leaves the state as it was; the update is sent as it is.
        """
        if self.members > 1:
            sent, after = self._member.updates(params, self._by_member(batch), noise, state)
            return {name: value.mean(0) for name, value in sent.items()}, after
        lazily = self.pipeline.batches.lazily(noise, self.pipeline.private.layers)
        return self.pipeline(params, [Task(batch, lazily, state)])[0]

    def updates(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the updates of many clients with the same parameters: everything but `params` has a leading V.

        Their gradients are computed in one sweep where `pipeline.obstacle` finds nothing against it.
        """
        if self.members > 1:
            members = Batch(*(value.flatten(0, 1) for value in vmap(self._by_member)(batch)))
            flat = [{name: value.flatten(0, 1) for name, value in part.items()} for part in (noise, state)]
            each, after = self._member.updates(params, members, *flat)
            sent = {name: value.reshape(-1, self.members, *value.shape[1:]).mean(1) for name, value in each.items()}
            return sent, {name: value.reshape(-1, self.members, *value.shape[1:]) for name, value in after.items()}
        swept = self.pipeline.swept(params, batch, dict(noise), state)
        return looped_updates(self, params, batch, noise, state) if swept is None else swept

    def undefended_update(self) -> Client:
        """Return this client without its step and send defences: what a naive attacker believes in.

        The model stays: whoever sends the parameters knows the architecture.
        """
        return replace(self, batch=(), step=None, send=None)

    def _sent(self, params: Mapping[str, Tensor]) -> Tensors:
        return {name: params[name] for name in self._trained}

    def _by_member(self, batch: Batch) -> Batch:
        """Split [m B, ...] into [m, B, ...]."""
        examples = batch.inputs.shape[0]
        if examples % self.members:
            remedy = "give every member the same number of examples"
            raise fail("client.members", f"are {self.members}, and {examples} examples do not divide by it", remedy)
        return Batch(*(value.unflatten(0, (self.members, -1)) for value in batch))


def looped_updates(
    client: Client, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
) -> tuple[Tensors, Tensors]:
    """Compute `Client.updates` by `vmap` over clients: for every client, and what the sweep is compared with."""
    return vmap(client.update, in_dims=(None, 0, 0, 0))(params, batch, dict(noise), state)
