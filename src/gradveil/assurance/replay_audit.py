"""Replay audit: a lower bound of epsilon of a client's own code, next to the accountant's upper bound.

A client is a function of its data and its noise, so its release can be replayed with a canary and without it, each
time with fresh noise. How well the releases can be told apart bounds epsilon from below (Jagielski, Ullman, Oprea
2020; Nasr et al. 2023). A clip that is not applied, noise that is too small (in one tensor, too) or comes before the
clip, and a seed that is used again all show as a lower bound above the claim. The attacker that the bound speaks of
sees single updates; two of them with the same noise would give it away, so repeated releases are counted too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.assurance.canaries import Canary, World, craft, noiseless, overrides, unsupported
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.formatting import number
from gradveil.core.noise import Address, Key
from gradveil.core.secure_noise import SecretKey
from gradveil.core.streams import Stream
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.core.user_code import users
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.deployed_noise import deployed as with_deployed_noise
from gradveil.defences.guarantees import Mechanism, examine, stages
from gradveil.defences.privacy_warnings import one_update
from gradveil.nn.module_paths import count_classes
from gradveil.theory.accounting import POSITIVE, PROBABILITY, Participation, Unit, composed
from gradveil.theory.epsilon_lower_bound import PILOT, EpsilonBound, from_scores

_VALUES = 2**24
"""Numbers of updates that are computed at once."""
_ENTRIES = 4
"""Entries of a release that are kept, those that the canary moves most."""
_MANY = 20
"""Values of an entry from which on equal releases are no coincidence."""
_CLEARLY = 5.0
"""Standard deviations by which a tensor's variance has to be off to count by itself."""
_LEAST = 1e-12
"""Least ratio of variances: a tensor without noise."""
_HUGE = 1e30
"""Larger scores are cut."""


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
    repeated: int = 0
    """Releases that are the same as an earlier one of the same data: their noise was used before."""

    @property
    def found(self) -> float:
        """The lower bound."""
        return self.bound.best

    @property
    def violated(self) -> bool:
        """Whether the lower bound is above the claim, or noise was used again."""
        return self.found > self.claimed or self.repeated > 0

    def __str__(self) -> str:
        """Compare claim and audit in a line."""
        facts = f"{self.bound.confidence:.0%}, {self.bound.releases:,} {self.method}, delta {self.bound.delta:g}"
        outcome = "VIOLATED" if self.violated else "consistent"
        claim = f"claimed {number(self.claimed)}, audit finds at least {number(self.found)}"
        again = f", {self.repeated:,} releases repeat the noise of another" if self.repeated else ""
        return f"epsilon of each {self.unit} ({self.neighbours}): {claim} ({facts}){again}: {outcome}"

    def plain(self) -> dict[str, Any]:
        """Return it as one plain object."""
        return {
            "unit": self.unit,
            "neighbours": self.neighbours,
            "claimed": self.claimed,
            "at_least": self.found,
            "violated": self.violated,
            **({"repeated": self.repeated} if self.repeated else {}),
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
    promise = promised(client, batch, delta, claimed, unit, normal=normal, replayed=True)
    if reasons := unsupported(client, promise.unit):
        remedy = "audit the same defence with client.members=1 and one gradient, or local.sampling = poisson"
        raise fail("client", " and ".join(reasons), remedy)
    key = Key(seed, (Stream.CANARY,))
    classes = count_classes(client.model, batch.inputs[:1], int(batch.targets.max()) + 1)
    replaced = promise.neighbours == "replaced"
    canary = craft(noiseless(client, batch), batch, promise.unit, classes, key, replaced=replaced)
    worlds = list[list[_Release]]()
    for side, world in enumerate((canary.present, canary.absent)):
        replayed = with_deployed_noise(client, world.batch).client if deployed else client
        below = key.child(Stream.CLIENT, side)
        worlds.append([*_releases(replayed, world, canary, replays, _secret if deployed else below.child)])
    present, absent = _joined(worlds[0], worlds[1], canary.tensors(client))
    bound = from_scores(present, absent, delta, normal=promise.normal)
    repeated = sum(map(_repeated, worlds))
    return EpsilonAudit(promise.unit, promise.neighbours, promise.epsilon, bound, "replays", repeated)


@dataclass(frozen=True)
class _Promise:
    unit: Unit
    neighbours: str
    epsilon: float
    normal: bool
    """Whether one update is normal noise around one of two points, so that its epsilon follows from their distance."""


def promised(
    client: Client,
    batch: Batch,
    delta: float,
    claimed: float | None,
    unit: Unit | None,
    *,
    normal: bool = False,
    replayed: bool = False,
) -> _Promise:
    """Return what a client promises for one update, or what is claimed for it.

    Noise on the mean, whatever the number of examples, is for batches of one size: `replayed`, examples are replaced.
    """
    sound = [each for each in examine(client, batch).sound if unit in (None, each.unit)]
    if not sound and (claimed is None or unit is None):
        remedy = "give claimed=EPSILON and unit='example' or 'client': what its authors promise for one update"
        raise fail("client", f"has no formal guarantee{f' of each {unit}' if unit else ''} to audit", remedy)
    whose: Unit = sound[0].unit if sound else unit or "example"
    replaced = whose == "client"
    if replayed and whose == "example" and client.local is None:
        # The gradient with the canary is of one example more, whose share of the mean is the smaller.
        batch = Batch(torch.cat([batch.inputs, batch.inputs[:1]]), torch.cat([batch.targets, batch.targets[:1]]))
        sound = [each for each in examine(client, batch).sound if each.unit == whose]
        replaced = _on_mean(client)
    neighbours = "replaced" if replaced else "added or removed"
    # The bound for normal noise takes one release of it; a sample of examples makes a mixture. Other noise, such as
    # Laplace's, may have a far smaller epsilon at the same distance.
    normal = (bool(sound) or normal) and (client.local is None or whose == "client")
    if claimed is not None:
        return _Promise(whose, neighbours, claimed, normal)
    return _Promise(whose, neighbours, _accounted(client, batch, sound[0], delta, replaced), normal)


def _on_mean(client: Client) -> bool:
    every = (stage for slot in (client.step, client.send) for _, stage in stages(slot))
    return any(isinstance(stage, Gaussian) and stage.on == "mean" for stage in every)


def _accounted(client: Client, batch: Batch, mechanism: Mechanism, delta: float, replaced: bool) -> float:
    """Compute epsilon of one update for the neighbours that the audit compares."""
    once = one_update(client, batch, mechanism)
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


@dataclass(frozen=True)
class _Release:
    """What is kept of one release."""

    scores: np.ndarray
    """Inner product with the canary's direction, of each tensor [P]."""
    entries: tuple[float, ...] = ()
    """Some entries of it; empty where noise cannot be used again, because the audit draws it."""
    digest: int = 0


def _releases(
    client: Client, world: World, canary: Canary, replays: int, draw: Callable[[int], Address]
) -> Iterator[_Release]:
    """Replay a world; code of the user's own one release at a time, because a batched call would share its draws."""
    params = client.params()
    spec, state = client.noise_spec(params, world.batch), client.init(params)
    parts = [*client.batch, *(stage for slot in (client.step, client.send) for _, stage in stages(slot))]
    alone = overrides(client) or any(users(part) or getattr(part, "exact", False) for part in parts)
    size = 1 if alone else max(1, _VALUES // sum(value.numel() for value in params.values()))
    square, directions = canary.direction.square().sum(), canary.tensors(client)
    largest = canary.direction.abs().topk(min(_ENTRIES, len(canary.direction))).indices
    for start in range(0, replays, size):
        noises = [world.fix(spec.sample(draw(place))) for place in range(start, min(start + size, replays))]
        with torch.no_grad():
            if alone:
                sent = {
                    name: value[None] for name, value in client.update(params, world.batch, noises[0], state)[0].items()
                }
            else:
                data = Batch(*(value.expand(len(noises), *value.shape) for value in world.batch))
                kept = {name: value.expand(len(noises), *value.shape) for name, value in state.items()}
                sent = client.updates(params, data, stack(noises), kept)[0]
        rows = [value.flatten(1).double() for value in sent.values()]
        products = [world.scale * row @ way / square for row, way in zip(rows, directions, strict=True)]
        for release, scores in enumerate(torch.stack(products, 1).numpy()):
            if alone:
                whole = torch.cat([row[release] for row in rows])
                yield _Release(scores, tuple(whole[largest].tolist()), hash(whole.numpy().tobytes()))
            else:
                yield _Release(scores)


def _joined(present: Sequence[_Release], absent: Sequence[_Release], direction: Sequence[Tensor]) -> list[list[float]]:
    """Join the scores of a release's tensors to one.

    With noise of one scale their sum is the best score: a tensor's variance is then its share of the direction's
    squared length, times a constant. Where the variance of the pilot scores, which are not counted, is clearly not, the
    tensor has too little or too much noise, and its weight is that constant over its own.
    """
    sides = [np.stack([release.scores for release in some]) for some in (present, absent)]
    sides = [np.clip(np.nan_to_num(side), -_HUGE, _HUGE) for side in sides]
    squares = np.array([float(part.square().sum()) for part in direction])
    shares = squares / squares.sum()
    pilots = [side[::PILOT] for side in sides]
    degrees = sum(len(pilot) - 1 for pilot in pilots)
    spread = sum(((pilot - pilot.mean(0)) ** 2).sum(0) for pilot in pilots) / degrees
    moved = shares > 0
    ratios = np.where(moved, spread / np.where(moved, shares, 1.0), 0.0)
    order = ratios.argsort()
    usual = ratios[order][np.searchsorted(shares[order].cumsum(), 0.5)]
    if not usual > 0:
        return [side.sum(1).tolist() for side in sides]
    relative = np.maximum(ratios / usual, _LEAST)
    weights = np.where(moved & (np.abs(np.log(relative)) > _CLEARLY * math.sqrt(2 / degrees)), 1 / relative, 1.0)
    return [(side @ weights).tolist() for side in sides]


def _repeated(releases: Sequence[_Release]) -> int:
    """Count releases that are the same as an earlier one, unless what is sent has few values anyway (signs, say).

    Zeros do not count: a client that sometimes sends nothing shows no noise by it.
    """
    digests = [release.digest for release in releases if any(release.scores) or any(release.entries)]
    again = len(digests) - len(set(digests))
    values = max((len(set(entry)) for entry in zip(*(release.entries for release in releases), strict=True)), default=0)
    return again if values >= _MANY else 0
