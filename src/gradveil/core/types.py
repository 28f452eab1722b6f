"""The types every layer shares.

Shape legend, used as suffixes and in comments: V target clients, R restarts, N = V x R rows of an attack, T local
steps, B batch, C H W channels and image size, K classes, P entries of a parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
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
"""(outputs, targets) -> a scalar, or one loss per example."""


class Batch(NamedTuple):
    """A client's private examples: inputs [B, C, H, W], or [B, *shape] of another kind of examples.

    `targets` are [B] class numbers or [B, K] class probabilities.
    """

    inputs: Tensor
    targets: Tensor


def placed(inputs: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Move inputs to a device, and numbers (not names of tokens) to a precision."""
    return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)


@dataclass(frozen=True, eq=False)
class Domain:
    """Description of a client's examples: their space, number of classes, and public examples."""

    space: Space
    classes: int
    public: Tensor | None = None
    """[M, C, H, W] public examples of the same kind: some defences mix with them, some fit noise to them."""
    labels: Tensor | None = None
    """[M] class numbers of the public examples; None if unknown."""

    def batches(self, size: int, count: int) -> list[Batch]:
        """Return up to `count` batches of `size` public examples, at least one.

        Without labels, the classes take turns, so that all labels are equally likely, whatever the image.
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
    """The legal order of transforms within a chain: noise after pruning, for example, would fill the zeros again."""

    CLIP = 1
    NOISE = 2
    PRUNE = 3
    STANDIN = 3
    QUANTISE = 4


class Features(NamedTuple):
    """Path of the last linear layer, and its input [B, F] for a batch."""

    layer: str
    values: Tensor


class InputPerturbation:
    """Perturbations of a batch's inputs, by which gradients and features are differentiated: here, of numbers."""

    def zeros(self, inputs: Tensor) -> Tensor:
        """Return the perturbation that changes nothing: its shape begins with that of the batch."""
        return torch.zeros_like(inputs)

    @contextmanager
    def added(self, batch: Batch, perturbation: Tensor) -> Generator[Batch]:
        """Yield the perturbed batch, which models may be run on within the context only."""
        # Forward mode of GroupNorm raises for channels-last images.
        yield Batch(batch.inputs.contiguous() + perturbation, batch.targets)


@dataclass(frozen=True)
class Public:
    """Computations on public examples. They contain nothing private to the client."""

    domain: Domain
    gradient: Callable[[Batch], Tensors]
    """The client's differentiable mean gradient for public batches, with its model's noise switched off."""
    size: int
    """Examples per batch: as many as the client's batch has."""


@dataclass(frozen=True)
class Context:
    """Inputs of a transform besides the update.

    `gradient(batch)` is the client's differentiable mean gradient, `features(batch)` the input of its last layer.
    Like `sensitivity`, they are computed only when a transform calls them.
    """

    params: Mapping[str, Tensor]
    batch: Batch
    model_noise: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradient: Callable[[Batch], Tensors] | None = None
    features: Callable[[Batch], Features] | None = None
    sensitivity: Callable[[Tensor, Tensor], Tensors] | None = None
    """(directions [N, C, H, W] or [N, T, d], an offset in [0, 1)) -> estimates of ||dg_i/dx||^2 of the client's mean
    gradient g and its batch x, from derivatives of single examples' gradients."""
    messages: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Public messages of the round (a broadcast mask, say), the same for all clients: attackers see them too."""
    public: Public | None = None
    """None if the client declares no `Client.domain`."""
    expected: int | None = None
    """Divisor of sums over the batch under Poisson sampling; None for the number of examples."""
    included: Tensor | None = None
    """[B] 1 for the examples that Poisson sampling chose, 0 for the others; None if all are used."""
    loss: Callable[[Tensors], Tensor] | None = None
    """(trained parameters) -> the client's mean loss on its batch."""
    predict: Callable[[Tensor], Tensor] | None = None
    """(inputs of the batch's shape) -> the model's outputs."""
    perturbation: InputPerturbation = field(default_factory=InputPerturbation)
    """What gradients and features are differentiated by: the inputs, or the word embeddings of texts."""

    @property
    def divisor(self) -> int:
        """Divisor of sums over the batch."""
        return self.batch.inputs.shape[0] if self.expected is None else self.expected


