"""Trainings of one defence, grouped over seeds and runs."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gradveil.audit.run_warnings import proven
from gradveil.core.formatting import DASH, listing, percent, plural
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_run import FAILED
from gradveil.federated.training_setup import TrainingTrial
from gradveil.report.trial_table import disarmed

Told = Mapping[str, Any]
"""What a finished trial came to."""
Trials = Sequence[tuple[TrainingTrial, Told | None]]
"""Trials with what each came to; None where one is not finished."""
_ERRORS = 2
"""Standard errors that an accuracy is above chance, at least."""
LEFT = "not finished"
"""Status of a trial that is not there yet."""
END = "finished"
"""Status of a training that had all the rounds that were planned."""
GOOD = (END, "stopped early")
"""Statuses of a trial that came to an end of its own."""


@dataclass(frozen=True)
class TrainingGroup:
    """One defence (or the training with all data in one place) with its seeds."""

    name: str
    trials: Trials
    bare: Mapping[int, Told]
    """The training without a defence, of every seed that has one."""

    @property
    def counted(self) -> list[Told]:
        """The trainings that came to numbers, diverged ones too."""
        return [told for _, told in self.trials if told is not None and told["status"] != FAILED]

    @property
    def diverged(self) -> bool:
        """Whether all that came to numbers went astray: nothing of it is an achievement, its few bytes least of all."""
        return all(told["status"] == "diverged" for told in self.counted)

    @property
    def statuses(self) -> list[tuple[str, str, str]]:
        """How the seeds ended: a level for the colour, how many, and in which way."""
        counts = Counter(LEFT if told is None else str(told["status"]) for _, told in self.trials)
        levels = {**dict.fromkeys(GOOD, "not-broken"), LEFT: "inconclusive"}
        several = len(self.trials) > 1
        return [(levels.get(how, "broken"), str(n) if several else "", how) for how, n in counts.most_common()]

    def values(self, key: str) -> list[float]:
        """List a number of all seeds that have it."""
        return [float(told[key]) for told in self.counted if told[key] is not None]

    def mean(self, key: str) -> float | None:
        """Average a number over the seeds."""
        return fmean(self.values(key)) if self.values(key) else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the accuracy over the seeds; None of a single one."""
        found = self.values("accuracy")
        return stdev(found) if len(found) > 1 else None

    @property
    def learnt(self) -> bool:
        """Whether it names more test examples rightly than one class for all does, and not by chance alone."""
        chance = [told for told in self.counted if told["constant"] is not None]
        if not chance:  # nobody asked
            return True
        share = fmean(told["constant"] for told in chance)
        error = math.sqrt(share * (1 - share) / sum(told["tested"] for told in chance))
        return fmean(told["accuracy"] for told in chance) > share + _ERRORS * error

    @property
    def differences(self) -> list[float]:
        """The accuracy beside that without a defence, seed by seed: the same images, weights, clients and rounds."""
        pairs = ((told, self.bare.get(told["seed"])) for told in self.counted if self.name != "none")
        found = [(own["accuracy"], bare["accuracy"]) for own, bare in pairs if bare and _as_long(own, bare)]
        return [own - bare for own, bare in found if own is not None and bare is not None]

    def total(self, key: str) -> float | None:
        """Add a number up over the rounds, and average over the seeds."""
        sums = [sum(point[key] for point in told["curve"]) for told in self.counted]
        return fmean(sums) if sums else None

    @property
    def best_rounds(self) -> str:
        """Name the rounds whose parameters were kept: one a seed."""
        found = sorted({told["best_round"] for told in self.counted if told["best_round"]})
        return f"{found[0]}–{found[-1]}" if len(found) > 1 else str(*found)

    @property
    def worst(self) -> Told | None:
        """The seed of which least is proven; None where nothing was asked."""
        asked = [told for told in self.counted if told["guarantee"] is not None]
        return max(asked, key=lambda told: max(told["epsilon"].values(), default=0.0), default=None)

    @property
    def proof(self) -> str:
        """Say in a few words what is proven."""
        return proven(self.worst) if self.worst else DASH

    @property
    def hollow(self) -> bool:
        """Whether there is an epsilon, and it is too large to rely on."""
        return bool(self.worst) and max(self.worst["epsilon"].values(), default=0.0) > MEANINGLESS


def kinds(trials: Trials) -> list[TrainingGroup]:
    """Put the trials of each defence together, in the run file's order."""
    bare = {trial.seed: told for trial, told in trials if trial.title == "none" and told is not None}
    names = dict.fromkeys(trial.title for trial, _ in trials)
    return [TrainingGroup(name, [pair for pair in trials if pair[0].title == name], bare) for name in names]


