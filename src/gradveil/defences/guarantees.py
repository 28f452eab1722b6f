"""Formal guarantees of a defended client: the differential privacy of its clips and noise.

Nothing here goes by a defence's name: the stages of the client are walked through, so a composition promises what its
parts do, and a heuristic promises nothing. What voids the privacy of examples may leave that of clients alone: whatever
is done before the clip of a whole update is covered by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from typing import Literal

from gradveil.client import Client
from gradveil.core.chain import Chain
from gradveil.core.types import Batch, Transform
from gradveil.defences.additive_noise import Gaussian, Laplacian
from gradveil.defences.dp import Clip, FadingClip, FadingNoise
from gradveil.defences.stage_probes import data_dependent, mixes, noise_is_shared
from gradveil.theory.accounting import Participation, Unit, assumptions, composed

NOTHING = "no formal guarantee"
"""Said of what proves nothing."""

Fault = Literal["trained beside", "mixed", "looks again", "shared"]
"""What a mechanism's noise does not cover, or is wrong with it."""
_WHY: Mapping[Fault, str] = {
    "trained beside": "what the client keeps to itself is trained without noise, and later steps depend on it",
    "mixed": "examples are mixed before the clip, so that one reaches the gradients of others",
    "looks again": "'{name}' looks at the data again, which no noise before it covers",
    "shared": "'{name}' adds the same noise to every client",
}


@dataclass(frozen=True)
class Flaw:
    """Why a mechanism promises nothing."""

    fault: Fault
    where: str
    """`model`, `batch`, or slot and stage: `send.prune`."""

    def __str__(self) -> str:
        """Say it in words."""
        return _WHY[self.fault].format(name=self.where.partition(".")[2])


@dataclass(frozen=True)
class Mechanism:
    """Normal noise on a mean of vectors, of which each unit's share is bounded."""

    unit: Unit
    """Whose presence it hides: an example's, or a whole client's."""
    multiplier: float
    """The noise's standard deviation over what one unit can change; of a sum over clients, the noise of all."""
    sums: int
    """How many such means one update is made from: local steps."""
    bound: float
    """What one unit can change the mean by: the clip norm, over the number of examples."""
    scaled_to: float | None = None
    """What the noise was scaled for, in the units of `bound`; None where nobody said."""
    since: int = 0
    """Which of all stages, those of `step` first, is the clip that bounds what a unit can change."""
    flaws: tuple[Flaw, ...] = ()
    """Why it promises nothing; empty for one that is sound."""


@dataclass(frozen=True)
class Privacy:
    """The mechanisms of a client, the void ones among them."""

    mechanisms: tuple[Mechanism, ...]

    @property
    def sound(self) -> tuple[Mechanism, ...]:
        """The mechanisms that nothing voids."""
        return tuple(mechanism for mechanism in self.mechanisms if not mechanism.flaws)

    def void(self, unit: Unit) -> str | None:
        """Say why nothing is promised of a unit that is clipped and gets noise; None if something is."""
        own = [mechanism for mechanism in self.mechanisms if mechanism.unit == unit]
        return str(own[0].flaws[0]) if own and all(mechanism.flaws for mechanism in own) else None

    def denied(self) -> list[str]:
        """Say of which units nothing is promised, and why, where something is of others."""
        units: list[Unit] = [*dict.fromkeys(mechanism.unit for mechanism in self.mechanisms)]
        return [f"{NOTHING} of each {unit}: {why}" for unit in units if (why := self.void(unit))]

    def promise(self, training: Participation | None = None) -> str:
        """Say in words what is proven: an epsilon where the training is known, never one for a heuristic."""
        if not self.mechanisms:
            return NOTHING
        if not self.sound:
            return f"{NOTHING}: {self.mechanisms[0].flaws[0]}"
        return "; ".join([*(promise(mechanism, training) for mechanism in self.sound), *self.denied()])


def examine(client: Client, batch: Batch) -> Privacy:
    """Find the mechanisms of a defended client with batches of this shape, and whether something voids them.

    The batch holds the examples of all members.
    """
    found: list[Mechanism] = []
    for part in _parts(client, batch):
        found += _mechanisms(part, client)
    return Privacy(_judged(client, batch, found) if found else ())


@dataclass(frozen=True)
class NoiseStages:
    """Stages of normal noise that follow each other, and together are what a promise counts."""

    places: tuple[int, ...]
    """Among all stages, those of `step` first."""
    variance: float
    """Of all of them, on the mean."""
    bound: float
    """What one unit can change the mean by."""
    floating: str | None
    """A stage between the clip and them that adds other noise."""


def counted(client: Client, batch: Batch) -> list[NoiseStages]:
    """Find the noise that the mechanisms of a client are made of; where it protects two units, the lesser bound."""
    found: dict[tuple[int, ...], NoiseStages] = {}
    for part in _parts(client, batch):
        for walk in _walks(part, client):
            if walk.squared:
                own = NoiseStages(tuple(walk.places), walk.variance, walk.bound, walk.floating)
                before = found.setdefault(own.places, own)
                found[own.places] = replace(own, bound=min(own.bound, before.bound))
    return list(found.values())


@dataclass(frozen=True)
class _Part:
    """Stages that act one after the other on the mean over so many examples, as often as sums are made."""

    stages: tuple[tuple[str, Transform], ...]
    since: int
    """Of which place among all stages the first of them is."""
    examples: int
    sums: int
    members: int


