"""Secure aggregation: several clients whose updates are summed before the server sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor
from torch.func import vmap

from gradveil.client.client import Client
from gradveil.client.local_training import of_batch
from gradveil.core.errors import fail
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, select
from gradveil.core.types import Batch


def summed(client: Client, members: int) -> Client:
    """Make of a client so many of its kind, of whom only the mean is seen; of one, the client itself."""
    one = client.member
    settings = {field.name: getattr(one, field.name) for field in fields(one)}
    return Summed(**settings, count=members) if members > 1 else one


@dataclass(frozen=True)
class Summed(Client):
    """So many clients with the same settings, of whom the server sees one update: their mean.

    The batch holds the members' examples one after the other; noise and state get a leading dimension of members.
    """

    count: int = 2

    @property
    def members(self) -> int:
        """Count the clients whose updates are summed."""
        return self.count

    @property
    def member(self) -> Client:
        """One of them, who sends an update of its own."""
        return self._member

    @cached_property
    def _member(self) -> Client:
        return Client(**{field.name: getattr(self, field.name) for field in fields(Client)})

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the states of members that have sent nothing yet."""
        return {name: value.expand(self.count, *value.shape) for name, value in self.member.init(params).items()}

    def noise_spec(self, params: Mapping[str, Tensor], batch: Batch) -> NoiseSpec:
        """Declare what every member draws."""
        own = Batch(*(value[0] for value in self._by_member(batch)))
        return self.member.noise_spec(params, own).times(self.count)

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare none: a sum shows nobody's own."""
        return NoiseSpec()

    def evidence(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Give away nothing of any member."""
        return {}

    def update(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the mean of what the members send, and their next states."""
        each = vmap(self.member.update, in_dims=(None, 0, 0, 0))
        sent, after = each(params, self._by_member(batch), dict(noise), dict(state))
        return {name: value.mean(0) for name, value in sent.items()}, after

    def trained_on(self, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
        """Return what the members' batch defences make of their examples."""
        if not self.batch:
            return batch
        each = vmap(self.member.trained_on)(self._by_member(batch), of_batch(noise))
        return Batch(*(value.flatten(0, 1) for value in each))

    @property
    def apart(self) -> bool:
        """Several clients are not one of several."""
        return True

    def own(self, noise: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensors:
        """Return what every member keeps to itself."""
        kept = self._kept
        return vmap(self.member.own)({name: noise[name] for name in kept}, dict(state)) if kept else {}

    def updates(
        self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor], state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the means of many groups, one group after the other within `vmap`."""
        return self.updates_reference(params, batch, noise, state)

    def only_masks(
        self, params: Mapping[str, Tensor], examples: int, noise: Mapping[str, Tensor], off: Collection[str] = ()
    ) -> Tensors | None:
        """Say that more is done than multiplying a gradient by masks: the mean of several is taken."""
        return None

    def batched_obstacle(self, params: Tensors, batch: Batch, noise: Mapping[str, Tensor]) -> str | None:
        """Say why there is no batched sweep."""
        return "the client trains several local steps" if self.local else "several clients are summed"

    def _of_model(self, noise: Mapping[str, Tensor], examples: int) -> Tensors:
        kept = select({name: noise[name] for name in self._kept}, "model")
        drawn = {name: value.flatten(0, 1) for name, value in select(noise, "model").items() if name not in kept}
        each = examples // self.count
        return drawn | {name: value.repeat_interleave(each, 0) for name, value in kept.items()}

    def _by_member(self, batch: Batch) -> Batch:
        """Split [m B, ...] into [m, B, ...]."""
        examples = batch.inputs.shape[0]
        if examples % self.count:
            remedy = "give every member the same number of examples"
            raise fail("client.members", f"are {self.count}, and {examples} examples do not divide by it", remedy)
        return Batch(*(value.unflatten(0, (self.count, -1)) for value in batch))