def _as_long(one: Told, other: Told) -> bool:
    """Say whether two trainings may stand beside each other: one that ended by itself did so before the other's end.

    >>> early, two, three = ({"status": how, "rounds": n} for how, n in (("diverged", 2), (END, 2), (END, 3)))
    >>> _as_long(early, two), _as_long(three, early), _as_long(two, three)
    (True, True, False)
    """
    first, second = ((told["status"] == END, int(told["rounds"])) for told in (one, other))
    if first[0] and second[0]:
        return first[1] == second[1]
    (planned, length), (_, end) = (first, second) if first[0] else (second, first)
    return not planned or end <= length


def idle(every: Sequence[TrainingGroup]) -> str:
    """Say which trainings have learnt nothing yet: beside those differences mean nothing. Empty where all have."""
    found = [kind for kind in every if kind.values("accuracy") and not kind.diverged and not kind.learnt]
    if not found:
        return ""
    told = f"{listing(kind.name for kind in found)} named no more images rightly than one class for all does "
    told += f"({percent(found[0].mean('constant'))}): nothing is learnt yet"
    whole = any(kind.name == "none" for kind in found)
    return f"{told}, and what defences cost cannot be told." if whole else f"{told}."


def proofs(every: Sequence[TrainingGroup]) -> list[tuple[str, str, bool]]:
    """List what is proven, epsilons first: of which defences, what, and whether it is too little to rely on."""
    found: dict[tuple[str, bool], list[str]] = {}
    for kind in sorted(every, key=lambda kind: not (kind.worst and kind.worst["epsilon"])):
        if kind.worst is not None:
            found.setdefault((str(kind.worst["guarantee"]), kind.hollow), []).append(kind.name)
    return [(listing(names), text, hollow) for (text, hollow), names in found.items()]


def what(config: TrainConfig) -> str:
    """Say in a sentence what was trained, and how."""
    local = config.local
    work = "one gradient a round" if local is None else "local training"
    if local is not None:
        length = plural(local.epochs, "local epoch") if local.epochs else plural(local.steps or 0, "local step")
        drawn = "on the average (Poisson)" if local.sampling == "poisson" else "a step"
        work = f"{length} of {local.optimiser}, {local.batch or 'all'} images {drawn}"
    work += f", only {listing(config.trainable)} trained" if config.trainable else ""
    some = "" if config.participation == 1 else f", {percent(config.participation)} of them in a round"
    return f"{config.model.name} on {config.data.name}: {plural(config.clients, 'client')}{some}, {work}"


def rows(trials: Trials) -> Iterator[dict[str, Any]]:
    """List every training with its numbers."""
    for trial, told in trials:
        named = {"defence": trial.title, "seed": trial.seed, "status": LEFT if told is None else told["status"]}
        known: Told = told or {}
        keys = ("rounds", "best_round", "accuracy", "loss", "validation_loss", "bytes_up", "bytes_down", "seconds")
        curve = known.get("curve") or ()
        keys, summed = (*keys, "client_seconds"), keys[-3:]
        totals = {f"total_{key}": sum(p[key] for p in curve) if curve else None for key in summed}
        epsilons = {f"epsilon_{unit}": (known.get("epsilon") or {}).get(unit) for unit in ("example", "client")}
        proof = {"delta": known.get("delta"), "guarantee": known.get("guarantee"), "failed": known.get("failed")}
        yield named | {key: known.get(key) for key in keys} | totals | epsilons | proof


_POINT = ("accuracy", "loss", "validation_accuracy", "validation_loss", "bytes_up", "bytes_down", "seconds")
_POINT += ("client_seconds",)
_WHO = {"answered": "clients", "refused": "refused", "absent": "absent"}
ROUNDS = ("defence", "seed", "round", *_POINT, *_WHO)
"""What is listed of every round."""


def rounds(trials: Trials) -> Iterator[dict[str, Any]]:
    """List every round of every training."""
    for trial, told in trials:
        for point in told["curve"] if told else ():
            who = {name: len(point.get(key, ())) for name, key in _WHO.items()}
            named = {"defence": trial.title, "seed": trial.seed, "round": point["number"]}
            yield named | {key: point.get(key) for key in _POINT} | who


def as_csv(rows: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """Write rows with equal keys as CSV, unrounded; text that a spreadsheet would run gets an apostrophe.

    `names` are the columns where there is no row.
    """
    every = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(every[0]) if every else names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: disarmed(value) for key, value in row.items()} for row in every)
    return out.getvalue()
