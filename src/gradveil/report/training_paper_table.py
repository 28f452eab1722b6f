"""The paper's table of trainings: accuracy, difference to none and bytes of every defence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.formatting import DASH, plural, size
from gradveil.defences import parse
from gradveil.federated.training_config import FREE, TrainConfig
from gradveil.federated.training_groups import (
    SUCCESSFUL,
    TrainingGroup,
    TrainingSummary,
    Trials,
    group_trainings,
    no_progress,
    setting_title,
    status,
)
from gradveil.federated.training_run import StoredTraining
from gradveil.federated.training_setup import TrainingTrial
from gradveil.report.choices import ALL, TableChoices
from gradveil.report.paper_table import PaperTable, PlacedText, named_text, repeated
from gradveil.report.setting_titles import distinct_titles, file_digests

_IGNORED = {"name", "device", *FREE}
"""Settings that do not separate tables; the rows show the number of rounds."""

COLUMN_TITLES = {
    "accuracy": "accuracy",
    "difference": "to none",
    "best-round": "best round",
    "rounds": "rounds",
    "sent": "sent per round",
    "received": "received per round",
    "guarantee": "proven",
}
"""The columns of the table, after that of the defence."""


@dataclass(frozen=True)
class TrainingTable:
    """The trainings of one setting, which differ in defences, seeds and numbers of rounds."""

    title: str
    config: TrainConfig
    trials: Trials
    choices: TableChoices = ALL

    @cached_property
    def groups(self) -> list[TrainingGroup]:
        """The defences with their seeds, selected and in order."""
        groups = {group.name: group for group in group_trainings(self.trials)}
        return [groups[name] for name in self.choices.sort(groups) if self.choices.shows_defence(name)]

    @cached_property
    def seeds(self) -> int:
        """Number of seeds of most defences."""
        return Counter(len(group.completed) for group in self.groups if group.completed).most_common(1)[0][0]

    def caption(self) -> str:
        """Describe the numbers of the table."""
        private = [each for group in self.groups for each in group.completed if each["epsilon"]]
        lowest = "the round with the lowest validation loss" if self.config.validation else "the last round"
        several = "mean and standard deviation over " if self.seeds > 1 else "95% interval of the test examples, "
        paired = " seed by seed" if self.seeds > 1 else ""
        meanings = {
            "accuracy": f"test accuracy after {lowest}; {several}{plural(self.seeds, 'seed')} unless noted",
            "difference": f"difference of accuracy to none{paired}, in percentage points",
            "sent": "bytes of all clients, as encoded",
            "received": "bytes of all clients, as encoded",
            "guarantee": "".join(f"epsilons at delta {each['delta']:g}" for each in private[:1]),
        }
        shown = "; ".join(dict.fromkeys(filter(None, (meanings.get(metric) for metric in self.metrics))))
        return f"{self.title}: {shown}. {no_progress(self.groups)}".rstrip()

    @property
    def metrics(self) -> list[str]:
        """The columns that are shown: by default all, that of guarantees if there is an epsilon."""
        private = any(group.worst and group.worst["epsilon"] for group in self.groups)
        return [*self.choices.metrics] or [key for key in COLUMN_TITLES if key != "guarantee" or private]

    def sheet(self) -> PaperTable:
        """Arrange the groups as a table."""
        titles = {"defence": "defence", **COLUMN_TITLES, **self.choices.headers}
        columns = [PlacedText(titles[key], math=key in self.choices.headers) for key in ("defence", *self.metrics)]
        rows = [[named_text(self.choices, group.name), *self._row(group, self.metrics)] for group in self.groups]
        return PaperTable(self.choices.headers.get("caption") or self.caption(), columns, rows)

    def _row(self, group: TrainingGroup, keys: Sequence[str]) -> list[PlacedText]:
        sent, received = (
            size(mean) if (mean := group.mean(key)) is not None else "" for key in ("bytes_up", "bytes_down")
        )
        texts = {
            "accuracy": PlacedText(accuracy_text(group), self._exceptions(group)),
            "difference": PlacedText(difference_text(group), compared_seeds_text(group)),
            "best-round": PlacedText(group.best_rounds if group.completed else ""),
            "rounds": PlacedText(rounds_text(group)),
            "sent": PlacedText(sent),
            "received": PlacedText(received),
            "guarantee": PlacedText(group.proof),
        }
        return [texts[key] for key in keys]

    def _exceptions(self, group: TrainingGroup) -> str:
        """Return the number of seeds where it is unusual, and the statuses of seeds that did not end as planned."""
        counts = Counter(status(summary) for _, summary in group.trials)
        bad = [f"{count} {name}" for name, count in counts.items() if name not in SUCCESSFUL]
        seeds = len(group.completed)
        unusual = [plural(seeds, "seed")] if seeds not in (0, self.seeds) else []
        return "".join(f", {text}" for text in (*unusual, *bad))


def accuracy_text(group: TrainingGroup) -> str:
    """Return the mean accuracy of a defence with its standard deviation over the seeds, or one seed's interval."""
    mean, deviation = group.accuracy, group.deviation
    if mean is None or deviation is None:
        return DASH if mean is None else mean.words()
    return f"{100 * mean.value:.{mean.decimals}f}% ± {100 * deviation:.{max(1, mean.decimals)}f}"


