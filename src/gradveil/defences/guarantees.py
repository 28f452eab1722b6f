"""Formal guarantees of a defended client: the differential privacy of its clips and noise.

A guarantee follows from the client's stages, never from a defence's name: a composition has the guarantees of its
parts, and a heuristic has none. A flaw may void the guarantee per example and leave the one per client, because the
clip of a whole update covers every stage before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from typing import Literal

from gradveil.client import Client
from gradveil.core.chain import NAMELESS, Chain
from gradveil.core.types import Batch, Transform
from gradveil.defences.additive_noise import Gaussian, Laplacian
from gradveil.defences.dp import Clip, FadingClip, FadingNoise
from gradveil.defences.stage_probes import data_dependent, mixes, noise_is_shared
from gradveil.theory.accounting import Participation, Unit, assumptions, composed

NOTHING = "no formal guarantee"
"""Text for a client without a formal guarantee."""

Fault = Literal["trained beside", "mixed", "looks again", "shared"]
"""Kind of flaw that voids a mechanism's guarantee."""
_WHY: Mapping[Fault, str] = {
    "trained beside": "the client's private layers are trained without noise, and later steps depend on them",
    "mixed": "examples are mixed before the clip, so one example reaches the gradients of others",
    "looks again": "'{name}' uses the data again, which the noise before it does not cover",
    "shared": "'{name}' adds the same noise to every client",
}


@dataclass(frozen=True)
class Flaw:
    """Reason why a mechanism has no guarantee."""

    fault: Fault
    where: str
    """`model`, `batch`, or slot and stage: `send.prune`."""

    def __str__(self) -> str:
        """Describe the flaw in words."""
        return _WHY[self.fault].format(name=self.where.partition(".")[2])


@dataclass(frozen=True)
class Mechanism:
    """Normal noise on a mean of vectors to which each unit contributes a bounded share."""

    unit: Unit
    """Privacy unit: an example, or a whole client."""
    multiplier: float
    """Standard deviation of the noise divided by the bound; for a sum over clients, the noise of all."""
    sums: int
    """Number of such means in one update: its local steps."""
    bound: float
    """Largest change of the mean by one unit: the clip norm divided by the number of examples."""
    scaled_to: float | None = None
    """Sensitivity that the noise was scaled to, in the units of `bound`; None if not specified."""
    since: int = 0
    """Index of the clip that sets the bound, among all stages, those of `step` first."""
    flaws: tuple[Flaw, ...] = ()
    """Reasons why it has no guarantee; empty for a sound mechanism."""


@dataclass(frozen=True)
class Privacy:
    """The mechanisms of a client, including void ones."""

    mechanisms: tuple[Mechanism, ...]

    @property
    def sound(self) -> tuple[Mechanism, ...]:
        """The mechanisms without flaws."""
        return tuple(mechanism for mechanism in self.mechanisms if not mechanism.flaws)

    def void(self, unit: Unit) -> str | None:
        """Return why a unit with clip and noise has no guarantee; None if it has one."""
        of_unit = [mechanism for mechanism in self.mechanisms if mechanism.unit == unit]
        return str(of_unit[0].flaws[0]) if of_unit and all(mechanism.flaws for mechanism in of_unit) else None

    def denied(self) -> list[str]:
        """List the units without a guarantee, each with the reason."""
        units: list[Unit] = [*dict.fromkeys(mechanism.unit for mechanism in self.mechanisms)]
        return [f"{NOTHING} of each {unit}: {why}" for unit in units if (why := self.void(unit))]

    def promise(self, training: Participation | None = None) -> str:
        """Describe the guarantee in words: with epsilon if the training is known, and never for a heuristic."""
        if not self.mechanisms:
            return NOTHING
        if not self.sound:
            return f"{NOTHING}: {self.mechanisms[0].flaws[0]}"
        return "; ".join([*(promise(mechanism, training) for mechanism in self.sound), *self.denied()])


def examine(client: Client, batch: Batch) -> Privacy:
    """Find the mechanisms of a defended client for batches of this shape, with the flaws that void them.

    The batch holds the examples of all members.
    """
    mechanisms = [
        # The noises of summed members add up.
        Mechanism(walk.unit, math.sqrt(walk.squared * part.members), part.sums, walk.bound, walk.scaled_to, walk.since)
        for part in _parts(client, batch)
        for walk in _walks(part, client)
        if walk.squared
    ]
    return Privacy(_with_flaws(client, batch, mechanisms) if mechanisms else ())


