"""The page and the table of trainings: cost of every defence in accuracy, bytes and time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.formatting import DASH, duration, percent, plural, size
from gradveil.defences import parse
from gradveil.defences.privacy_warnings import MEANINGLESS
from gradveil.federated.training_config import FREE, TrainConfig
from gradveil.federated.training_run import FAILED, StoredTraining, load_training
from gradveil.federated.training_setup import TrainingTrial
from gradveil.report.method import contents, told_apart
from gradveil.report.paper_table import PaperTable, PlacedText
from gradveil.report.plots import lines
from gradveil.report.rendering import data_uri, render
from gradveil.report.training_groups import (
    GOOD,
    LEFT,
    ROUNDS,
    Told,
    TrainingGroup,
    Trials,
    as_csv,
    idle,
    kinds,
    proofs,
    rows,
    what,
)
from gradveil.report.training_groups import rounds as training_rounds

_BESIDE = {"name", "device", *FREE}
"""Settings that make no other table; how many rounds there were, its rows say."""


@dataclass(frozen=True)
class Table:
    """The trainings of one setting: alike in all but defences, seeds and how long they went."""

    title: str
    config: TrainConfig
    trials: Trials

    @cached_property
    def kinds(self) -> list[TrainingGroup]:
        """The defences with their seeds."""
        return kinds(self.trials)

    @cached_property
    def seeds(self) -> int:
        """How many seeds most defences have."""
        return Counter(len(kind.counted) for kind in self.kinds if kind.counted).most_common(1)[0][0]

    def caption(self) -> str:
        """Say what is shown."""
        private = [told for kind in self.kinds for told in kind.counted if told["epsilon"]]
        lowest = "the round with the lowest validation loss" if self.config.validation else "the last round"
        several = "mean and standard deviation over " if self.seeds > 1 else ""
        paired = " seed by seed" if self.seeds > 1 else ""
        return (
            f"{self.title}: test accuracy after {lowest}; {several}{plural(self.seeds, 'seed')} unless said otherwise; "
            f"its difference to none{paired}, in percentage points; bytes of all clients, as encoded"
            + "".join(f"; epsilons at delta {told['delta']:g}" for told in private[:1])
            + ". "
            + idle(self.kinds)
        ).rstrip()

    def sheet(self) -> PaperTable:
        """Lay it out; what is proven has a column where there is an epsilon."""
        private = any(kind.worst and kind.worst["epsilon"] for kind in self.kinds)
        titles = ("defence", "accuracy", "to none", "best round", "rounds", "sent a round", "received a round")
        rows = [[*self._row(kind), *([PlacedText(kind.proof)] if private else [])] for kind in self.kinds]
        return PaperTable(
            self.caption(), [PlacedText(title) for title in (*titles, *(["proven"] if private else []))], rows
        )

    def _row(self, kind: TrainingGroup) -> list[PlacedText]:
        return [
            PlacedText(kind.name, code=True),
            PlacedText(accuracy(kind), self._beside(kind)),
            PlacedText(gap(kind), fewer(kind)),
            PlacedText(kind.best_rounds if kind.counted else ""),
            PlacedText(rounds(kind)),
            *(
                PlacedText(size(mean) if (mean := kind.mean(key)) is not None else "")
                for key in ("bytes_up", "bytes_down")
            ),
        ]

    def _beside(self, kind: TrainingGroup) -> str:
        """Say where a defence has other seeds than most, and how those ended that came to no good end."""
        counts = Counter(LEFT if told is None else str(told["status"]) for _, told in kind.trials)
        bad = [f"{count} {how}" for how, count in counts.items() if how not in GOOD]
        few = [plural(len(kind.counted), "seed")] if kind.counted and len(kind.counted) != self.seeds else []
        return "".join(f", {said}" for said in (*few, *bad))


def accuracy(kind: TrainingGroup) -> str:
    """Write the accuracy of a defence, with its standard deviation over the seeds."""
    mean, wide = kind.mean("accuracy"), kind.deviation
    return DASH if mean is None else f"{100 * mean:.2f}%" + ("" if wide is None else f" ± {100 * wide:.2f}")


def rounds(kind: TrainingGroup) -> str:
    """Write how many rounds a defence was trained for: the fewest and the most of its seeds."""
    found = sorted({int(told["rounds"]) for told in kind.counted})
    return f"{found[0]}–{found[-1]}" if len(found) > 1 else "".join(map(str, found))


def gap(kind: TrainingGroup) -> str:
    """Write what a defence costs in points: the mean of its seeds' differences to none, and how far those lie apart."""
    found = [100 * one for one in kind.differences]
    wide = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{fmean(found):+.2f}{wide}".replace("-", "−") if found else ""