def rounds_text(group: TrainingGroup) -> str:
    """Return the number of rounds of a defence, from the lowest to the highest over its seeds."""
    counts = sorted({int(summary["rounds"]) for summary in group.completed})
    return f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else "".join(map(str, counts))


def difference_text(group: TrainingGroup) -> str:
    """Return the mean difference of accuracy to none in points, with its standard deviation over the seeds."""
    points, mean = [100 * difference for difference in group.differences], group.accuracy
    if mean is None or not points:
        return ""
    deviation = f" ± {stdev(points):.{max(1, mean.decimals)}f}" if len(points) > 1 else ""
    return f"{fmean(points):+z.{mean.decimals}f}{deviation}".replace("-", "−")


def compared_seeds_text(group: TrainingGroup) -> str:
    """Return the number of seeds behind the difference to none, where some have no comparable training."""
    pairs = len(group.differences)
    return f" ({plural(pairs, 'seed')})" if 0 < pairs < len(group.completed) else ""


def training_tables(trainings: Sequence[StoredTraining], choices: TableChoices = ALL) -> list[TrainingTable]:
    """Make a table per setting of these trainings; reject two results for one trial, and choices without a hit."""
    groups: dict[str, list[StoredTraining]] = {}
    for training in trainings:
        groups.setdefault(json.dumps(_setting(training), sort_keys=True), []).append(training)
    refuse([problem for group in groups.values() for problem in (*_twice(group), *_deltas(group))])
    titles = _titles([group[0] for group in groups.values()])
    every = [
        TrainingTable(title, group[0].config, _joined(group))
        for title, group in zip(titles, groups.values(), strict=True)
    ]
    wrong = choices.problems([group.name for table in every for group in table.groups], ())
    refuse([*wrong, *choices.wrong_words(COLUMN_TITLES, ("defence", *COLUMN_TITLES, "caption"))])
    chosen = [replace(table, choices=choices) for table in every]
    return [table for table in chosen if any(group.completed for group in table.groups)]


def _setting(training: StoredTraining) -> dict[str, Any]:
    """Return the settings that separate tables, with digests in place of file names."""
    config = training.config
    settings = {key: value for key, value in config.resolved().items() if key not in _IGNORED | {*config.growing}}
    return settings | file_digests(training.info)


def _joined(group: Sequence[StoredTraining]) -> Trials:
    """Join the trials of several runs; a trial is finished if one of the runs finished it."""
    joined: dict[TrainingTrial, TrainingSummary | None] = {}
    written: dict[str, str] = {}
    for training in group:
        for (trial, summary), (original, _) in zip(_named(training), training.trials, strict=True):
            joined[trial] = summary or joined.get(trial)
            written.setdefault(trial.defence, original.defence)
    return [(replace(trial, defence=written[trial.defence]), summary) for trial, summary in joined.items()]


def _named(training: StoredTraining) -> Trials:
    """Write every defence in its canonical form."""
    return [(replace(trial, defence=_canonical(trial.defence)), summary) for trial, summary in training.trials]


def _canonical(text: str) -> str:
    try:
        return parse(text).name
    except GradveilError:  # a custom defence, which is never imported for a table
        return text


def _deltas(group: Sequence[StoredTraining]) -> Iterator[Problem]:
    owners: dict[float, StoredTraining] = {}
    for training in group:
        for _, summary in training.trials:
            if summary is not None and summary["epsilon"]:
                owners.setdefault(summary["delta"], training)
    for delta, training in [*owners.items()][1:]:
        usual, first = next(iter(owners.items()))
        problem = f"reports epsilons at delta {delta:g}, and {first.path} at delta {usual:g}"
        yield Problem(str(training.path), problem, f"run it again with --set delta={usual:g}: it repeats no training")


def _twice(group: Sequence[StoredTraining]) -> Iterator[Problem]:
    owners: dict[Any, StoredTraining] = {}
    for training in group:
        for trial, summary in _named(training):
            first = training if summary is None else owners.setdefault(trial, training)
            if first is not training:
                yield repeated(training.path, f"'{trial.title}' with seed {trial.seed}", first.path)


def _titles(trainings: Sequence[StoredTraining]) -> list[str]:
    """Title each setting, with the settings that differ where titles are equal."""
    return distinct_titles([setting_title(training.config) for training in trainings], [*map(_setting, trainings)])