@dataclass(frozen=True)
class NoiseStages:
    """Consecutive stages of normal noise that a guarantee counts together."""

    places: tuple[int, ...]
    """Indices among all stages, those of `step` first."""
    variance: float
    """Total variance on the mean."""
    bound: float
    """Largest change of the mean by one unit."""
    floating: str | None
    """Stage between the clip and the noise that adds noise of another law."""


def counted(client: Client, batch: Batch) -> list[NoiseStages]:
    """Find the noise stages of a client's mechanisms; noise that protects two units has the smaller bound."""
    runs: dict[tuple[int, ...], NoiseStages] = {}
    for part in _parts(client, batch):
        for walk in _walks(part, client):
            if walk.squared:
                run = NoiseStages(tuple(walk.places), walk.variance, walk.bound, walk.floating)
                before = runs.setdefault(run.places, run)
                runs[run.places] = replace(run, bound=min(run.bound, before.bound))
    return list(runs.values())


@dataclass(frozen=True)
class _Part:
    """Stages that act in sequence on the mean over `examples`, `sums` times per update."""

    stages: tuple[tuple[str, Transform], ...]
    since: int
    """Index of the first one among all stages."""
    examples: int
    sums: int
    members: int


def _parts(client: Client, batch: Batch) -> list[_Part]:
    examples = batch.inputs.shape[0] // client.members
    step, send = stages(client.step), stages(client.send)
    if client.local is None:
        return [_Part((*step, *send), 0, examples, 1, client.members)]
    # Members are summed after local training, so within a step the noise of other members does not count.
    local = _Part(step, 0, client.local.batch, client.local.count(examples), 1)
    return [local, _Part(send, len(step), examples, 1, client.members)]


def stages(transform: Transform | None) -> tuple[tuple[str, Transform], ...]:
    """List a transform's stages by name; one that nobody named is called as its class.

    A user's subclass of a chain counts as one unknown stage.
    """
    if transform is None:
        return ()
    if isinstance(transform, Chain) and type(transform).apply is Chain.apply:
        return tuple((type(stage).__name__ if name == NAMELESS else name, stage) for name, stage in transform)
    return (("transform", transform),)


def known(stage: Transform, *kinds: type[Transform]) -> bool:
    """Return whether a stage is one of these kinds; a user's subclass that overrides a method is not.

    >>> from gradveil.core.types import Multiplier
    >>> class Loose(Clip):
    ...     def multiplier(self, params, noise, off):
    ...         return Multiplier()
    >>> known(Clip(1.0), Clip), known(Loose(1.0), Clip)
    (True, False)
    """
    return any(isinstance(stage, kind) and _keeps_methods(type(stage), kind) for kind in kinds)


def _keeps_methods(subclass: type[Transform], kind: type[Transform]) -> bool:
    """Return whether a class overrides no method or property of `kind` that affects the update."""
    names = (name for name in dir(kind) if not name.startswith("__") and name not in _DESCRIPTIVE)
    attributes = ((name, getattr_static(kind, name)) for name in names)
    methods = (name for name, held in attributes if isinstance(held, property) or callable(held))
    return all(getattr(subclass, name) is getattr(kind, name) for name in methods)


_DESCRIPTIVE = ("guarantee", "intermediates", "evidence")
"""Methods that describe a transform and do not change what it sends."""


