"""Trainings of one defence, grouped over seeds and runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from gradveil.core.formatting import DASH, listing, number, percent, plural
from gradveil.defences.guarantees import NOTHING
from gradveil.defences.privacy_warnings import reservation
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import FAILED
from gradveil.federated.training_setup import TrainingTrial
from gradveil.metrics import wilson

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
class MeasuredNumber:
    """A number with its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class MeasuredAccuracy(MeasuredNumber):
    """A share of test examples that is classified correctly, the mean over the seeds."""

    tested: int
    """Test examples of a seed."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: Wilson's, of as many examples as have this standard error where seeds differ."""
        share = (self.value * self.tested + 2) / (self.tested + 4)
        as_many = max(1.0, share * (1 - share) / self.error**2 - 4)
        return wilson(self.value * as_many, as_many)

    @property
    def decimals(self) -> int:
        """The decimals of its percentage that the standard error supports."""
        return 0 if self.error >= 0.01 else 1 if self.error >= 0.001 else 2

    def words(self) -> str:
        """Write it in percent, with its interval.

        >>> MeasuredAccuracy(0.75, 0.1361, 8).words(), MeasuredAccuracy(0.0, 0.1076, 8).words()
        ('75% (41–93%)', '0% (0–32%)')
        """
        value, low, high = (f"{100 * each:.{self.decimals}f}" for each in (self.value, *self.interval))
        return f"{value}% ({low}–{high}%)"


class OneClassShare(NamedTuple):
    """What one class for all reaches on the test examples of a defence, the mean over the seeds."""

    share: float
    error: float
    """The standard error of the share."""
    tested: int
    """Test examples of a seed."""
    seeds: int

    @property
    def most(self) -> float:
        """The highest accuracy that is no training progress yet."""
        return self.share + _STANDARD_ERRORS * self.error

    def words(self) -> str:
        """Name the share, the margin above it and the test examples.

        >>> OneClassShare(5 / 9, 0.166, 9, 1).words()
        '55.6% + 33 points, on 9 test examples'
        """
        seeds = f" with each of {self.seeds} seeds" if self.seeds > 1 else ""
        margin = number(100 * _STANDARD_ERRORS * self.error, 2)
        return f"{percent(self.share)} + {margin} points, on {plural(self.tested, 'test example')}{seeds}"


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
    def accuracy(self) -> MeasuredAccuracy | None:
        """The mean accuracy; its error is of the test examples, and of the seeds where there are several.

        The error of a share k of n takes two more hits and misses, so that none is 0 (Agresti and Coull 1998).
        """
        values = self.values("accuracy")
        if not values:
            return None
        mean, tested = fmean(values), min((int(summary["tested"] or 1) for summary in self.completed), default=1)
        share = (mean * tested + 2) / (tested + 4)
        of_examples = share * (1 - share) / (tested + 4)
        of_seeds = stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0
        return MeasuredAccuracy(mean, math.sqrt(of_examples + of_seeds), tested)

    @property
    def chance(self) -> OneClassShare | None:
        """What the most frequent class for all examples reaches; None where it was not recorded."""
        with_chance = [summary for summary in self.completed if summary["constant"] is not None]
        if not with_chance:
            return None
        share, every = fmean(summary["constant"] for summary in with_chance), [int(s["tested"]) for s in with_chance]
        # The binomial deviation of the share that a constant answer gets right.
        return OneClassShare(share, math.sqrt(share * (1 - share) / sum(every)), min(every), len(every))

    @property
    def is_above_chance(self) -> bool:
        """Whether the accuracy is significantly above that of the most frequent class."""
        with_chance = [summary["accuracy"] for summary in self.completed if summary["constant"] is not None]
        return self.chance is None or fmean(with_chance) > self.chance.most

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
    def reservation(self) -> str:
        """What to say of an epsilon that is too large to rely on; empty where there is none."""
        return reservation(largest_epsilon(self.worst)) if self.worst else ""


def proven(info: Mapping[str, Any]) -> str:
    """Describe in a few words what is proven of a trial or a training: of the planned training, or of the one that ran.

    >>> proven({"epsilon": {"example": 1.8282}}), proven({"guarantee": "no formal guarantee: 'a' looks ..."})
    ('epsilon 1.83 of each example', 'no formal guarantee')
    >>> proven({"epsilon": {"client": 8800112.3}})
    'epsilon 8.8e+06 of each client'
    """
    # Digits of a number that promises nothing would look like precision.
    said = {unit: number(value) if value < 1e4 else f"{value:.2g}" for unit, value in epsilons_of(info).items()}
    found = [f"epsilon {value} of each {unit}" for unit, value in said.items()]
    if found:
        return ", ".join(found)
    told = str(info.get("guarantee") or "none")
    return NOTHING if told == "none" or told.startswith(NOTHING) else told


def epsilons_of(info: Mapping[str, Any]) -> Mapping[str, float]:
    """Look up the epsilons of a trial or a training by unit: of the planned training, or of the one that ran."""
    return info.get("epsilon") or (info.get("training") or {}).get("epsilon") or {}


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
    return not_above({group.name: group.chance for group in stuck if group.chance is not None})


def not_above(chances: Mapping[str, OneClassShare]) -> str:
    """Say of these trainings that their accuracy is not above chance; empty without any."""
    alike: dict[str, list[str]] = {}
    for name, chance in chances.items():
        alike.setdefault(chance.words(), []).append(name)
    told = [
        f"{listing(names)} classified no more examples correctly than one class for all does, within "
        f"{_STANDARD_ERRORS} standard errors ({words})"
        for words, names in alike.items()
    ]
    unknown = ", so the cost of defences cannot be measured" if "none" in chances else ""
    return f"{'; '.join(told)}: no training progress yet{unknown}." if told else ""


def proofs(groups: Sequence[TrainingGroup]) -> list[tuple[str, str, str]]:
    """List the guarantees, epsilons first: the defences, the guarantee, and the reservation about it."""
    names: dict[tuple[str, str], list[str]] = {}
    for group in sorted(groups, key=lambda group: not (group.worst and group.worst["epsilon"])):
        if group.worst is not None:
            names.setdefault((str(group.worst["guarantee"]), group.reservation), []).append(group.name)
    return [(listing(each), text, doubt) for (text, doubt), each in names.items()]


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
