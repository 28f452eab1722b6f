"""The search for an ATS policy: candidates, their scores on public images, and the file of the scores."""

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
from gradveil.core.errors import Problem, fail, refuse
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
"""Name of the control without a transform."""
CONTROLS = (NONE, *HYBRID.split("+"), HYBRID)
"""Controls of a search: no transform, the two policies of the paper, and their hybrid."""
FEWEST = 8
"""Smallest number of images for a score: a correlation matrix of fewer is too noisy."""
_SURE = 2.0
"""Number of standard errors by which a score has to differ."""


class Again(NamedTuple):
    """A policy's scores on images and draws that its selection did not use."""

    privacy: list[float]
    """Score of each image."""
    utility: float

    @property
    def mean(self) -> float:
        """The mean privacy score."""
        return fmean(self.privacy)


@dataclass(frozen=True, eq=False)
class PolicyScorer:
    """Models and public images that score policies, in the search and again on other images."""

    trained: Client
    """Client with the run's weights, which attacks would see."""
    untrained: Client
    """Client with initial weights, for the utility."""
    images: Batch
    held_out: Batch
    key: Key

    def utility(self, policy: str) -> float:
        """Score how well the untrained model separates images of this policy."""
        return utility_score(self.untrained, _transform(policy), self.images, self.key.child(Stream.SEARCH))

    def privacy(self, policy: str) -> float:
        """Score how early an attacker's gradients resemble the gradient to match, as a mean over the images."""
        return float(privacy_score(self.trained, _transform(policy), self.images, self.key.child(Stream.SEARCH)).mean())

    def again(self, policy: str) -> Again:
        """Score a policy on the other images."""
        key, transform = self.key.child(Stream.REPEAT), _transform(policy)
        privacy: list[float] = privacy_score(self.trained, transform, self.held_out, key).tolist()
        return Again(privacy, utility_score(self.untrained, transform, self.held_out, key))


def open_scorer(experiment: Experiment, images: int, seed: int) -> PolicyScorer:
    """Choose public images, and build the undefended model with the run's weights and with initial ones."""
    public, needed = experiment.public, 2 * images
    if public is None:
        raise fail("data", "has no public images to score policies with", "choose data that has some")
    if len(public) < needed:
        problem = f"takes {needed} public images ({images} to search by, {images} for a second look), "
        problem += f"'{experiment.config.data.name}' has {len(public)} here"
        most = len(public) // 2
        remedy = f"set --images {most} or fewer" if most >= FEWEST else "choose data with more public images"
        raise fail("--images", problem, f"{remedy}, or read more of them: --set data.public={needed}")
    key = Key(seed, (Stream.SEARCH, Stream.ATS))
    chosen = public.subset(torch.randperm(len(public), generator=key.child(Stream.IMAGES).generator())[:needed])
    inputs = chosen.inputs.to(experiment.config.device, experiment.dtype)
    targets = chosen.targets.to(experiment.config.device)
    first, held_out = (Batch(inputs[part], targets[part]) for part in (slice(images), slice(images, None)))
    trained, untrained = (
        replace(each.undefended(0, seed), members=1, local=None)
        for each in (experiment, replace(experiment, weights={}))
    )
    return PolicyScorer(trained, untrained, first, held_out, key)


def settings_of(experiment: Experiment, scorer: PolicyScorer, seed: int) -> dict[str, Any]:
    """Return every setting that the scores depend on: models, images, draws and device."""
    config = experiment.config
    pixels = torch.cat([scorer.images.inputs, scorer.held_out.inputs]).cpu().contiguous()
    shared = {key: value for key, value in config.resolved().items() if key in ("data", "model", "precision", "device")}
    return {
        **shared,
        "trainable": config.client[0].trainable,
        "initial_weights": fingerprint(scorer.untrained.params()),
        "weights": fingerprint(scorer.trained.params()),
        "images": len(scorer.images.inputs),
        "which_images": hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16],
        "points": POINTS,
        "seed": seed,
    }


def score_controls(scorer: PolicyScorer, scores: dict[str, Judged], save: Callable[[], None]) -> None:
    """Score the controls that have no score yet; refuse a model whose scores mean nothing."""
    for policy in CONTROLS:
        if policy in scores:
            continue
        score = Judged(policy, scorer.privacy(policy), scorer.utility(policy))
        if policy == NONE:
            refuse(model_problems(score, len(scorer.images.inputs)))
        scores[policy] = score
        save()


def model_problems(plain: Judged, images: int) -> list[Problem]:
    """List the reasons why the scores of a model mean nothing, given those without a transform."""
    problems: list[Problem] = []
    if not math.isfinite(plain.privacy):
        problem = "has gradients on public images that are not finite, so no policy can be scored"
        problems.append(Problem("model", problem, "check its initial weights, and model.weights if set"))
    # The utility is -sum(log(e + k) + 1 / (e + k)) over eigenvalues e, with the jitter k: e = 0 subtracts about 1 / k.
    if plain.utility < -(images - 1) / (2 * JITTER):
        problem = "has no usable Jacobian: its outputs change equally with every image, or not at all, so the utility "
        problem += f"without a transform is {plain.utility:.3g}"
        remedy = "use a model with activations that are not saturated (a linear model cannot be scored)"
        problems.append(Problem("model", problem, remedy))
    return problems


