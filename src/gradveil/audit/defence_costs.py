"""Costs of each defence in a training: accuracy with its standard error, bytes and time, relative to no defence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gradveil.audit.attack_selection import UNDEFENDED, canonical
from gradveil.audit.run_directory import TRAINING, Run
from gradveil.core.formatting import percent
from gradveil.federated.training_groups import TrainingGroup, Trials, group_trainings
from gradveil.federated.training_run import is_training, load_training


@dataclass(frozen=True)
class Measured:
    """A share with its standard error."""

    value: float
    error: float

    def words(self) -> str:
        """Write both in percent.

        >>> Measured(0.84, 0.037).words()
        '84% ± 4'
        """
        return f"{percent(self.value)} ± {100 * self.error:.0f}"


@dataclass(frozen=True)
class DefenceCost:
    """The cost of a defence in its trainings, over all their seeds."""

    accuracy: Measured
    plain: Measured | None
    """The accuracy without a defence, of the same trainings; None where there is none, or where it learned nothing."""
    lost: Measured | None
    """The accuracy lost to no defence; None for no defence, and where lengths of training differ."""
    bytes_ratio: float | None
    """Bytes that all clients send in a round, relative to no defence."""
    seconds_ratio: float | None
    """Seconds of one client's update, relative to no defence."""
    proof: str
    """What is proven of these trainings; empty without an epsilon."""
    rounds: int
    seeds: int

    def as_object(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {
            "accuracy": self.accuracy.value,
            "accuracy_error": self.accuracy.error,
            "accuracy_without_defence": self.plain and self.plain.value,
            "accuracy_lost": self.lost and self.lost.value,
            "accuracy_lost_error": self.lost and self.lost.error,
            "bytes_ratio": self.bytes_ratio,
            "seconds_ratio": self.seconds_ratio,
            "rounds": self.rounds,
            "seeds": self.seeds,
        }


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


def _cost(group: TrainingGroup, bare: TrainingGroup | None) -> DefenceCost | None:
    if group.diverged or not (accuracy := _accuracy(group)):
        return None
    # A training that learned nothing cannot lose accuracy.
    plain = _accuracy(bare) if bare is not None and not bare.diverged and bare.is_above_chance else None
    worst = group.worst
    return DefenceCost(
        accuracy=accuracy,
        plain=plain,
        lost=_lost(group, accuracy, plain),
        bytes_ratio=_ratio(group, bare, "bytes_up"),
        seconds_ratio=_ratio(group, bare, "client_seconds"),
        proof=str(worst["guarantee"]) if worst and worst["epsilon"] else "",
        rounds=max(int(summary["rounds"]) for summary in group.completed),
        seeds=len(group.completed),
    )


def _accuracy(group: TrainingGroup) -> Measured | None:
    """Average the accuracy; its error is of the test images, and of the seeds where there are several.

    The error of a share k of n takes two more hits and misses, so that none is 0 (Agresti and Coull 1998).
    """
    values = group.values("accuracy")
    if not values:
        return None
    mean, tested = fmean(values), min((int(summary["tested"] or 1) for summary in group.completed), default=1)
    share = (mean * tested + 2) / (tested + 4)
    of_images = share * (1 - share) / (tested + 4)
    of_seeds = stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0
    return Measured(mean, math.sqrt(of_images + of_seeds))


def _lost(group: TrainingGroup, accuracy: Measured, plain: Measured | None) -> Measured | None:
    """Average the accuracy lost, seed by seed; its error takes the two accuracies to be independent."""
    differences = group.differences
    if not differences or plain is None:
        return None
    return Measured(-fmean(differences), math.hypot(accuracy.error, plain.error))


def _ratio(group: TrainingGroup, bare: TrainingGroup | None, key: str) -> float | None:
    own, plain = group.mean(key), bare.mean(key) if bare is not None else None
    return own / plain if own is not None and plain else None