def _parts(client: Client, batch: Batch) -> list[_Part]:
    examples = batch.inputs.shape[0] // client.members
    step, send = stages(client.step), stages(client.send)
    if client.local is None:
        return [_Part((*step, *send), 0, examples, 1, client.members)]
    # Nobody sees sums of single steps, so there the noise of other members does not count.
    own = _Part(step, 0, client.local.batch, client.local.count(examples), 1)
    return [own, _Part(send, len(step), examples, 1, client.members)]


def stages(transform: Transform | None) -> tuple[tuple[str, Transform], ...]:
    """List a transform's stages by name. Of what a user's subclass of a chain does with its stages nothing is known."""
    if transform is None:
        return ()
    if isinstance(transform, Chain) and type(transform).apply is Chain.apply:
        return tuple(transform)
    return (("transform", transform),)


def known(stage: Transform, *kinds: type[Transform]) -> bool:
    """Say whether a stage is one of these, and does what they do: of what a user's subclass does nothing is known.

    >>> from gradveil.core.types import Multiplier
    >>> class Loose(Clip):
    ...     def multiplier(self, params, noise, off):
    ...         return Multiplier()
    >>> known(Clip(1.0), Clip), known(Loose(1.0), Clip)
    (True, False)
    """
    return any(isinstance(stage, kind) and _does_as(type(stage), kind) for kind in kinds)


def _does_as(one: type[Transform], kind: type[Transform]) -> bool:
    methods = (name for name in dir(kind) if not name.startswith("__") and name not in _TELLING)
    return all(getattr(one, m) is getattr(kind, m) for m in methods if _is_method(kind, m))


def _is_method(kind: type[Transform], name: str) -> bool:
    held = getattr_static(kind, name)
    return isinstance(held, property) or callable(held)


_TELLING = ("guarantee", "intermediates", "evidence")
"""What says something of a transform, and changes nothing that it sends."""


@dataclass
class _Walk:
    """What is known of one unit on the way through the stages."""

    unit: Unit
    bound: float = math.inf
    fading: dict[float, float] = field(default_factory=dict[float, float])
    """What clips that shrink bound in the first round, by their decay."""
    squared: float = 0.0
    """The square of the noise multiplier."""
    scaled_to: float | None = None
    since: int = 0
    closed: bool = field(default=False)
    """The noise is on, and another stage came after it: further noise does not add to it."""
    places: list[int] = field(default_factory=list[int])
    """Of the noise."""
    variance: float = 0.0
    floating: str | None = None
    """Which stage added other noise before."""

    def take(self, place: int, name: str, stage: Transform, examples: int, layers: int) -> None:
        """Pass one stage."""
        if known(stage, Gaussian, FadingNoise):
            assert isinstance(stage, Gaussian)
            # Noise that shrinks is held against what shrinks with it, other noise against bounds of the first round.
            reach = self.fading.get(stage.decay, math.inf) if isinstance(stage, FadingNoise) else self.bound
            if not self.closed and reach < math.inf:
                self.squared += stage.variance(examples) / reach**2
                self.variance += stage.variance(examples)
                self.places.append(place)
                told = stage.scaled_to
                self.scaled_to = None if told is None else stage.on_mean(told, examples)
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
            # Whatever it does to a vector may bring two neighbouring ones further apart.
            self.bound, self.fading = math.inf, {}


def _walks(part: _Part, client: Client) -> Iterator[_Walk]:
    """Walk through the stages, once for each unit.

    Clipping a mean moves no two means apart, so it keeps an example's bound.
    """
    units: tuple[Unit, Unit] = "example", "client"
    for unit in units:
        walk = _Walk(unit)
        for place, (name, stage) in enumerate(part.stages, part.since):
            walk.take(place, name, stage, part.examples, len(client.trained()))
        yield walk


def _mechanisms(part: _Part, client: Client) -> Iterator[Mechanism]:
    """Find the mechanisms of each unit. Summed members add up their noise."""
    for walk in _walks(part, client):
        if walk.squared:
            noise = math.sqrt(walk.squared * part.members)
            yield Mechanism(walk.unit, noise, part.sums, walk.bound, walk.scaled_to, walk.since)


def _judged(client: Client, batch: Batch, mechanisms: list[Mechanism]) -> tuple[Mechanism, ...]:
    """Find what voids each mechanism.

    A clip of the whole update covers all that was done before: which examples were mixed or looked at, what was trained
    beside. The clip of an example's gradient does not cover what gets into the gradients of other examples.
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
    """Say in words what a mechanism proves: an epsilon where the training is known."""
    noise = f"noise multiplier {mechanism.multiplier:.4g}"
    if training is None:
        many = f", {mechanism.sums} noisy sums an update" if mechanism.sums > 1 else ""
        return f"differential privacy of each {mechanism.unit} ({noise}{many}); epsilon follows from the training"
    return promised(mechanism.unit, [(mechanism.multiplier, training)])[1]


def promised(unit: Unit, parts: Sequence[tuple[float, Participation]]) -> tuple[float, str]:
    """Say what noise multipliers and trainings that follow each other prove of each unit: epsilon, and in words."""
    value = composed(parts)
    noises = "; ".join(f"noise multiplier {noise:.4g}; {assumptions(training, unit)}" for noise, training in parts)
    return value, f"epsilon {value:.4g} at delta {parts[0][1].delta:g} of each {unit} ({noises})"
