"""Trainings of one defence, grouped over seeds and runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from gradveil.core.formatting import DASH, listing, number, percent, plural
from gradveil.defences.guarantees import NOTHING
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import FAILED
from gradveil.federated.training_setup import TrainingTrial

TrainingSummary = Mapping[str, Any]
"""The stored result of a training."""
Trials = Sequence[tuple[TrainingTrial, TrainingSummary | None]]
"""Trials with their results; None for a trial that is not finished."""
_STANDARD_ERRORS = 2
"""An accuracy counts as above chance from this many standard errors on."""
NOT_FINISHED = "not finished"
"""Status of a trial without a result."""
FINISHED = "finished"
"""Status of a training that ran all planned rounds."""
SUCCESSFUL = (FINISHED, "stopped early")
"""Statuses of a training that ended as planned."""


@dataclass(frozen=True)
class TrainingGroup:
    """One defence (or the training with all data in one place) with its seeds."""

    name: str
    trials: Trials
    undefended: Mapping[int, TrainingSummary]
    """The training without a defence, per seed."""

    @property
    def completed(self) -> list[TrainingSummary]:
        """The trainings with numbers, diverged ones included."""
        return [summary for _, summary in self.trials if summary is not None and summary["status"] != FAILED]

    @property
    def diverged(self) -> bool:
        """Whether every training with numbers diverged, so that its accuracy and bytes must not be compared."""
        return all(summary["status"] == "diverged" for summary in self.completed)

    @property
    def statuses(self) -> list[tuple[str, str]]:
        """The statuses of the seeds: a level for the colour, and the status with its count."""
        counts = Counter(status(summary) for _, summary in self.trials)
        levels = {**dict.fromkeys(SUCCESSFUL, "not broken"), NOT_FINISHED: "inconclusive"}
        several = len(self.trials) > 1
        return [(levels.get(name, "broken"), f"{n} {name}" if several else name) for name, n in counts.most_common()]

    def values(self, key: str) -> list[float]:
        """Return a number of all seeds that have it."""
        return [float(summary[key]) for summary in self.completed if summary[key] is not None]

    def mean(self, key: str) -> float | None:
        """Return the mean of a number over the seeds."""
        return fmean(self.values(key)) if self.values(key) else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the accuracy over the seeds; None for a single seed."""
        values = self.values("accuracy")
        return stdev(values) if len(values) > 1 else None

    @property
    def is_above_chance(self) -> bool:
        """Whether the accuracy is significantly above that of the most frequent class."""
        with_chance = [summary for summary in self.completed if summary["constant"] is not None]
        if not with_chance:
            return True
        chance = fmean(summary["constant"] for summary in with_chance)
        # The binomial deviation of the share that a constant answer gets right.
        error = math.sqrt(chance * (1 - chance) / sum(summary["tested"] for summary in with_chance))
        return fmean(summary["accuracy"] for summary in with_chance) > chance + _STANDARD_ERRORS * error

    @property
    def differences(self) -> list[float]:
        """The accuracy minus that without a defence, per seed: with the same images, weights, clients and rounds."""
        return [own["accuracy"] - bare["accuracy"] for own, bare in self.pairs if self.name != "none"]

    @property
    def pairs(self) -> list[tuple[TrainingSummary, TrainingSummary]]:
        """The trainings whose accuracy compares with that without a defence of the same seed, with that one."""
        every = ((own, self.undefended.get(own["seed"])) for own in self.completed)
        return [
            (own, bare)
            for own, bare in every
            if bare and _is_comparable(own, bare) and own["accuracy"] is not None and bare["accuracy"] is not None
        ]

    def of_seeds(self, seeds: Collection[int]) -> TrainingGroup:
        """Keep the trials of some seeds."""
        return replace(self, trials=[pair for pair in self.trials if pair[0].seed in seeds])

    def total(self, key: str) -> float | None:
        """Return the sum of a number over the rounds, averaged over the seeds."""
        sums = [sum(point[key] for point in summary["curve"]) for summary in self.completed]
        return fmean(sums) if sums else None

    @property
    def best_rounds(self) -> str:
        """The rounds whose parameters were kept, from the lowest to the highest over the seeds."""
        rounds = sorted({summary["best_round"] for summary in self.completed if summary["best_round"]})
        return f"{rounds[0]}–{rounds[-1]}" if len(rounds) > 1 else str(*rounds)

    @property
    def worst(self) -> TrainingSummary | None:
        """The seed with the largest epsilon; None where no guarantee was computed."""
        with_guarantee = [summary for summary in self.completed if summary["guarantee"] is not None]
        return max(with_guarantee, key=largest_epsilon, default=None)

    @property
    def proof(self) -> str:
        """The guarantee in a few words."""
        return proven(self.worst) if self.worst else DASH

    @property
    def is_meaningless(self) -> bool:
        """Whether there is an epsilon that is too large to rely on."""
        return bool(self.worst) and largest_epsilon(self.worst) > MEANINGLESS