def fewer(kind: TrainingGroup) -> str:
    """Say over how many seeds the difference to none is, where that is not all of them: others have none as long."""
    pairs = len(kind.differences)
    return f" ({plural(pairs, 'seed')})" if 0 < pairs < len(kind.counted) else ""


def tables(trainings: Sequence[StoredTraining]) -> list[Table]:
    """Make a table of each setting there is in these trainings; those with two answers to one question are refused."""
    groups: dict[str, list[StoredTraining]] = {}
    for training in trainings:
        groups.setdefault(json.dumps(_setting(training), sort_keys=True), []).append(training)
    refuse([problem for group in groups.values() for problem in (*_twice(group), *_deltas(group))])
    titles = _titles([group[0] for group in groups.values()])
    every = zip(titles, groups.values(), strict=True)
    found = [Table(title, group[0].config, _joined(group)) for title, group in every]
    return [table for table in found if any(kind.counted for kind in table.kinds)]


def _setting(training: StoredTraining) -> dict[str, Any]:
    """Say in what runs have to be alike; of what lies in files, what it is: names say nothing of it."""
    config = training.config
    settings = {key: value for key, value in config.resolved().items() if key not in _BESIDE | {*config.growing}}
    return settings | contents(training.info)


def _joined(group: Sequence[StoredTraining]) -> Trials:
    """List the trials of runs that go together; one that a run left undone and another did is done."""
    found: dict[TrainingTrial, Told | None] = {}
    written: dict[str, str] = {}
    for training in group:
        for (trial, told), (own, _) in zip(_named(training), training.trials, strict=True):
            found[trial] = told or found.get(trial)
            written.setdefault(trial.defence, own.defence)
    return [(replace(trial, defence=written[trial.defence]), told) for trial, told in found.items()]


def _named(training: StoredTraining) -> Trials:
    """Give a defence the same text however it was written."""
    return [(replace(trial, defence=_canonical(trial.defence)), told) for trial, told in training.trials]


def _canonical(text: str) -> str:
    try:
        return parse(text).name
    except GradveilError:  # a user's own, which is not imported for a table
        return text


def _deltas(group: Sequence[StoredTraining]) -> Iterator[Problem]:
    owners: dict[float, StoredTraining] = {}
    for training in group:
        for _, told in training.trials:
            if told is not None and told["epsilon"]:
                owners.setdefault(told["delta"], training)
    for delta, training in [*owners.items()][1:]:
        usual, first = next(iter(owners.items()))
        said = f"tells epsilons for a delta of {delta:g}, and {first.path} for one of {usual:g}"
        yield Problem(str(training.path), said, f"run it again with --set delta={usual:g}: it trains nothing anew")


def _twice(group: Sequence[StoredTraining]) -> Iterator[Problem]:
    owners: dict[Any, StoredTraining] = {}
    for training in group:
        for trial, told in _named(training):
            first = training if told is None else owners.setdefault(trial, training)
            if first is not training:
                said = f"has '{trial.title}' with seed {trial.seed}, and so has {first.path}"
                yield Problem(str(training.path), said, "leave one of them out, or make a table of each")


def _titles(trainings: Sequence[StoredTraining]) -> list[str]:
    """Say what each setting is; where words do not tell them apart, with the settings that do."""
    return told_apart([what(training.config) for training in trainings], [*map(_setting, trainings)])


