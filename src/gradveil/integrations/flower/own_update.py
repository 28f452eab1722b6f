"""A client's own update, computed and inspected without errors that tell the server about the examples.

Flower sends the text of an error to the server, and the error itself is a message too. Without a guarantee the update
is inspected before it is stored or sent, and may be refused with a constant text. With a guarantee it is inspected once
the reply has been counted and stored, and no result or failure of the inspection changes the reply. A training that
fails sends no error either: its update counts as zeros, to which the noise is added.
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
    """The update that a client computes in a round, and the policies for examples that it exposes."""

    client: Client
    params: Tensors
    task: ClientTask
    previous: Tensors | None
    """Parameters of the client's previous round."""
    last: Tensors | None
    """The update that was sent in that round."""
    guard: Policy
    leak: Policy

    def private(self, units: Collection[Unit]) -> tuple[Tensors, Tensors]:
        """Compute an update with a guarantee for these units, and the next state. Errors go to the log.

        If the guarantee covers the whole client, zeros with noise replace an update that cannot be computed.
        """
        try:
            return drawn_update(self.client, self.params, *self.task)
        except FOREIGN as error:
            LOG.error("the update cannot be computed: %s: %s", type(error).__name__, error)
        try:
            if "client" in units:
                # New noise: the stage that failed may follow the noise that was drawn before.
                return idle_update(self.client, self.params, *self.task._replace(key=SecretKey()))
        except FOREIGN as error:
            LOG.error("nor can one of zeros: %s: %s", type(error).__name__, error)
        raise fail("update", "cannot be computed", _ASK)

    def log_findings(self, update: Tensors) -> None:
        """Log the examples that a stored update with a guarantee exposes; refuse nothing.

        The model and the loss are copies: anything they remember of the examples would reach later updates.
        """
        try:
            copied = self.client.objective.copied()
            copy = replace(self, client=replace(self.client, model=copied.model, loss=copied.loss))
            copy._inspect(update, _at_most_warn(self.guard), _at_most_warn(self.leak))
        except FOREIGN as error:
            LOG.warning("the update was not inspected: %s: %s", type(error).__name__, error)

    def checked(self) -> tuple[Tensors, Tensors]:
        """Compute an update without a guarantee, and the next state; refuse the update where the policies demand it."""
        update, state = drawn_update(self.client, self.params, *self.task)
        try:
            self._inspect(update, self.guard, self.leak)
        except GradveilError as error:  # the server must not learn how many examples are exposed
            for problem in error.problems:
                LOG.error("%s", problem)
            raise fail("update", "is not sent: the client's guard refuses it", _ASK) from None
        return update, state

    def _inspect(self, update: Tensors, guard: Policy, leak: Policy) -> None:
        if (guard, leak) == ("ignore", "ignore"):
            return
        first = first_gradient(self.client, self.params, self.task)
        exposed = exposure(self.client, self.params, self.task.batch, update, self.previous, first, self.last)
        if exposed.unseen:
            LOG.warning("update: layers that were not inspected: %s", ", ".join(exposed.unseen))
        guarded_update(exposed, guard, leak, log_finding)


def log_finding(finding: Finding) -> None:
    """Log a finding as a warning."""
    LOG.warning("%s", finding.problem("warning"))


def _at_most_warn(policy: Policy) -> Policy:
    return "warn" if policy == "refuse" else policy