@dataclass
class _Walk:
    """Bound and noise of one unit while walking through the stages."""

    unit: Unit
    bound: float = math.inf
    fading: dict[float, float] = field(default_factory=dict[float, float])
    """Bounds of decaying clips in the first round, by decay."""
    squared: float = 0.0
    """The square of the noise multiplier."""
    scaled_to: float | None = None
    since: int = 0
    closed: bool = field(default=False)
    """A stage has followed the noise, so later noise does not add to it."""
    places: list[int] = field(default_factory=list[int])
    """Indices of the noise stages."""
    variance: float = 0.0
    floating: str | None = None
    """Stage that added noise of another law before."""

    def take(self, place: int, name: str, stage: Transform, examples: int, layers: int) -> None:
        """Update the bound and the noise for one stage."""
        if known(stage, Gaussian, FadingNoise):
            assert isinstance(stage, Gaussian)
            # Decaying noise is compared with the clip of the same decay, other noise with bounds of the first round.
            reach = self.fading.get(stage.decay, math.inf) if isinstance(stage, FadingNoise) else self.bound
            self.closed |= bool(self.squared) and math.isfinite(stage.clamp)
            if not self.closed and reach < math.inf:
                self.squared += stage.variance(examples) / reach**2
                self.variance += stage.variance(examples)
                self.places.append(place)
                scaled_to = stage.scaled_to
                self.scaled_to = None if scaled_to is None else stage.on_mean(scaled_to, examples)
        elif self.squared:
            self.closed = True
        elif known(stage, Clip, FadingClip):
            assert isinstance(stage, Clip)
            if stage.per_example == (self.unit == "example"):
                of_one = stage.bound(layers) / (examples if stage.per_example else 1)
                self.since = place if self.bound == math.inf else self.since
                self.bound = min(self.bound, of_one)
                if isinstance(stage, FadingClip):
                    self.fading[stage.decay] = min(self.fading.get(stage.decay, math.inf), of_one)
        elif known(stage, Laplacian):
            self.floating = name
        else:
            # An unknown stage may move two neighbouring vectors further apart.
            self.bound, self.fading = math.inf, {}


def _walks(part: _Part, client: Client) -> Iterator[_Walk]:
    """Walk through the stages, once for each unit. Clipping a mean moves no two means apart: it keeps the bound."""
    units: tuple[Unit, Unit] = "example", "client"
    for unit in units:
        walk = _Walk(unit)
        for place, (name, stage) in enumerate(part.stages, part.since):
            walk.take(place, name, stage, part.examples, len(client.trained()))
        yield walk


def _with_flaws(client: Client, batch: Batch, mechanisms: list[Mechanism]) -> tuple[Mechanism, ...]:
    """Add the flaws that void each mechanism.

    The clip of a whole update covers all stages before it, and private layers. The clip of an example's gradient does
    not cover the example's influence on the gradients of other examples.
    """
    before: list[Flaw] = []
    if client.pipeline.trains_private_layers:
        before.append(Flaw("trained beside", "model"))
    if any(mixes(transform, client, batch) for transform in client.batch):
        before.append(Flaw("mixed", "batch"))
    behind: list[tuple[int, Flaw]] = []
    slots = [(f"{slot}.{name}", stage) for slot in ("step", "send") for name, stage in stages(getattr(client, slot))]
    for place, (where, stage) in enumerate(slots):
        if data_dependent(stage, client, batch):
            behind.append((place, Flaw("looks again", where)))
        if noise_is_shared(stage, client, batch):
            behind.append((place, Flaw("shared", where)))

    def flaws(mechanism: Mechanism) -> tuple[Flaw, ...]:
        if mechanism.unit == "example":
            return (*before, *(flaw for _, flaw in behind))
        return tuple(flaw for place, flaw in behind if place >= mechanism.since)

    return tuple(replace(mechanism, flaws=flaws(mechanism)) for mechanism in mechanisms)


def promise(mechanism: Mechanism, training: Participation | None) -> str:
    """Describe a mechanism's guarantee in words: with epsilon if the training is known."""
    noise = f"noise multiplier {mechanism.multiplier:.4g}"
    if training is None:
        many = f", {mechanism.sums} noisy sums per update" if mechanism.sums > 1 else ""
        return f"differential privacy of each {mechanism.unit} ({noise}{many}); epsilon follows from the training"
    return promised(mechanism.unit, [(mechanism.multiplier, training)])[1]


def promised(unit: Unit, parts: Sequence[tuple[float, Participation]]) -> tuple[float, str]:
    """Compute the epsilon per unit of consecutive trainings with these noise multipliers, and describe it in words."""
    value = composed(parts)
    noises = "; ".join(f"noise multiplier {noise:.4g}; {assumptions(training, unit)}" for noise, training in parts)
    return value, f"epsilon {value:.4g} at delta {parts[0][1].delta:g} of each {unit} ({noises})"