def training_page(folder: Path) -> str:
    """Render the training in a folder as HTML. Every text of it is escaped."""
    return render("training.html.j2", ("page.js", "axes.js", "curves.js"), context(load_training(folder)))


def context(training: StoredTraining) -> dict[str, Any]:
    """Work out everything the template shows."""
    every, config = kinds(training.trials), training.config
    failed = [(trial, told) for trial, told in training.trials if told is not None and told["status"] == FAILED]
    drawn = lines(every)
    return {
        "name": config.name,
        "version": training.info.get("gradveil", ""),
        "date": str(training.info.get("created", "")).replace("T", " ")[:16],
        "what": what(config),
        "cards": cards(every, training),
        "failed": failed,
        "idle": idle(every),
        "left": sum(told is None for _, told in training.trials),
        "kinds": every,
        "seeds": config.seeds,
        "shares": _shares(every),
        "proofs": proofs(every),
        "meaningless": MEANINGLESS,
        "drawn": drawn,
        "validated": any(point["loss"] is not None for line in drawn for point in line["points"]),
        "rows": list(rows(training.trials)),
        "csv": data_uri(as_csv(rows(training.trials)).encode(), "text/csv;charset=utf-8"),
        "rounds_csv": data_uri(as_csv(training_rounds(training.trials), ROUNDS).encode(), "text/csv;charset=utf-8"),
        "command": training.info.get("command", ""),
        "config": json.dumps(training.info["config"], indent=2, ensure_ascii=False),
        "data": {"lines": drawn},
        "duration": duration,
        "points": _points,
    }


def _points(share: float) -> str:
    """Write a difference of shares in percentage points.

    >>> _points(-0.0123), _points(0.4)
    ('−1.2', '+40.0')
    """
    return f"{100 * share:+.1f}".replace("-", "−")


def cards(every: Sequence[TrainingGroup], training: StoredTraining) -> list[dict[str, str]]:
    """Choose the key numbers: the accuracy without a defence, the dearest and the cheapest defence, what was run."""
    found = []
    sound = [kind for kind in every if kind.values("accuracy") and not kind.diverged]
    bare = next((kind for kind in sound if kind.name == "none"), None)
    known = [kind for kind in sound if kind.name not in ("none", "central")]
    if bare is not None:
        found.append(_card("Accuracy without a defence", percent(bare.mean("accuracy")), _spread(bare)))
    if known:
        best = max(known, key=lambda kind: kind.mean("accuracy") or 0.0)
        found.append(_card("Most accurate defence", percent(best.mean("accuracy")), f"{best.name} · {_spread(best)}"))
        sent = min(known, key=lambda kind: kind.mean("bytes_up") or 0.0)
        share = _share(sent.mean("bytes_up"), bare.mean("bytes_up") if bare else None)
        found.append(_card("Fewest bytes sent a round", size(sent.mean("bytes_up")), f"{sent.name}{share}"))
    done = sum(told is not None and told["status"] in GOOD for _, told in training.trials)
    rounds = f"{plural(training.config.rounds, 'round')} each, {plural(len(training.config.seeds), 'seed')}"
    found.append(_card("Trainings finished", f"{done} of {len(training.trials)}", rounds))
    return found


def _card(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail, "level": ""}


def _spread(kind: TrainingGroup) -> str:
    if kind.deviation is None:
        return plural(len(kind.values("accuracy")), "seed")
    return f"± {100 * kind.deviation:.1f} points over {plural(len(kind.values('accuracy')), 'seed')}"


def _share(own: float | None, bare: float | None) -> str:
    return f" · {percent(own / bare)} of those without a defence" if own is not None and bare else ""


def _shares(every: Sequence[TrainingGroup]) -> dict[str, dict[str, float]]:
    """Scale the bars of the table: every mean as a share of the largest."""
    found: dict[str, dict[str, float]] = {}
    for key in ("bytes_up", "bytes_down", "seconds"):
        means = {kind.name: value for kind in every if (value := kind.mean(key)) is not None}
        top = max(means.values(), default=0.0)
        found[key] = {name: value / top if top else 0.0 for name, value in means.items()}
    return found
