"""Where a training stands, and what has been recorded of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradveil.core.tree import Tensors

Status = Literal["running", "finished", "stopped early", "diverged"]
"""What became of a training."""


@dataclass(frozen=True)
class Round:
    """What happened in one round; its number counts from 1."""

    number: int
    clients: tuple[int, ...]
    """Whose updates arrived."""
    absent: tuple[int, ...]
    """Who was chosen and did not answer."""
    accuracy: float
    """Share of the test examples that the new global parameters name rightly; what is random in the model is off."""
    loss: float
    validation_loss: float | None
    """Mean over all clients of the loss on what each keeps apart."""
    validation_accuracy: float | None
    bytes_up: int
    """Sent by all clients together."""
    bytes_down: int
    """Sent by the server to all chosen clients together."""
    seconds: float
    """Of the whole round: all clients in one process, the server, measuring the accuracy."""
    client_seconds: float | None = None
    """Of one client's update, on the average (of those that compute at once each has its share); None where nobody
    answered, or where an earlier version did not ask."""
    refused: tuple[int, ...] = ()
    """Whose update was not finite: it is left out, as a Flower client does not send it."""
    spoke: tuple[int, int] | None = None
    """How many clients spoke before it, and how many should have; None where none has to."""


@dataclass(frozen=True)
class Standing:
    """Where a training stands: all that the next round depends on, and what has been recorded."""

    params: Tensors
    server: Tensors
    clients: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    """The state of every client that has ever taken part (residuals, moments)."""
    best: Tensors = field(default_factory=dict[str, Tensor])
    """The parameters after the round with the lowest validation loss; empty while that is the last round."""
    best_round: int = 0
    mean: Tensors = field(default_factory=dict[str, Tensor])
    """The mean update of the last round, which is public; empty before the first."""
    moved: int = 0
    """Bytes of what the last round changed: what a client who took part in it is sent."""
    records: tuple[Round, ...] = ()
    status: Status = "running"
    planned: int = 0
    """The most rounds that were ever asked for: what is proven counts them, whoever then stopped earlier."""
    start: tuple[float | None, float] | None = None
    """Loss and accuracy on the test examples before the first round."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the user's own modules, as they were when the training began (`code_of`)."""

    @property
    def final(self) -> Tensors:
        """The parameters that the training ends with: the best ones."""
        return self.best or self.params