def least_utility(plain: Judged) -> float:
    """Return the lowest utility that passes the filter, relative to images without a transform.

    The paper's -85 is 1.33 times -64, the best utility of its batches. On untrained networks images without a transform
    stay below the best, so a fixed number would refuse them as well.

    >>> least_utility(Judged("none", 0.6, -64.0)), least_utility(Judged("none", 0.6, -128.0))
    (-85.0, -170.0)
    """
    return plain.utility * LEAST_UTILITY / -BATCH


def unscored(scores: Mapping[str, Judged], policies: Iterable[str], least: float) -> list[str]:
    """List the policies that still need a score; a policy that fails the utility filter needs no privacy score.

    >>> nan = math.nan
    >>> scores = {"1": Judged("1", 0.5, -70.0), "2": Judged("2", nan, -90.0), "3": Judged("3", nan, -80.0)}
    >>> unscored(scores, ["1", "2", "3", "4"], -85.0)
    ['3', '4']
    """
    return [
        policy
        for policy in policies
        if (score := scores.get(policy)) is None or (score.utility >= least and math.isnan(score.privacy))
    ]


def search(
    scorer: PolicyScorer, policies: Iterable[str], least: float, scores: dict[str, Judged], save: Callable[[], None]
) -> None:
    """Score the utility of every policy without scores, and the privacy of those that pass the utility filter."""
    for policy in unscored(scores, policies, least):
        utility = scores[policy].utility if policy in scores else scorer.utility(policy)
        scores[policy] = Judged(policy, scorer.privacy(policy) if utility >= least else math.nan, utility)
        save()


def best(scores: Mapping[str, Judged], policies: Iterable[str], least: float) -> list[Judged]:
    """Return the scores that pass the filter, the lowest privacy score first."""
    passed = [scores[policy] for policy in policies if scores[policy].utility >= least]
    return sorted((score for score in passed if math.isfinite(score.privacy)), key=lambda score: score.privacy)


def hybrid(ranked: Sequence[Judged]) -> str | None:
    """Return the hybrid of the two best policies, as in the paper; None if there are fewer than two.

    >>> hybrid([Judged("1-2-3", 0.1, -70), Judged("4-5-6", 0.2, -70)])
    '1-2-3+4-5-6'
    """
    return f"{ranked[0].policy}+{ranked[1].policy}" if len(ranked) > 1 else None


def score_again(
    scorer: PolicyScorer, policies: Iterable[str], again: dict[str, Again], save: Callable[[], None]
) -> None:
    """Score policies on the held-out images: the best of many are partly lucky."""
    for policy in policies:
        if policy not in again:
            again[policy] = scorer.again(policy)
            save()


def lower(one: Again, other: Again) -> bool:
    """Return whether a policy scores lower than another on the same images, by more than two standard errors."""
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
"""Seconds of work between two writes of the scores: the most that a kill can lose, plus the current policy."""
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
class SearchScores:
    """The scores of a search so far."""

    folder: Path
    head: Mapping[str, Any]
    """The content of the file without the scores."""
    scores: dict[str, Judged] = field(default_factory=dict[str, Judged])
    again: dict[str, Again] = field(default_factory=dict[str, Again])
    written: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        """Write the file if the last write is long enough ago."""
        if time.monotonic() - self.written >= CHUNK:
            self.write()

    def write(self) -> None:
        """Write the file, unless there are no scores."""
        if not self.scores:
            return
        scores = {name: {"privacy": one.privacy, "utility": one.utility} for name, one in self.scores.items()}
        write_json(self.folder / FILE, {**self.head, "scores": scores, "again": _plain(self.again)})
        self.written = time.monotonic()


@contextlib.contextmanager
def opened(folder: Path, settings: Mapping[str, Any], command: str, fresh: bool = False) -> Iterator[SearchScores]:
    """Open or create the scores in a folder, for this process alone; they are written at the end, even after an error.

    The folder of another run and scores made with other settings are refused.
    """
    with held(folder, FILE, "search", (), fresh):
        file = folder / FILE
        search_scores = read_scores(folder) if file.is_file() else SearchScores(folder, _head(settings, command))
        _refuse_other_settings(folder, search_scores.head["settings"], settings)
        try:
            yield search_scores
        finally:
            search_scores.write()


def read_scores(folder: Path) -> SearchScores:
    """Read the file of a search; raise for a damaged file or another version."""
    file = folder / FILE
    raw = read_json(file, _AGAIN)
    refuse_format(file, raw, FORMAT)
    try:
        content = _File.model_validate(raw)
    except ValidationError as error:
        mismatches = (
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_url=False)
        )
        raise DamagedError(Problem(str(file), "; ".join(list(mismatches)[:3]), _AGAIN)) from error
    head = {key: value for key, value in raw.items() if key not in ("scores", "again")}
    scores = {
        name: Judged(name, _number(one.privacy, math.nan), _number(one.utility, -math.inf))
        for name, one in content.scores.items()
    }
    again = {
        name: Again([_number(each, math.nan) for each in one.privacy], _number(one.utility, -math.inf))
        for name, one in content.again.items()
    }
    return SearchScores(folder, head, scores, again)


def _number(value: float | None, otherwise: float) -> float:
    """Read a number that JSON has as null because it is not finite."""
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


def _refuse_other_settings(folder: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    remedy = "go on with the old settings, start again with --fresh (removes the old scores), or choose another --out"
    refuse(
        [
            Problem(f"{folder}, {setting}", "differs from the search that is there", remedy)
            for setting in differences(dict(stored), dict(settings))
        ]
    )
