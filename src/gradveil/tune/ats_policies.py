"""The search for a policy of ATS: candidates scored on auxiliary images, and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradveil.audit.audit_run import machine
from gradveil.audit.experiment import Experiment
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.private_files import DamagedError, read_json, write_json
from gradveil.core.settings import differences
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, BatchTransform
from gradveil.defences.ats import HYBRID, Ats
from gradveil.defences.ats_scores import (
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
from gradveil.nn.weight_files import fingerprint
from gradveil.runs.run_folder import held, refuse_format

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
class PolicyScorer:
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


def open_judge(experiment: Experiment, images: int, seed: int) -> PolicyScorer:
    """Choose public images, and build the undefended model with the run's weights and with initial ones."""
    public, needed = experiment.public, 2 * images
    if public is None:
        raise fail("data", "has no public images, by which policies are judged", "choose data that has")
    if len(public) < needed:
        what = f"takes {needed} public images ({images} to search by, {images} for a second look), "
        what += f"'{experiment.config.data.name}' has {len(public)} here"
        most = len(public) // 2
        remedy = f"say --images {most} or fewer" if most >= FEWEST else "choose data with more public images"
        raise fail("--images", what, f"{remedy}, or read more of them: --set data.public={needed}")
    key = Key(seed, (Stream.SEARCH, Stream.ATS))
    chosen = public.subset(torch.randperm(len(public), generator=key.child(Stream.IMAGES).generator())[:needed])
    inputs = chosen.inputs.to(experiment.config.device, experiment.dtype)
    targets = chosen.targets.to(experiment.config.device)
    first, others = (Batch(inputs[part], targets[part]) for part in (slice(images), slice(images, None)))
    trained, untrained = (
        replace(each.undefended(0, seed), members=1, local=None)
        for each in (experiment, replace(experiment, weights={}))
    )
    return PolicyScorer(trained, untrained, first, others, key)


def settings_of(experiment: Experiment, judge: PolicyScorer, seed: int) -> dict[str, Any]:
    """Say all that the scores depend on: models, images, draws, and where they are computed."""
    config = experiment.config
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


def score_controls(judge: PolicyScorer, scores: dict[str, Judged], told: Callable[[], None]) -> None:
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
    judge: PolicyScorer, policies: Iterable[str], least: float, scores: dict[str, Judged], told: Callable[[], None]
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


def look_again(judge: PolicyScorer, policies: Iterable[str], again: dict[str, Again], told: Callable[[], None]) -> None:
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


FORMAT = 1
"""Version of the file; another is refused."""
FILE = "search.json"
"""The file's name in the folder of a search."""
CHUNK = 2.0
"""Seconds of work after which the scores are written: what a kill can cost, beside the policy in hand."""
_AGAIN = "put a copy of it back, or search again with --fresh"


class _Scores(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    privacy: float | None
    utility: float | None


class _Again(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    privacy: Annotated[list[float | None], Field(min_length=2)]
    utility: float | None


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    search: Literal["ats"]
    settings: dict[str, Any]
    scores: dict[str, _Scores]
    again: dict[str, _Again]
    gradveil: str
    created: str
    command: str
    machine: dict[str, Any]


@dataclass
class Kept:
    """The scores of a search so far."""

    folder: Path
    head: Mapping[str, Any]
    """All that the file says beside the scores."""
    scores: dict[str, Judged] = field(default_factory=dict[str, Judged])
    again: dict[str, Again] = field(default_factory=dict[str, Again])
    written: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        """Write if so much was scored since the last time that losing it would hurt."""
        if time.monotonic() - self.written >= CHUNK:
            self.write()

    def write(self) -> None:
        """Write the file; one without a single score is left out."""
        if not self.scores:
            return
        scores = {name: {"privacy": one.privacy, "utility": one.utility} for name, one in self.scores.items()}
        write_json(self.folder / FILE, {**self.head, "scores": scores, "again": _plain(self.again)})
        self.written = time.monotonic()


@contextlib.contextmanager
def opened(folder: Path, settings: Mapping[str, Any], command: str, fresh: bool = False) -> Iterator[Kept]:
    """Take up what a folder holds, for this process alone; whatever happens, what was scored is written at the end.

    Refused are a folder of something else, and scores that were made with other settings.
    """
    with held(folder, FILE, "search", (), fresh):
        file = folder / FILE
        kept = read_kept(folder) if file.is_file() else Kept(folder, _head(settings, command))
        _same(folder, kept.head["settings"], settings)
        try:
            yield kept
        finally:
            kept.write()


def read_kept(folder: Path) -> Kept:
    """Read the file of a search; one that this version did not write is refused, with what is wrong."""
    file = folder / FILE
    raw = read_json(file, _AGAIN)
    refuse_format(file, raw, FORMAT)
    try:
        found = _File.model_validate(raw)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_url=False))
        raise DamagedError(Problem(str(file), "; ".join(list(wrong)[:3]), _AGAIN)) from error
    head = {key: value for key, value in raw.items() if key not in ("scores", "again")}
    scores = {
        name: Judged(name, _number(one.privacy, math.nan), _number(one.utility, -math.inf))
        for name, one in found.scores.items()
    }
    again = {
        name: Again([_number(each, math.nan) for each in one.privacy], _number(one.utility, -math.inf))
        for name, one in found.again.items()
    }
    return Kept(folder, head, scores, again)


def _number(value: float | None, otherwise: float) -> float:
    """Read a number; JSON has none that is not finite."""
    return otherwise if value is None else value


def _plain(again: Mapping[str, Again]) -> dict[str, Any]:
    return {name: {"privacy": one.privacy, "utility": one.utility} for name, one in again.items()}


def _head(settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "search": "ats",
        "settings": dict(settings),
        "gradveil": version("gradveil"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": dict(machine(settings["device"])),
    }


def _same(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    remedy = "go on with the old settings, start again with --fresh (removes the old scores), or choose another --out"
    found = [
        Problem(f"{folder}, {what}", "differs from the search that is there", remedy)
        for what in differences(dict(there), dict(now))
    ]
    if found:
        raise GradveilError(found)
