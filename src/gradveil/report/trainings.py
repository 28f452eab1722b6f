"""Defences down, what each costs across: the table of a paper, from one training or several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.words import DASH, plural, size
from gradveil.defences import parse
from gradveil.federated.config import FREE, TrainConfig
from gradveil.federated.reading import Training
from gradveil.federated.setting import Cell
from gradveil.report.kinds import GOOD, LEFT, Cells, Kind, Told, idle, kinds, what
from gradveil.report.settings import contents, told_apart
from gradveil.report.sheet import Sheet, Text

_BESIDE = {"name", "device", *FREE}
"""Settings that make no other table; how many rounds there were, its rows say."""


@dataclass(frozen=True)
class Table:
    """The trainings of one setting: alike in all but defences, seeds and how long they went."""

    title: str
    config: TrainConfig
    cells: Cells

    @cached_property
    def kinds(self) -> list[Kind]:
        """The defences with their seeds."""
        return kinds(self.cells)

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

    def sheet(self) -> Sheet:
        """Lay it out; what is proven has a column where there is an epsilon."""
        private = any(kind.worst and kind.worst["epsilon"] for kind in self.kinds)
        titles = ("defence", "accuracy", "to none", "best round", "rounds", "sent a round", "received a round")
        rows = [[*self._row(kind), *([Text(kind.proof)] if private else [])] for kind in self.kinds]
        return Sheet(self.caption(), [Text(title) for title in (*titles, *(["proven"] if private else []))], rows)

    def _row(self, kind: Kind) -> list[Text]:
        return [
            Text(kind.name, code=True),
            Text(accuracy(kind), self._beside(kind)),
            Text(gap(kind), fewer(kind)),
            Text(kind.best_rounds if kind.counted else ""),
            Text(rounds(kind)),
            *(Text(size(mean) if (mean := kind.mean(key)) is not None else "") for key in ("bytes_up", "bytes_down")),
        ]

    def _beside(self, kind: Kind) -> str:
        """Say where a defence has other seeds than most, and how those ended that came to no good end."""
        counts = Counter(LEFT if told is None else str(told["status"]) for _, told in kind.cells)
        bad = [f"{count} {how}" for how, count in counts.items() if how not in GOOD]
        few = [plural(len(kind.counted), "seed")] if kind.counted and len(kind.counted) != self.seeds else []
        return "".join(f", {said}" for said in (*few, *bad))


def accuracy(kind: Kind) -> str:
    """Write the accuracy of a defence, with its standard deviation over the seeds."""
    mean, wide = kind.mean("accuracy"), kind.deviation
    return DASH if mean is None else f"{100 * mean:.2f}%" + ("" if wide is None else f" ± {100 * wide:.2f}")


def rounds(kind: Kind) -> str:
    """Write how many rounds a defence was trained for: the fewest and the most of its seeds."""
    found = sorted({int(told["rounds"]) for told in kind.counted})
    return f"{found[0]}–{found[-1]}" if len(found) > 1 else "".join(map(str, found))


def gap(kind: Kind) -> str:
    """Write what a defence costs in points: the mean of its seeds' differences to none, and how far those lie apart."""
    found = [100 * one for one in kind.differences]
    wide = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{fmean(found):+.2f}{wide}".replace("-", "−") if found else ""


def fewer(kind: Kind) -> str:
    """Say over how many seeds the difference to none is, where that is not all of them: others have none as long."""
    pairs = len(kind.differences)
    return f" ({plural(pairs, 'seed')})" if 0 < pairs < len(kind.counted) else ""


def tables(trainings: Sequence[Training]) -> list[Table]:
    """Make a table of each setting there is in these trainings; those with two answers to one question are refused."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        groups.setdefault(json.dumps(_setting(training), sort_keys=True), []).append(training)
    refuse([problem for group in groups.values() for problem in (*_twice(group), *_deltas(group))])
    titles = _titles([group[0] for group in groups.values()])
    every = zip(titles, groups.values(), strict=True)
    found = [Table(title, group[0].config, _joined(group)) for title, group in every]
    return [table for table in found if any(kind.counted for kind in table.kinds)]


def _setting(training: Training) -> dict[str, Any]:
    """Say in what runs have to be alike; of what lies in files, what it is: names say nothing of it."""
    config = training.config
    settings = {key: value for key, value in config.resolved().items() if key not in _BESIDE | {*config.growing}}
    return settings | contents(training.info)


def _joined(group: Sequence[Training]) -> Cells:
    """List the cells of runs that go together; one that a run left undone and another did is done."""
    found: dict[Cell, Told | None] = {}
    written: dict[str, str] = {}
    for training in group:
        for (cell, told), (own, _) in zip(_named(training), training.cells, strict=True):
            found[cell] = told or found.get(cell)
            written.setdefault(cell.defence, own.defence)
    return [(replace(cell, defence=written[cell.defence]), told) for cell, told in found.items()]


def _named(training: Training) -> Cells:
    """Give a defence the same text however it was written."""
    return [(replace(cell, defence=_canonical(cell.defence)), told) for cell, told in training.cells]


def _canonical(text: str) -> str:
    try:
        return parse(text).name
    except GradveilError:  # a user's own, which is not imported for a table
        return text


def _deltas(group: Sequence[Training]) -> Iterator[Problem]:
    owners: dict[float, Training] = {}
    for training in group:
        for _, told in training.cells:
            if told is not None and told["epsilon"]:
                owners.setdefault(told["delta"], training)
    for delta, training in [*owners.items()][1:]:
        usual, first = next(iter(owners.items()))
        said = f"tells epsilons for a delta of {delta:g}, and {first.path} for one of {usual:g}"
        yield Problem(str(training.path), said, f"run it again with --set delta={usual:g}: it trains nothing anew")


def _twice(group: Sequence[Training]) -> Iterator[Problem]:
    owners: dict[Any, Training] = {}
    for training in group:
        for cell, told in _named(training):
            first = training if told is None else owners.setdefault(cell, training)
            if first is not training:
                said = f"has '{cell.title}' with seed {cell.seed}, and so has {first.path}"
                yield Problem(str(training.path), said, "leave one of them out, or make a table of each")


def _titles(trainings: Sequence[Training]) -> list[str]:
    """Say what each setting is; where words do not tell them apart, with the settings that do."""
    return told_apart([what(training.config) for training in trainings], [*map(_setting, trainings)])
