"""The search for a policy of ATS: candidates scored on public images, and the best of them again on others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from gradveil.audit.scene import Scene
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, BatchTransform
from gradveil.defences.ats import HYBRID, Ats
from gradveil.defences.search import (
    BATCH,
    JITTER,
    LEAST_UTILITY,
    POINTS,
    Judged,
    Unchanged,
    privacy_score,
    random_policies,
    utility_score,
)
from gradveil.nn.weights import fingerprint

NONE = "none"
"""Stands among the policies for images as they are."""
CONTROLS = (NONE, *HYBRID.split("+"), HYBRID)
"""What a search is compared with: no transform, the two policies that the authors found, and their hybrid."""
FEWEST = 8
"""Images below which nothing is scored: a correlation matrix of fewer says little."""
_SURE = 2.0
"""Standard errors by which a score has to differ."""


class Again(NamedTuple):
    """A policy's scores on images, and with draws, that it was not chosen by."""

    privacy: list[float]
    """Of each image."""
    utility: float

    @property
    def mean(self) -> float:
        """The mean privacy score."""
        return fmean(self.privacy)


@dataclass(frozen=True, eq=False)
class Judge:
    """What scores policies: two models, and public images for the search and for a second look."""

    trained: Client
    """With the run's weights: those that are attacked."""
    untrained: Client
    """With initial weights, for the utility."""
    images: Batch
    others: Batch
    key: Key

    def utility(self, policy: str) -> float:
        """Compute how well images of this policy can be told apart."""
        return utility_score(self.untrained, _transform(policy), self.images, self.key.child(Stream.SEARCH))

    def privacy(self, policy: str) -> float:
        """Compute how early an attacker's gradients resemble what he is to match, on the average image."""
        return float(privacy_score(self.trained, _transform(policy), self.images, self.key.child(Stream.SEARCH)).mean())

    def again(self, policy: str) -> Again:
        """Score a policy on the other images."""
        key, transform = self.key.child(Stream.REPEAT), _transform(policy)
        privacy: list[float] = privacy_score(self.trained, transform, self.others, key).tolist()
        return Again(privacy, utility_score(self.untrained, transform, self.others, key))


def open_judge(scene: Scene, images: int, seed: int) -> Judge:
    """Choose public images, and build the undefended model with the run's weights and with initial ones."""
    public, needed = scene.public, 2 * images
    if public is None:
        raise fail("data", "has no public images, by which policies are judged", "choose data that has")
    if len(public) < needed:
        what = f"takes {needed} public images ({images} to search by, {images} for a second look), "
        what += f"'{scene.config.data.name}' has {len(public)} here"
        most = len(public) // 2
        remedy = f"say --images {most} or fewer" if most >= FEWEST else "choose data with more public images"
        raise fail("--images", what, f"{remedy}, or read more of them: --set data.public={needed}")
    key = Key(seed, (Stream.SEARCH, Stream.ATS))
    chosen = public.subset(torch.randperm(len(public), generator=key.child(Stream.IMAGES).generator())[:needed])
    inputs = chosen.inputs.to(scene.config.device, scene.dtype)
    targets = chosen.targets.to(scene.config.device)
    first, others = (Batch(inputs[part], targets[part]) for part in (slice(images), slice(images, None)))
    trained, untrained = (
        replace(each.undefended(0, seed).member, local=None) for each in (scene, replace(scene, weights={}))
    )
    return Judge(trained, untrained, first, others, key)


def settings_of(scene: Scene, judge: Judge, seed: int) -> dict[str, Any]:
    """Say all that the scores depend on: models, images, draws, and where they are computed."""
    config = scene.config
    pixels = torch.cat([judge.images.inputs, judge.others.inputs]).cpu().contiguous()
    shared = {key: value for key, value in config.resolved().items() if key in ("data", "model", "precision", "device")}
    return {
        **shared,
        "trainable": config.client[0].trainable,
        "initial_weights": fingerprint(judge.untrained.params()),
        "weights": fingerprint(judge.trained.params()),
        "images": len(judge.images.inputs),
        "which_images": hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16],
        "points": POINTS,
        "seed": seed,
    }


def score_controls(judge: Judge, scores: dict[str, Judged], told: Callable[[], None]) -> None:
    """Score what is not there yet of the controls; refuse a model that says nothing about any policy."""
    for policy in CONTROLS:
        if policy in scores:
            continue
        found = Judged(policy, judge.privacy(policy), judge.utility(policy))
        if policy == NONE:
            refuse(model_problems(found, len(judge.images.inputs)))
        scores[policy] = found
        told()