def proven(info: Mapping[str, Any]) -> str:
    """Describe in a few words what is proven of a trial or a training: of the planned training, or of the one that ran.

    >>> proven({"epsilon": {"example": 1.8282}}), proven({"guarantee": "no formal guarantee: 'a' looks ..."})
    ('epsilon 1.83 of each example', 'no formal guarantee')
    >>> proven({"epsilon": {"client": 8800112.3}})
    'epsilon 8.8e+06 of each client'
    """
    epsilons = info.get("epsilon") or (info.get("training") or {}).get("epsilon") or {}
    # Digits of a number that promises nothing would look like precision.
    said = {unit: number(value) if value < 1e4 else f"{value:.2g}" for unit, value in epsilons.items()}
    found = [f"epsilon {value} of each {unit}" for unit, value in said.items()]
    if found:
        return ", ".join(found)
    told = str(info.get("guarantee") or "none")
    return NOTHING if told == "none" or told.startswith(NOTHING) else told


def status(summary: TrainingSummary | None) -> str:
    """Return the status of a training, finished or not."""
    return NOT_FINISHED if summary is None else str(summary["status"])


def largest_epsilon(summary: TrainingSummary) -> float:
    """Return the largest epsilon of a training over its units, 0 where there is none."""
    return max(summary["epsilon"].values(), default=0.0)


def group_trainings(trials: Trials) -> list[TrainingGroup]:
    """Group trials by defence, in the order of the run file."""
    undefended = {trial.seed: each for trial, each in trials if trial.title == "none" and each is not None}
    names = dict.fromkeys(trial.title for trial, _ in trials)
    return [TrainingGroup(name, [pair for pair in trials if pair[0].title == name], undefended) for name in names]


def _is_comparable(one: TrainingSummary, other: TrainingSummary) -> bool:
    """Return whether two trainings have equal lengths, or one ended early, no later than the other.

    >>> early, two, three = ({"status": how, "rounds": n} for how, n in (("diverged", 2), (FINISHED, 2), (FINISHED, 3)))
    >>> _is_comparable(early, two), _is_comparable(three, early), _is_comparable(two, three)
    (True, True, False)
    """
    first, second = ((each["status"] == FINISHED, int(each["rounds"])) for each in (one, other))
    if first[0] and second[0]:
        return first[1] == second[1]
    (planned, length), (_, end) = (first, second) if first[0] else (second, first)
    return not planned or end <= length


def no_progress(groups: Sequence[TrainingGroup]) -> str:
    """Name the trainings whose accuracy is not above chance, so that differences mean nothing; empty without any."""
    stuck = [g for g in groups if g.values("accuracy") and not g.diverged and not g.is_above_chance]
    if not stuck:
        return ""
    sentence = (
        f"{listing(group.name for group in stuck)} classified no more examples correctly than one class for all does "
    )
    sentence += f"({percent(stuck[0].mean('constant'))}): no training progress yet"
    is_reference = any(group.name == "none" for group in stuck)
    return f"{sentence}, so the cost of defences cannot be measured." if is_reference else f"{sentence}."


def proofs(groups: Sequence[TrainingGroup]) -> list[tuple[str, str, bool]]:
    """List the guarantees, epsilons first: the defences, the guarantee, and whether it is too weak to rely on."""
    names: dict[tuple[str, bool], list[str]] = {}
    for group in sorted(groups, key=lambda group: not (group.worst and group.worst["epsilon"])):
        if group.worst is not None:
            names.setdefault((str(group.worst["guarantee"]), group.is_meaningless), []).append(group.name)
    return [(listing(each), text, is_meaningless) for (text, is_meaningless), each in names.items()]


def setting_title(config: TrainConfig) -> str:
    """Describe the setting of a training in one line."""
    local = config.local
    work = "one gradient per round" if local is None else "local training"
    if local is not None:
        length = plural(local.epochs, "local epoch") if local.epochs else plural(local.steps or 0, "local step")
        per_step = "on average (Poisson)" if local.sampling == "poisson" else "per step"
        work = f"{length} of {local.optimiser}, {local.batch or 'all'} images {per_step}"
    work += f", only {listing(config.trainable)} trained" if config.trainable else ""
    share = "" if config.participation == 1 else f", {percent(config.participation)} of them per round"
    return f"{config.model.name} on {config.data.name}: {plural(config.clients, 'client')}{share}, {work}"
