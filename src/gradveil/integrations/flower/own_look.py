"""A client's own update, computed and looked at: what goes wrong on the way must not tell the server of the examples.

Flower sends the text of an error to the server, and that there is an error is a message too. Without a guarantee the
look comes before the update is stored or sent, and may refuse it, in a constant text. With one it comes when the reply
has been counted and stored, and nothing that it finds, or fails at, changes the reply; and a training that fails is no
message: it counts as zeros, to which the noise is added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gradveil.client import Client, ClientTask, drawn_update, first_gradient, idle_update
from gradveil.core.errors import FOREIGN, GradveilError, fail
from gradveil.core.secure_noise import SecretKey
from gradveil.core.tree import Tensors
from gradveil.federated.model_inspection import Finding, Policy
from gradveil.federated.update_inspection import exposure, guarded_update
from gradveil.integrations.flower.client_memory import LOG
from gradveil.theory.accounting import Unit

_ASK = "ask its operator, who has the log"


@dataclass(frozen=True)
class OwnUpdate:
    """How a client computes the update of a round, and what it does about what the update shows."""

    client: Client
    params: Tensors
    task: ClientTask
    previous: Tensors | None
    """What the round before began with."""
    last: Tensors | None
    """What was sent in answer to that."""
    guard: Policy
    leak: Policy

    def private(self, units: Collection[Unit]) -> tuple[Tensors, Tensors]:
        """Compute an update that a guarantee of these units covers, and the next state. Errors go to the log.

        Where it covers the whole client, an update that cannot be computed counts as zeros: noise is added to those.
        """
        try:
            return drawn_update(self.client, self.params, *self.task)
        except FOREIGN as error:
            LOG.error("the update cannot be computed: %s: %s", type(error).__name__, error)
        try:
            if "client" in units:
                # Noise of its own: what failed may be a stage behind the noise that was drawn before.
                return idle_update(self.client, self.params, *self.task._replace(key=SecretKey()))
        except FOREIGN as error:
            LOG.error("nor can one of zeros: %s: %s", type(error).__name__, error)
        raise fail("update", "cannot be computed", _ASK)

    def told(self, update: Tensors) -> None:
        """Write into the log what an update shows that is stored and covered by a guarantee; refuse nothing.

        The model and the loss are copies: what they keep of the examples would reach the updates of later rounds.
        """
        try:
            copied = self.client.objective.copied()
            own = replace(self, client=replace(self.client, model=copied.model, loss=copied.loss))
            own._look(update, _at_most_warn(self.guard), _at_most_warn(self.leak))
        except FOREIGN as error:
            LOG.warning("no look at the own update: %s: %s", type(error).__name__, error)

    def judged(self) -> tuple[Tensors, Tensors]:
        """Compute an update and the next state, and refuse it if the policies say so; no guarantee covers it."""
        update, state = drawn_update(self.client, self.params, *self.task)
        try:
            self._look(update, self.guard, self.leak)
        except GradveilError as error:  # the server must not learn how many examples were found
            for problem in error.problems:
                LOG.error("%s", problem)
            raise fail("update", "is not sent: the client's guard refuses it", _ASK) from None
        return update, state

    def _look(self, update: Tensors, guard: Policy, leak: Policy) -> None:
        if (guard, leak) == ("ignore", "ignore"):
            return
        first = first_gradient(self.client, self.params, self.task)
        found = exposure(self.client, self.params, self.task.batch, update, self.previous, first, self.last)
        if found.unseen:
            LOG.warning("update: no look at %s: what the gradients there show is not known", ", ".join(found.unseen))
        guarded_update(found, guard, leak, tell)


def tell(finding: Finding) -> None:
    """Write a finding into the log."""
    LOG.warning("%s", finding.problem("warning"))


def _at_most_warn(policy: Policy) -> Policy:
    return "warn" if policy == "refuse" else policy
