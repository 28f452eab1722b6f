"""Costs of each defence in a training: accuracy with its standard error, bytes and time, relative to no defence.

The training is the audit's own, or another run on the same data with the same model that is joined with the audit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradveil.audit.attack_selection import UNDEFENDED, canonical
from gradveil.audit.run_directory import TRAINING, Run
from gradveil.core.errors import Problem, refuse
from gradveil.core.formatting import listing
from gradveil.federated.training_groups import (
    MeasuredAccuracy,
    MeasuredNumber,
    OneClassShare,
    TrainingGroup,
    Trials,
    epsilons_of,
    group_trainings,
    largest_epsilon,
)
from gradveil.federated.training_run import StoredTraining, is_training, load_training

STUCK = "*"
"""The mark of an accuracy whose training learned nothing."""


@dataclass(frozen=True)
class DefenceCost:
    """The cost of a defence in its trainings, over all their seeds."""

    accuracy: MeasuredAccuracy
    plain: MeasuredAccuracy | None
    """The accuracy without a defence, of the same trainings; None where there is none, or where it learned nothing."""
    lost: MeasuredNumber | None
    """The accuracy lost to no defence; None for no defence, and where lengths of training differ."""
    bytes_ratio: float | None
    """Bytes that all clients send in a round, relative to no defence."""
    seconds_ratio: float | None
    """Seconds of one client's update, relative to no defence."""
    proof: str
    """What is proven of these trainings; empty without an epsilon."""
    proven: str
    """The same in a few words."""
    rounds: int
    seeds: int
    chance: OneClassShare | None
    """What one class for all reaches, where the accuracy is not above it: the training made no progress."""
    epsilon: float
    """The largest epsilon of these trainings, 0 without any."""
    spans: Mapping[str, tuple[float, float, float]]
    """Mean over the seeds, lowest and highest: of `accuracy`, `bytes` per round of all clients, and a client's
    `seconds`."""

    @property
    def learned(self) -> bool:
        """Whether its accuracy is above that of one class for all."""
        return self.chance is None

    @property
    def accuracy_words(self) -> str:
        """The accuracy with its interval, and a mark where the training learned nothing."""
        return self.accuracy.words() + ("" if self.learned else STUCK)

    def as_object(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {
            "accuracy": self.accuracy.value,
            "accuracy_error": self.accuracy.error,
            "tested": self.accuracy.tested,
            "progress": self.learned,
            "accuracy_without_defence": self.plain and self.plain.value,
            "accuracy_lost": self.lost and self.lost.value,
            "accuracy_lost_error": self.lost and self.lost.error,
            "bytes_ratio": self.bytes_ratio,
            "seconds_ratio": self.seconds_ratio,
            "rounds": self.rounds,
            "seeds": self.seeds,
        }


def largest_epsilon_of(info: Mapping[str, Any], cost: DefenceCost | None) -> float:
    """Return the largest epsilon of a trial: of the planned training, or of the one behind the accuracy; 0 without."""
    planned = info.get("epsilon") or cost is None or not cost.proof
    return max(epsilons_of(info).values(), default=0.0) if planned or cost is None else cost.epsilon


Costs = Mapping[str, DefenceCost]
"""The cost of each defence, by its canonical text."""


def costs(trials: Trials) -> dict[str, DefenceCost]:
    """Compute what each defence of these trainings costs; trainings that failed or diverged have no accuracy."""
    groups = {canonical(group.name): group for group in group_trainings(trials) if group.name != "central"}
    bare = groups.get(UNDEFENDED)
    whole = {name: _cost(group, bare) for name, group in groups.items()}
    return {name: each for name, each in whole.items() if each is not None}


def costs_of(run: Run) -> dict[str, DefenceCost]:
    """Read the trainings of an audit, if it has any."""
    folder = run.path and run.path / TRAINING
    return costs(load_training(folder).trials) if folder and is_training(folder) else {}


def joined(runs: Sequence[Run], trainings: Sequence[StoredTraining]) -> list[dict[str, DefenceCost]]:
    """Join audits with trainings on the same data with the same model; return the costs for each audit.

    An audit that is joined leaves its own trainings aside: accuracies of different trainings do not compare. Refuses a
    training that fits none of the audits, with the reasons, and several that differ.
    """
    problems: list[Problem] = []
    fitting: list[list[StoredTraining]] = [[] for _ in runs]
    for training in trainings:
        reasons = [list(mismatches(run, training)) for run in runs]
        if all(reasons):
            problems += [
                Problem(str(training.path), f"does not fit the audit {run.path}: {'; '.join(why)}", _FIT)
                for run, why in zip(runs, reasons, strict=True)
            ]
        for mine, why in zip(fitting, reasons, strict=True):
            mine += [training] * (not why)
    for mine in fitting:
        for other in mine[1:]:
            problems += _apart(mine[0], other)
    refuse(problems)
    return [
        costs([trial for training in mine for trial in training.trials]) if mine else costs_of(run)
        for run, mine in zip(runs, fitting, strict=True)
    ]


_FIT = "give an audit and a training on the same data with the same model"
_SAME_DATA = (
    "name",
    "size",
    "channels",
    "normalise",
    "mean",
    "std",
    "image_column",
    "label_column",
    "columns",
    "person",
)
_SAME_MODEL = ("name", "options", "prepare", "batchnorm")


def mismatches(run: Run, training: StoredTraining) -> Iterator[str]:
    """Compare the data, the model and the defences that an audit and a training recorded."""
    own, theirs = run.info["config"], training.info["config"]
    for table, keys in (("data", _SAME_DATA), ("model", _SAME_MODEL)):
        here, there = own.get(table) or {}, theirs.get(table) or {}
        for key in keys:
            if here.get(key) != there.get(key):
                yield f"{table}.{key} is {there.get(key)!r}, and {here.get(key)!r} in the audit"
    images = [(info.get("images") or {}).get("public") for info in (run.info, training.info)]
    limits = [(config.get("data") or {}).get("public") for config in (own, theirs)]
    if None not in images and limits[0] == limits[1] and images[0] != images[1]:
        yield "the training images of that name have changed in between"
    defences = [{canonical(text) for text in config.get("defences") or ()} for config in (own, theirs)]
    if not defences[0] & defences[1]:
        yield f"no defence is in both: it trains with {listing(sorted(defences[1]))}"


def _apart(one: StoredTraining, other: StoredTraining) -> Iterator[Problem]:
    """Find trainings of one audit whose accuracies do not compare, and trials that both have."""
    if one.config.digest() != other.config.digest():
        yield Problem(str(other.path), f"is trained in another way than {one.path}", "join the audit with one of them")
    elif twice := {trial for trial, _ in one.trials} & {trial for trial, _ in other.trials}:
        names = listing(sorted({f"'{trial.title}' with seed {trial.seed}" for trial in twice}))
        yield Problem(str(other.path), f"has {names}, and so has {one.path}", "join the audit with one of them")


def _cost(group: TrainingGroup, bare: TrainingGroup | None) -> DefenceCost | None:
    if bare is not None and (seeds := {own["seed"] for own, _ in group.pairs}):
        group, bare = group.of_seeds(seeds), bare.of_seeds(seeds)  # means over other seeds do not compare
    if group.diverged or not (accuracy := group.accuracy):
        return None
    # A training that learned nothing cannot lose accuracy.
    plain = bare.accuracy if bare is not None and not bare.diverged and bare.is_above_chance else None
    worst = group.worst
    return DefenceCost(
        accuracy=accuracy,
        plain=plain,
        lost=_lost(group, accuracy, plain),
        bytes_ratio=_ratio(group, bare, "bytes_up"),
        seconds_ratio=_ratio(group, bare, "client_seconds"),
        proof=str(worst["guarantee"]) if worst and worst["epsilon"] else "",
        proven=group.proof,
        rounds=max(int(summary["rounds"]) for summary in group.completed),
        seeds=len(group.completed),
        chance=None if group.is_above_chance else group.chance,
        epsilon=largest_epsilon(worst) if worst else 0.0,
        spans={name: _span(values) for name, key in _SPANS.items() if (values := group.values(key))},
    )


def _span(values: Sequence[float]) -> tuple[float, float, float]:
    return fmean(values), min(values), max(values)


_SPANS = {"accuracy": "accuracy", "bytes": "bytes_up", "seconds": "client_seconds"}


def _lost(group: TrainingGroup, accuracy: MeasuredNumber, plain: MeasuredNumber | None) -> MeasuredNumber | None:
    """Average the accuracy lost, seed by seed; its error takes the two accuracies to be independent."""
    differences = group.differences
    if not differences or plain is None:
        return None
    return MeasuredNumber(-fmean(differences), math.hypot(accuracy.error, plain.error))


def _ratio(group: TrainingGroup, bare: TrainingGroup | None, key: str) -> float | None:
    own, plain = group.mean(key), bare.mean(key) if bare is not None else None
    return own / plain if own is not None and plain else None
