"""The types every layer shares.

Shape legend, used as suffixes and in comments: V target clients, R restarts, N = V x R rows of an attack, T local
steps, B batch, C H W channels and image size, K classes, P entries of a parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail
from gradveil.core.formatting import plural
from gradveil.core.noise import NoiseSpec
from gradveil.core.space import Space
from gradveil.core.tree import Tensors, multiplied, tmap

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a scalar, or one loss an example."""


class Batch(NamedTuple):
    """A client's private examples: inputs [B, C, H, W]; targets [B] class numbers or [B, K] class probabilities."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Domain:
    """What a client's examples are: their kind, and so many classes."""

    space: Space
    classes: int
    public: Tensor | None = None
    """[M, C, H, W] examples like them that everybody has: some batch defences mix with those, some noise is fitted to
    them."""
    labels: Tensor | None = None
    """[M] class numbers of the public examples; None where nobody knows them."""

    def batches(self, size: int, count: int) -> list[Batch]:
        """Return the first `count` batches of so many public examples, or as many as there are; at least one.

        Where there are no labels, the classes take turns: expectations are then over labels that are all as likely,
        whatever the image.
        """
        if self.public is None or len(self.public) < size:
            there = 0 if self.public is None else len(self.public)
            what = f"has {plural(there, 'public image')}, and a batch takes {size}"
            raise fail(
                "domain.public", what, "audit data with a larger public split, or give Domain(..., public=images)"
            )
        used = min(count, len(self.public) // size) * size
        turns = torch.arange(used, device=self.public.device) % self.classes
        labels = turns if self.labels is None else self.labels[:used]
        places = (slice(start, start + size) for start in range(0, used, size))
        return [Batch(self.public[some], labels[some]) for some in places]


class Stage(IntEnum):
    """The legal order of transforms within a chain: noise after a threshold would undo what the threshold promises."""

    CLIP = 1
    NOISE = 2
    PRUNE = 3
    STANDIN = 3
    QUANTISE = 4


class Features(NamedTuple):
    """What the last linear layer takes: the layer's path, and its input [B, F] for a batch."""

    layer: str
    values: Tensor


@dataclass(frozen=True)
class Public:
    """What everybody can compute: the client's model on public examples. Nothing of the client's own is in it."""

    domain: Domain
    gradient: Callable[[Batch], Tensors]
    """The client's differentiable mean gradient with its model's noise switched off, for public batches as large as its
    own."""
    size: int


@dataclass(frozen=True)
class Context:
    """What a transform may need beyond the update. Nothing here is global, nothing is hidden.

    `gradient(batch)` is the client's own differentiable mean gradient, `features(batch)` the input of its last layer:
    like `sensitivity` they are computed only where a transform asks.
    """

    params: Mapping[str, Tensor]
    batch: Batch
    model_noise: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradient: Callable[[Batch], Tensors] | None = None
    features: Callable[[Batch], Features] | None = None
    sensitivity: Callable[[Tensor, Tensor], Tensors] | None = None
    """(directions [N, C, H, W], an offset in [0, 1)) -> estimates of ||dg_i/dx||^2 of the client's own mean gradient g
    and its batch x, from derivatives of single examples' gradients."""
    messages: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Public messages of the round (a broadcast mask, say), the same for all clients: attackers see them too."""
    public: Public | None = None
    """None where the client says nothing of its examples (`Client.domain`)."""
    expected: int | None = None
    """What sums over the batch are divided by under Poisson sampling; None for the number of its examples."""
    included: Tensor | None = None
    """[B] 1 for the examples that Poisson sampling took, 0 for the others; None where all of the batch are taken."""

    @property
    def divisor(self) -> int:
        """What sums over the batch are divided by."""
        return self.batch.inputs.shape[0] if self.expected is None else self.expected


@dataclass(frozen=True)
class Multiplier:
    """What a transform does, if all it does is to multiply an update: by masks, then by numbers that norms decide."""

    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By parameter. A parameter without a mask is not masked."""
    numbers: Callable[[Mapping[str, Tensor]], Tensors] | None = None
    """(squared norms by parameter) -> one positive number for each; norms [B] of B updates give numbers [B]."""
    keeps_direction: bool = True
    """Whether these numbers are the same for all parameters."""

    def of_norms(self, squares: Mapping[str, Tensor]) -> Tensors:
        """Return the numbers, which are ones unless norms decide."""
        return tmap(torch.ones_like, squares) if self.numbers is None else self.numbers(squares)

    def then(self, after: Multiplier) -> Multiplier:
        """Multiply by this, then by another one."""

        def numbers(squares: Mapping[str, Tensor]) -> Tensors:
            first = self.of_norms(squares)
            left = {name: square * first[name].square() for name, square in squares.items()}
            return tmap(torch.mul, first, after.of_norms(left))

        masks, keeps = multiplied(self.masks, after.masks), self.keeps_direction and after.keeps_direction
        return Multiplier(masks, numbers if self.numbers or after.numbers else None, keeps)


class Transform(ABC):
    """A pure map of one update to another: explicit state, named noise.

    Concrete transforms are frozen dataclasses. `apply` gives the same result for the same arguments; state and noise
    are flat dictionaries whose names the transform chooses (a parameter's name, or `residual.<parameter>`).
    """

    stage: ClassVar[Stage]
    per_example: bool = False
    """Applied to each example's gradient before they are averaged."""
    exact: ClassVar[bool] = False
    """Every example's gradient is made, and multiplied, transformed and added up in float64, a few at a time."""
    guarantee: ClassVar[str] = "no formal guarantee"
    shows_zeros: ClassVar[bool] = False
    """What was zero before is zero after it, and few other entries are: zeros of an earlier stage remain evidence."""
    needs_public: ClassVar[bool] = False
    """It takes `Context.public`, with images in it."""
    identity_settings: ClassVar[Mapping[str, Any] | None] = None
    """The settings at which it changes nothing, if there are any."""

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        return {}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the random tensors of one application."""
        return NoiseSpec()

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the random tensors whose shapes follow from the batch; not for transforms of each example."""
        return NoiseSpec()

    @abstractmethod
    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Transform one update; return it with the next state."""

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return what an update is multiplied by with this noise, if nothing else is done to it.

        Gradients whose norms or inner products are all that is needed are then never made. `noise` may have target
        clients in front; `off` names the tensors of it that are off. None is always right, and may be slower.
        """
        return None

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare named intermediates (masks, clip factors) that the caller *may* pin through `noise`."""
        return NoiseSpec()

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return the intermediates that a sent update gives away, under the names of `intermediates`.

        It is `exact` as this transform made it, or shows but its zeros, since a later transform changed the values.
        """
        return {}

    def in_round(self, number: int) -> Transform:
        """Return the transform of round `number` = 0, 1, ...: itself, unless it follows a schedule, which is public."""
        return self


class HasMessages(ABC):
    """A transform that needs public messages before each round, made of what some of the clients propose."""

    def speakers(self) -> int:
        """Count the clients who propose something before a round."""
        return 0

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Return what a speaker makes public of the update that it is about to send."""
        return {}

    @abstractmethod
    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Make the messages of round `number` = 0, 1, ... out of what is public: they arrive in `Context.messages`.

        `proposals` are those of `speakers()` users, leading U; `previous` is the mean of all that was sent in the round
        before, empty in the first. It has to be a pure function: whoever sees these arguments can check the server.
        """


Redraw = Literal["epoch", "step"]
"""When something is drawn again in local training."""


class BatchTransform(ABC):
    """A pure map of a batch to the batch that is trained on (augmentation, mixing)."""

    redraw: ClassVar[Redraw] = "epoch"
    """In local training it acts on all of the client's examples in every epoch, or on the batch of every step."""
    smooth: ClassVar[bool] = False
    """Once its noise is drawn, what it makes of a batch has a derivative in the inputs: bounds hold through it."""

    @property
    def needs_public(self) -> bool:
        """Whether it takes `Domain.public`."""
        return False

    def problems(self, domain: Domain | None) -> Iterator[Problem]:
        """Say what is missing in what the client says of its examples."""
        if self.needs_public and (domain is None or domain.public is None or not len(domain.public)):
            remedy = "audit data with a public split, give Client(domain=Domain(..., public=images)), or leave it out"
            yield Problem(type(self).__name__.lower(), "mixes with public images, and there are none", remedy)

    @abstractmethod
    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare the random tensors."""

    @abstractmethod
    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Transform the batch. `domain` is what the client says of its examples; None where it says nothing."""
