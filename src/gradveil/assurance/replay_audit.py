"""Replay audit: a lower bound of epsilon of a client's own code, next to the accountant's upper bound.

A client is a function of its data and its noise, so its release can be replayed with a canary and without it, each
time with fresh noise. How well the releases can be told apart bounds epsilon from below (Jagielski, Ullman, Oprea
2020; Nasr et al. 2023). A clip that is not applied, noise that is too small or comes before the clip, and a seed that
is used again all show as a lower bound above the claim. The attacker that the bound speaks of sees single updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradveil.assurance.canaries import Canary, World, craft, flat, unsupported
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.formatting import number
from gradveil.core.noise import Address, Key
from gradveil.core.secure_noise import SecretKey
from gradveil.core.streams import Stream
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.core.user_code import users
from gradveil.defences.deployed_noise import deployed as with_deployed_noise
from gradveil.defences.guarantees import Mechanism, examine, stages
from gradveil.defences.privacy_warnings import one_update
from gradveil.nn.module_paths import count_classes
from gradveil.theory.accounting import POSITIVE, PROBABILITY, Participation, Unit, composed
from gradveil.theory.epsilon_lower_bound import EpsilonBound, from_scores

_VALUES = 2**24
"""Numbers of updates that are computed at once."""


@dataclass(frozen=True)
class EpsilonAudit:
    """A claimed epsilon of one update, and the lower bound that an audit of the code found."""

    unit: Unit
    neighbours: str
    """How neighbouring data sets differ: `added or removed`, or `replaced`."""
    claimed: float
    bound: EpsilonBound
    method: str
    """`replays` or `canaries in one run`."""

    @property
    def found(self) -> float:
        """The lower bound."""
        return self.bound.best

    @property
    def violated(self) -> bool:
        """Whether the lower bound is above the claim."""
        return self.found > self.claimed

    def __str__(self) -> str:
        """Compare claim and audit in a line."""
        facts = f"{self.bound.confidence:.0%}, {self.bound.releases:,} {self.method}, delta {self.bound.delta:g}"
        outcome = "VIOLATED" if self.violated else "consistent"
        claim = f"claimed {number(self.claimed)}, audit finds at least {number(self.found)}"
        return f"epsilon of each {self.unit} ({self.neighbours}): {claim} ({facts}): {outcome}"

    def plain(self) -> dict[str, Any]:
        """Return it as one plain object."""
        return {
            "unit": self.unit,
            "neighbours": self.neighbours,
            "claimed": self.claimed,
            "at_least": self.found,
            "violated": self.violated,
            "confidence": self.bound.confidence,
            "delta": self.bound.delta,
            self.method.replace(" ", "_"): self.bound.releases,
        }


def audit_epsilon(
    client: Client,
    batch: Batch,
    *,
    replays: int = 1000,
    delta: float = 1e-5,
    claimed: float | None = None,
    unit: Unit | None = None,
    normal: bool = False,
    deployed: bool = False,
    seed: int = 0,
) -> EpsilonAudit:
    """Replay a client's release `replays` times with and as often without a canary, and bound its epsilon from below.

    `batch` are the other examples. `claimed` is the epsilon that the client promises for one update, by default what
    the accountant computes from its clips and noise; a client of your own classes promises nothing by itself, so give
    it, and the `unit`. If that claim is for `normal` noise on one sum, say so: the bound is then sharper. It is wrong
    for other noise. `deployed` replays the code of a Flower client instead: exact clips, and noise on a grid from
    the operating system's secret, which no seed repeats.
    """
    refuse(
        [
            *PROBABILITY.problems("delta", delta),
            *([] if claimed is None else POSITIVE.problems("claimed", claimed)),
            *([] if replays >= 20 else [Problem("replays", f"are {replays}", "give at least 20")]),
        ]
    )
    promise = promised(client, batch, delta, claimed, unit, normal=normal)
    if reasons := unsupported(client, promise.unit):
        remedy = "audit the same defence with client.members=1 and one gradient, or local.sampling = poisson"
        raise fail("client", " and ".join(reasons), remedy)
    key = Key(seed, (Stream.CANARY,))
    classes = count_classes(client.model, batch.inputs[:1], int(batch.targets.max()) + 1)
    canary = craft(client, batch, promise.unit, classes, key)
    scores = list[list[float]]()
    for side, world in enumerate((canary.present, canary.absent)):
        replayed = with_deployed_noise(client, world.batch).client if deployed else client
        below = key.child(Stream.CLIENT, side)
        scores.append([*_scores(replayed, world, canary, replays, _secret if deployed else below.child)])
    bound = from_scores(scores[0], scores[1], delta, normal=promise.normal)
    return EpsilonAudit(promise.unit, promise.neighbours, promise.epsilon, bound, "replays")


@dataclass(frozen=True)
class _Promise:
    unit: Unit
    neighbours: str
    epsilon: float
    normal: bool
    """Whether one update is normal noise around one of two points, so that its epsilon follows from their distance."""


def promised(
    client: Client, batch: Batch, delta: float, claimed: float | None, unit: Unit | None, *, normal: bool = False
) -> _Promise:
    """Return what a client promises for one update, or what is claimed for it."""
    sound = [each for each in examine(client, batch).sound if unit in (None, each.unit)]
    if not sound and (claimed is None or unit is None):
        remedy = "give claimed=EPSILON and unit='example' or 'client': what its authors promise for one update"
        raise fail("client", f"has no formal guarantee{f' of each {unit}' if unit else ''} to audit", remedy)
    whose: Unit = sound[0].unit if sound else unit or "example"
    neighbours = "replaced" if whose == "client" else "added or removed"
    # The bound for normal noise takes one release of it; a sample of examples makes a mixture. Other noise, such as
    # Laplace's, may have a far smaller epsilon at the same distance.
    normal = (bool(sound) or normal) and (client.local is None or whose == "client")
    if claimed is not None:
        return _Promise(whose, neighbours, claimed, normal)
    return _Promise(whose, neighbours, _accounted(client, batch, sound[0], delta), normal)


def _accounted(client: Client, batch: Batch, mechanism: Mechanism, delta: float) -> float:
    """Compute epsilon of one update for the neighbours that the audit compares."""
    once = one_update(client, batch, mechanism)
    replaced = mechanism.unit == "client"
    training = Participation(
        once.steps,
        once.rate,
        delta,
        "shuffled" if replaced else once.sampling,
        at_most=once.steps if replaced else None,
    )
    return composed([(mechanism.multiplier, training)])


def _secret(place: int) -> Address:
    """Return a new secret for every release."""
    return SecretKey()


def _scores(
    client: Client, world: World, canary: Canary, replays: int, draw: Callable[[int], Address]
) -> Iterator[float]:
    """Replay a world; code of the user's own one release at a time, because a batched call would share its draws."""
    params = client.params()
    spec, state = client.noise_spec(params, world.batch), client.init(params)
    parts = [*client.batch, *(stage for slot in (client.step, client.send) for _, stage in stages(slot))]
    alone = any(users(part) for part in parts) or any(getattr(part, "exact", False) for part in parts)
    size = 1 if alone else max(1, _VALUES // sum(value.numel() for value in params.values()))
    square = canary.direction.square().sum()
    for start in range(0, replays, size):
        noises = [world.fix(spec.sample(draw(place))) for place in range(start, min(start + size, replays))]
        with torch.no_grad():
            if alone:
                rows = flat(client.update(params, world.batch, noises[0], state)[0])[None]
            else:
                data = Batch(*(value.expand(len(noises), *value.shape) for value in world.batch))
                kept = {name: value.expand(len(noises), *value.shape) for name, value in state.items()}
                sent = client.updates(params, data, stack(noises), kept)[0]
                rows = torch.cat([value.flatten(1).double() for value in sent.values()], 1)
        yield from (world.scale * rows @ canary.direction / square).tolist()
