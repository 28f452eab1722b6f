"""Attacks of a malicious server: it puts a block before the model, and reads examples off the block's gradient.

The block measures the image in several ways, each behind a ReLU. The gradient of a measure is dW_i = sum_x d_i(x) x
and db_i = sum_x d_i(x), over the examples x that it lets through: of one example alone, dW_i / db_i is the example.
What the measures are, and which of their combinations hold one example, is what such attacks differ in.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.attacks.infer import Labels, find_labels, label_problems
from gradveil.attacks.knowledge import How, Knowledge
from gradveil.attacks.undo import undone
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.nn.planted import Planted

WEIGHT, BIAS = "measure.weight", "measure.bias"
"""The parameters of the block that examples are read off."""
_LOUD = 100.0
"""How many times as large a decoy's gradient is as that of a measure which the same examples pass."""


class Measures(NamedTuple):
    """Linear measures of an image: weights [K, N], biases [K], and above which values [K] they are cut, if they are."""

    weight: Tensor
    bias: Tensor
    ceiling: Tensor | None = None

    def most(self) -> Tensor:
        """Return the largest value of each measure of pixels in [0, 1], with room for rounding."""
        return 2 * (self.weight.clamp(min=0).sum(1) + self.bias.abs())


class Planting(ABC):
    """What attacks with a planted block share; they look at the first round, whose block is as it was planted."""

    name: str
    gain: float
    """How large measures are. The model gets what it would get of measures of size one: the smaller they are, the
    larger is their gradient beside the model's own, and the more of it is left after a clip."""
    decoys: int
    """Rows more that every image passes, in pairs of opposite effect, with the largest gradients of all: what a
    defence takes that prunes the largest entries."""
    labels: Labels
    undo: bool
    """Undo the client's batch defence by its public transforms, once the images it trained on are read off."""
    rounds: ClassVar[Literal["first"]] = "first"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Nothing of the client's randomness."""
        return {}

    @property
    def belief(self) -> Literal["naive", "full"]:
        """Only a batch defence is simulated, and only to undo it."""
        return "full" if self.undo else "naive"

    @property
    @abstractmethod
    def units(self) -> int:
        """How many measures the block has."""

    @abstractmethod
    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Choose measures of pixels in [0, 1]."""

    @abstractmethod
    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Read images [n <= count, N], the surest first, off one update's dW [K, N] and db [K]; say how many stand out.

        Their pixels are in [0, 1]: the gradient is that of measures of pixels.
        """

    @abstractmethod
    def planted(self) -> str:
        """Say in words what is put into the model."""

    def and_decoys(self) -> str:
        """Mention the decoys, if there are any."""
        return f" and {self.decoys} decoys" if self.decoys else ""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and decoys that have no partner."""
        yield from label_problems(self.labels, prospect)
        if self.decoys % 2:
            what = "is odd, and they come in pairs of opposite effect: the model would not get what it gets without"
            yield Problem("decoys", what, f"give {self.decoys - 1} or {self.decoys + 1}")

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client as it is after it took the model that the server sends."""
        example = next(iter(client.params().values()))
        lower, upper = (
            bound.to(example).expand(knowledge.shape).flatten() for bound in (knowledge.lower, knowledge.upper)
        )
        made = self.measures(prod(knowledge.shape), knowledge, key.child(Stream.MEASURES))
        weight, bias, ceiling = (self.gain * value.to(example) for value in self._with_decoys(made))
        # Pixels in [0, 1] are (x - lower) / (upper - lower) of what the model sees.
        weight = weight / (upper - lower)
        model = Planted(client.model, knowledge.shape, len(bias)).to(example)
        # Every measure acts on the model in the same way, and by more than a scale, which a norm would take away.
        back, rest = torch.randn(2, prod(knowledge.shape), generator=key.child(Stream.BEHIND).generator()).to(example)
        with torch.no_grad():
            model.measure.weight.copy_(weight)
            model.measure.bias.copy_(bias - weight @ lower)
            model.ceiling.copy_(ceiling)
            model.back.weight.copy_((back / (self.gain * self.units)).unsqueeze(1).expand(-1, len(bias)))
            for place in range(self.units, len(bias)):
                model.back.weight[:, place] *= _LOUD * (-1) ** place
            model.back.bias.copy_(rest)
        model.training = client.model.training  # of the whole alone: what of the client's was set apart stays so
        kept = client.trainable
        return replace(
            client,
            model=model,
            trainable=None if kept is None else ("measure.*", "back.*", *(f"model.{pattern}" for pattern in kept)),
            buffers={f"model.{name}": value for name, value in client.buffers.items()},
        )

    def _with_decoys(self, made: Measures) -> tuple[Tensor, Tensor, Tensor]:
        """Put the decoys behind the measures: the first of these, shifted so far that every image passes."""
        row = made.weight[:1]
        shift = 1 - row.clamp(max=0).sum(1)
        weight = torch.cat([made.weight, *[row] * self.decoys])
        bias = torch.cat([made.bias, *[shift] * self.decoys])
        ceiling = Measures(weight, bias).most()
        if made.ceiling is not None:
            ceiling[: self.units] = made.ceiling
        return weight, bias, ceiling

    def __call__(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Read every victim's images off the first round's update."""
        began, seen = time.perf_counter(), observations[0]
        if WEIGHT not in seen.update or not isinstance(belief.model, Planted):
            remedy = "let the server send the client that `craft` returns"
            raise fail(f"attack {self.name}", "its block was not in the model that the client trained", remedy)
        victims, count = len(seen.victims), seen.examples
        weight, bias = (seen.update[name][:, : self.units].double() for name in (WEIGHT, BIAS))
        sound = weight.isfinite().flatten(1).all(1) & bias.isfinite().all(1)
        lower, upper = (bound.to(weight) for bound in (knowledge.lower, knowledge.upper))
        ends = [bound.expand(knowledge.shape).flatten() for bound in (lower, upper)]
        weight = (weight - bias.unsqueeze(2) * ends[0]) / (ends[1] - ends[0])
        inputs = ((lower + upper) / 2).expand(victims, count, *knowledge.shape).clone()
        missing = torch.ones(victims, dtype=weight.dtype, device=weight.device)
        for victim in range(victims):
            if not bool(sound[victim]):
                continue
            found, clear = self.read(weight[victim], bias[victim], count)
            if len(found):
                again = torch.arange(count, device=found.device) % len(found)
                inputs[victim] = lower + (upper - lower) * found[again].clamp(0, 1).unflatten(1, knowledge.shape)
            missing[victim] = 1 - min(clear, count) / count
        targets = find_labels(self.labels, seen, belief.undefended_update(), knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        like = seen.update[WEIGHT]
        found = in_closed_form(inputs.to(like), targets, missing.to(like), sound, began, progress)
        return undone(found, belief, knowledge) if self.undo else found