@dataclass(frozen=True)
class Multiplier:
    """A transform that only multiplies an update: by masks, then by factors that depend on norms."""

    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Masks by parameter; parameters without one are not masked."""
    numbers: Callable[[Mapping[str, Tensor]], Tensors] | None = None
    """(squared norms by parameter) -> one positive factor per parameter; norms [B] of B updates give factors [B]."""
    keeps_direction: bool = True
    """True if the factor is the same for all parameters."""

    def of_norms(self, squares: Mapping[str, Tensor]) -> Tensors:
        """Return the factors; ones if they do not depend on norms."""
        return tmap(torch.ones_like, squares) if self.numbers is None else self.numbers(squares)

    def then(self, after: Multiplier) -> Multiplier:
        """Return the composition: this multiplier, then `after`."""

        def numbers(squares: Mapping[str, Tensor]) -> Tensors:
            first = self.of_norms(squares)
            # What `after` meets: norms once the first factors are on. Nobody takes factors where there are masks;
            # behind a mask the norms would be others.
            left = {name: square * first[name].square() for name, square in squares.items()}
            return tmap(torch.mul, first, after.of_norms(left))

        masks, keeps = multiplied(self.masks, after.masks), self.keeps_direction and after.keeps_direction
        return Multiplier(masks, numbers if self.numbers or after.numbers else None, keeps)


class Transform(ABC):
    """A pure function of an update, with explicit state and named noise.

    Concrete transforms are frozen dataclasses. `apply` returns the same result for the same arguments. State and noise
    are flat dictionaries whose names the transform chooses (a parameter's name, or `residual.<parameter>`).
    """

    stage: ClassVar[Stage]
    per_example: bool = False
    """Applied to each example's gradient, before averaging."""
    exact: ClassVar[bool] = False
    """Per-example gradients are computed, multiplied, transformed and summed in float64, a few at a time."""
    guarantee: ClassVar[str] = "no formal guarantee"
    shows_zeros: ClassVar[bool] = False
    """Zero entries stay zero and few others become zero, so the zeros of an earlier stage remain visible."""
    needs_public: ClassVar[bool] = False
    """The transform needs `Context.public` with images."""
    needs: ClassVar[str] = ""
    """What it needs of inputs, see `Space.offers`; nothing if it never looks at them."""
    added_inputs: ClassVar[int] = 0
    """Inputs of its own, per example of a gradient, whose gradients it adds."""
    identity_settings: ClassVar[Mapping[str, Any] | None] = None
    """The settings at which it is the identity, if any."""

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the state of a client that has sent nothing yet."""
        return {}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the random tensors of one application."""
        return NoiseSpec()

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare the random tensors whose shapes depend on the batch; not for per-example transforms.

        Of texts the batch holds word embeddings [B, T, d], see `Context.perturbation`; values are of no account.
        """
        return NoiseSpec()

    @abstractmethod
    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Transform one update; return it with the next state."""

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return the multiplier for this noise if the transform only multiplies, else None.

        Callers that need only norms or inner products then skip the full gradients. `noise` may have target clients as
        its first dimension; `off` names its tensors that are switched off. None is always correct, but may be slower.
        """
        return None

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare named intermediates (masks, clip factors) that the caller *may* pin through `noise`."""
        return NoiseSpec()

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return the intermediates that a sent update reveals, under the names of `intermediates`.

        With `exact`, `sent` is this transform's output. Otherwise a later transform changed the values, and only the
        zeros can be used.
        """
        return {}

    def in_round(self, number: int) -> Transform:
        """Return the transform of round `number` = 0, 1, ...: itself, unless it follows a (public) schedule."""
        return self


class Searches(ABC):
    """A transform that searches something in each application, which is too long for every iteration of an attack."""

    @abstractmethod
    def relaxed(self, domain: Domain) -> Transform:
        """Return the transform with what this one finds as named tensors: attackers search those themselves."""


class DrawsEntries(ABC):
    """A transform that sends each entry as a random number of its own, by a law that is known."""

    @abstractmethod
    def negative_log_likelihood(
        self, update: Mapping[str, Tensor], sent: Mapping[str, Tensor], width: float
    ) -> Tensors:
        """Return -log of the probability with which entries of updates [N, ...] are sent as these, up to constants.

        The law is smoothed over a width between 0 and 1, so that its slope leads from unlikely updates to likely ones.
        """


class HasMessages(ABC):
    """A transform that needs public messages before each round, computed from proposals of some clients."""

    def speakers(self) -> int:
        """Return the number of clients that send a proposal before a round."""
        return 0

    def takes_turns(self) -> bool:
        """Return whether clients send proposals in turn, instead of being drawn at random in each round."""
        return False

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Return what a speaker publishes about the update that it is going to send."""
        return {}

    @abstractmethod
    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Compute the messages of round `number` = 0, 1, ...; clients receive them in `Context.messages`.

        `proposals` come from `speakers()` users, first dimension U; `previous` is the mean update of the round before,
        empty in the first. The function must be pure, so that anyone with these public arguments can check the server.
        """


Redraw = Literal["epoch", "step"]
"""How often batch noise is drawn again in local training."""


class BatchTransform(ABC):
    """A pure function from a batch to the batch used for training (augmentation, mixing)."""

    redraw: ClassVar[Redraw] = "epoch"
    """In local training: `epoch` transforms all of the client's examples once per epoch, `step` each step's batch."""
    smooth: ClassVar[bool] = False
    """For fixed noise, the result is differentiable in the inputs, so that error bounds hold for it."""

    needs: ClassVar[str] = "numbers"
    """What it needs of inputs, see `Space.offers`."""

    @property
    def needs_public(self) -> bool:
        """True if it needs `Domain.public`."""
        return False

    def problems(self, domain: Domain | None) -> Iterator[Problem]:
        """Yield what is missing in the client's domain."""
        where = str(getattr(self, "label", "") or type(self).__name__.lower())
        if domain is not None:
            yield from domain.space.unmet(where, self.needs)
        if self.needs_public and (domain is None or domain.public is None or not len(domain.public)):
            remedy = "audit data with a public split, give Client(domain=Domain(..., public=images)), or leave it out"
            yield Problem(where, "mixes with public images, and there are none", remedy)

    def placeholder(self, domain: Domain | None) -> int | None:
        """Return the token that takes the place of others in texts; None if there is none."""
        return None

    @abstractmethod
    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare the random tensors."""

    @abstractmethod
    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Transform the batch. `domain` is the client's domain, if it declares one."""