def model_problems(plain: Judged, images: int) -> list[Problem]:
    """Say why nothing can be learnt from the scores of a model, by those of images as they are."""
    problems: list[Problem] = []
    if not math.isfinite(plain.privacy):
        what = "has gradients on public images that are not finite, so no policy can be judged by them"
        problems.append(Problem("model", what, "check its initial weights, and model.weights if they are given"))
    # An eigenvalue that vanishes adds 1/k.
    if plain.utility < -(images - 1) / (2 * JITTER):
        what = "has no usable Jacobian: its outputs change with every image alike, or not at all, so that the utility "
        what += f"of images as they are is {plain.utility:.3g}"
        remedy = "give a model with an activation that is not saturated (a linear model cannot be judged so)"
        problems.append(Problem("model", what, remedy))
    return problems


def least_utility(plain: Judged) -> float:
    """Return the utility that a policy must have: so far below images as they are as the authors' filter allows.

    Their -85 is 1.33 times -64, the best that their batches can have. Images as they are have less than the best on
    untrained networks, and a fixed number would refuse them, too.

    >>> least_utility(Judged("none", 0.6, -64.0)), least_utility(Judged("none", 0.6, -128.0))
    (-85.0, -170.0)
    """
    return plain.utility * LEAST_UTILITY / -BATCH


def unscored(scores: Mapping[str, Judged], policies: Iterable[str], least: float) -> list[str]:
    """Name the policies that are still to be scored: the privacy of one that does not pass is never asked for.

    >>> nan = math.nan
    >>> scores = {"1": Judged("1", 0.5, -70.0), "2": Judged("2", nan, -90.0), "3": Judged("3", nan, -80.0)}
    >>> unscored(scores, ["1", "2", "3", "4"], -85.0)
    ['3', '4']
    """
    left: list[str] = []
    for policy in policies:
        there = scores.get(policy)
        if there is None or (there.utility >= least and math.isnan(there.privacy)):
            left.append(policy)
    return left


def search(
    judge: Judge, policies: Iterable[str], least: float, scores: dict[str, Judged], told: Callable[[], None]
) -> None:
    """Score what is not there yet: the utility of every policy, and the privacy of those that have enough of it."""
    for policy in unscored(scores, policies, least):
        utility = scores[policy].utility if policy in scores else judge.utility(policy)
        scores[policy] = Judged(policy, judge.privacy(policy) if utility >= least else math.nan, utility)
        told()


def best(scores: Mapping[str, Judged], policies: Iterable[str], least: float) -> list[Judged]:
    """Return those of the policies that pass the filter, the lowest privacy score first."""
    passed = [scores[policy] for policy in policies if scores[policy].utility >= least]
    return sorted((one for one in passed if math.isfinite(one.privacy)), key=lambda one: one.privacy)


def hybrid(found: Sequence[Judged]) -> str | None:
    """Name the hybrid of the two best policies, as the authors use theirs; None where there are no two.

    >>> hybrid([Judged("1-2-3", 0.1, -70), Judged("4-5-6", 0.2, -70)])
    '1-2-3+4-5-6'
    """
    return f"{found[0].policy}+{found[1].policy}" if len(found) > 1 else None


def look_again(judge: Judge, policies: Iterable[str], again: dict[str, Again], told: Callable[[], None]) -> None:
    """Score policies that are not there yet on the other images: the best of many are also the luckiest of many."""
    for policy in policies:
        if policy not in again:
            again[policy] = judge.again(policy)
            told()


def lower(one: Again, other: Again) -> bool:
    """Say whether a policy scores lower than another on the same images, by more than two standard errors."""
    gaps = [a - b for a, b in zip(one.privacy, other.privacy, strict=True)]
    return fmean(gaps) < -_SURE * stdev(gaps) / math.sqrt(len(gaps))


def candidates(count: int, seed: int) -> list[str]:
    """Draw the policies of a search; a longer search begins with those of a shorter one."""
    return list(random_policies(count, Key(seed, (Stream.SEARCH, Stream.ATS, Stream.POLICIES))))


def _transform(policy: str) -> BatchTransform:
    return Unchanged() if policy == NONE else Ats(policy)
