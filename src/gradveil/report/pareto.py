"""Which defences are worth their cost in a training: leak against accuracy, bytes and time.

A defence leaks what the strongest attacker without secrets recovers, as its verdict says; of several seeds the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from gradveil.audit.findings import SCHEMA, Findings, sentence_of
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.run_directory import UNFIT, Trial
from gradveil.audit.verdict import Verdict, verdicts
from gradveil.core.formatting import DASH, listing, number, percent, plural, size
from gradveil.metrics import wilson

Point = Sequence[float]
"""What is to be kept small, one number a respect."""


def dominates(one: Point, other: Point) -> bool:
    """Say whether a point is nowhere larger than another, and somewhere smaller. Equal points leave each other alone.

    >>> dominates((1, 2), (1, 3)), dominates((1, 3), (2, 2)), dominates((1, 2), (1, 2))
    (True, False, False)
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def front(points: Sequence[Point]) -> list[int]:
    """Return the places of the points that none dominates, in order.

    >>> front([(0, 3), (1, 1), (2, 2), (3, 0), (1, 1)])
    [0, 1, 3, 4]
    """
    return [place for place, own in enumerate(points) if not any(dominates(other, own) for other in points)]


def beaten_by(points: Sequence[Point]) -> dict[int, list[int]]:
    """Return, for every point that is not on the front, the places of those on it that dominate it."""
    members = front(points)
    found = {place: [m for m in members if dominates(points[m], own)] for place, own in enumerate(points)}
    return {place: by for place, by in found.items() if by}


@dataclass(frozen=True)
class Axis:
    """A price: its key among a trial's facts about its training, its words, and whether more of it is better."""

    key: str
    title: str
    unit: str
    show: Any
    respect: str
    more_is_better: bool = False


def _seconds(value: float) -> str:
    return f"{number(value, 2)} s"


AXES = (
    Axis(
        "accuracy",
        "Accuracy",
        "at the end of the training: better to the right",
        percent,
        "accuracy",
        more_is_better=True,
    ),
    Axis("bytes", "Bytes a round", "sent by all clients, as encoded: better to the left", size, "bytes"),
    Axis("seconds", "Seconds a client", "to compute an update (median): better to the left", _seconds, "time"),
)
"""What a defence costs."""
Span = tuple[float, float, float]
"""The mean over the seeds, the lowest and the highest."""


@dataclass(frozen=True)
class Spot:
    """Where a defence stands at one stage of its training: what it leaks, and what it costs."""

    verdict: Verdict
    prices: Mapping[str, Span]
    failed: bool = False
    """Whether an attack on it failed: another may have recovered more."""
    whole: bool = True
    """Whether every stage has a rate: without one nobody knows where the defence leaks most."""

    @property
    def name(self) -> str:
        """What the defence is called."""
        return self.verdict.best.defence_name

    @property
    def stage(self) -> int:
        """The rounds of training before the attack."""
        return self.verdict.setting.trained or 0

    @property
    def rates(self) -> list[float]:
        """The share of images that the strongest attacker recovers and identifies, with each seed."""
        return [row.identifiable / row.images for _, row in self.verdict.seeds]

    @property
    def rate(self) -> float:
        """Their mean."""
        return fmean(self.rates)

    @property
    def bounds(self) -> tuple[float, float]:
        """From the lowest to the highest end of the seeds' Wilson intervals: seeds share targets and do not add up."""
        ends = [wilson(row.identifiable, row.images) for _, row in self.verdict.seeds]
        return min(low for low, _ in ends), max(high for _, high in ends)

    @property
    def is_bound(self) -> bool:
        """Whether all attackers were told secrets: an upper bound, which is neither on a front nor off it."""
        return self.verdict.best.attacker == "informed"

    @property
    def is_vague(self) -> bool:
        """Whether more may be recovered: nobody attacked who knows the defence, or an attack is in doubt or failed."""
        return self.verdict.level in ("not tested", "inconclusive") or bool(self.verdict.warning) or self.failed

    def point(self, axes: Sequence[Axis]) -> tuple[float, ...] | None:
        """Return what is to be kept small, the leak first; None where a price is not known."""
        if self.is_bound or not self.whole or any(axis.key not in self.prices for axis in axes):
            return None
        costs = ((-1 if axis.more_is_better else 1) * self.prices[axis.key][0] for axis in axes)
        return self.rate, *costs


@dataclass(frozen=True)
class View:
    """All defences at one stage, or each at the stage where it leaks most."""

    title: str
    spots: tuple[Spot, ...]
    members: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The names on the front of each axis."""
    beaten: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict[str, Mapping[str, list[str]]])
    """Of each axis: who is dominated, and by whom."""

    def sentence(self, axis: Axis) -> str:
        """Name the front of an axis, and who is dominated by whom."""
        members = [spot.name for spot in self.spots if spot.name in self.members[axis.key]]
        if not members:
            return "No defence has both a rate and a price."
        lost = self.beaten[axis.key]
        bounds = [spot.name for spot in self.spots if spot.is_bound]
        dominated = f"Dominated: {_grouped(lost)}." if lost else "Nothing is dominated."
        told = [f"On the front: {listing(members)}.", dominated]
        told += [f"Upper bounds, not compared: {listing(bounds)}."] if bounds else []
        partly = [spot.name for spot in self.spots if not spot.whole]
        told += [f"Without a rate at some round, not compared: {listing(partly)}."] if partly else []
        vague = [s.name for s in self.spots if s.is_vague and s.name in self.members[axis.key]]
        told += [f"More may come out of {listing(vague)}, see the verdicts: this front may flatter."] if vague else []
        return " ".join(told)


@dataclass(frozen=True)
class ParetoChart:
    """One setting with its views: the worst stage of each defence first, then every stage."""

    setting: TrialSetting
    views: tuple[View, ...]
    missing: tuple[tuple[str, str], ...]
    """Defences without any rate, and why."""
    stages: Mapping[str, Mapping[int, Spot]]
    """Of each defence the stages that have a rate."""

    @property
    def worst(self) -> View:
        """Each defence where it leaks most."""
        return self.views[0]

    @property
    def overall(self) -> str:
        """Say who is beaten in every respect at once."""
        axes = [axis for axis in AXES if any(axis.key in spot.prices for spot in self.worst.spots)]
        lost = _compare(self.worst.spots, axes)[1]
        respects = listing(["leak", *(axis.respect for axis in axes)])
        if not lost:
            return f"No defence is beaten in {respects} at once."
        return f"Beaten in {respects} at once: {_grouped(lost)}."

    def trail(self, spot: Spot) -> list[str]:
        """List what a defence leaks at every stage; where its attacks failed or are not done, no rate."""
        own = self.stages[spot.name]
        every = sorted({stage for of_each in self.stages.values() for stage in of_each})
        return [f"{percent(own[stage].rate) if stage in own else 'no rate'} {when(stage)}" for stage in every]


def charts(judged: Sequence[Verdict], empty: Sequence[Trial], config: Mapping[str, Any]) -> list[ParetoChart]:
    """Build the charts of an audit that follows a training, one a setting whatever the round; none of another audit.

    `empty` are the trials without a result: attacks that failed, or do not apply.
    """
    trained = [verdict for verdict in judged if verdict.setting.trained is not None]
    failed = [Row(place, trial) for place, trial in enumerate(empty) if trial.broken]
    broken = {(row.setting, row.defence) for row in failed}
    found = []
    for setting in dict.fromkeys(verdict.setting._replace(trained=None) for verdict in trained):
        here = [verdict for verdict in trained if verdict.setting._replace(trained=None) == setting]
        prices = _prices([row for verdict in here for row in verdict.rows])
        spots = [
            Spot(verdict, prices[verdict.best.defence], (verdict.setting, verdict.best.defence) in broken)
            for verdict in here
        ]
        first = {s.name: min(row.number for row in s.verdict.rows) for s in sorted(spots, key=lambda s: -s.stage)}
        names = sorted(first, key=lambda name: first[name])
        stages = {name: {s.stage: s for s in sorted(spots, key=lambda s: s.stage) if s.name == name} for name in names}
        every = {spot.stage for spot in spots}
        worst = [max(of_each.values(), key=lambda s: (s.rate, s.verdict.best.asr)) for of_each in stages.values()]
        views = [_view("Worst round", [replace(s, whole=stages[s.name].keys() == every) for s in worst])]
        for stage in sorted(every):
            views.append(_view(when(stage).capitalize(), [of[stage] for of in stages.values() if stage in of]))
        left = tuple(_missing({row.defence for verdict in here for row in verdict.rows}, empty, config))
        found.append(ParetoChart(setting, tuple(views), left, stages))
    return found


def _grouped(lost: Mapping[str, Sequence[str]]) -> str:
    """Say who is dominated by whom, those with the same masters together.

    >>> _grouped({"a": ["x"], "b": ["x"], "c": ["x", "y"]})
    'a and b, by x; c, by x and y'
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, by in lost.items():
        groups.setdefault(tuple(by), []).append(name)
    return "; ".join(f"{listing(names)}, by {listing(by)}" for by, names in groups.items())


def when(stage: int) -> str:
    """Say after how many rounds clients were attacked."""
    return f"after {plural(stage, 'round')}" if stage else "untrained"


def _view(title: str, spots: Sequence[Spot]) -> View:
    compared = {axis.key: _compare(spots, (axis,)) for axis in AXES}
    members = {key: found[0] for key, found in compared.items()}
    return View(title, tuple(spots), members, {key: found[1] for key, found in compared.items()})


def _compare(spots: Sequence[Spot], axes: Sequence[Axis]) -> tuple[frozenset[str], dict[str, list[str]]]:
    """Find the names on the front, and who is dominated by whom."""
    known = [(spot.name, point) for spot in spots if (point := spot.point(axes)) is not None]
    names, points = [name for name, _ in known], [point for _, point in known]
    lost = {names[place]: [names[other] for other in by] for place, by in beaten_by(points).items()}
    return frozenset(names[place] for place in front(points)), lost


def _prices(rows: Sequence[Row]) -> dict[str, dict[str, Span]]:
    """Collect what the training of each defence costs, over its seeds."""
    found: dict[str, dict[str, Span]] = {}
    for defence in dict.fromkeys(row.defence for row in rows):
        # Of each seed the latest look at it: an earlier version told the accuracy of that round alone.
        latest: dict[int, Mapping[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row.setting.trained or 0):
            if row.defence == defence and row.info.get("training"):
                latest[row.seed] = row.info["training"]
        told = {
            "accuracy": [facts.get("final_accuracy", facts["accuracy"]) for facts in latest.values()],
            "bytes": [facts["bytes_up"] for facts in latest.values()],
            "seconds": [
                facts["client_seconds"] for facts in latest.values() if facts.get("client_seconds") is not None
            ],
        }
        found[defence] = {key: (fmean(values), min(values), max(values)) for key, values in told.items() if values}
    return found


def _missing(there: set[str], empty: Sequence[Trial], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for defence in config.get("defences") or ():
        if defence not in there:
            own = [trial for trial in empty if trial.info["defence"] == defence]
            failed = dict.fromkeys(str(trial.failed) for trial in own if trial.broken)
            unmet = f"attacked by nobody ({UNFIT}: {listing(dict.fromkeys(trial.info['attack'] for trial in own))})"
            yield defence, f"failed: {'; '.join(failed)}" if failed else unmet if own else "not done yet"


def section(found: Sequence[ParetoChart], rows: Sequence[Row]) -> dict[str, Any]:
    """Say what the page's template shows of these charts."""
    return {"fronts": found, "axes": AXES, "price": price, "many_seeds": len({row.seed for row in rows}) > 1}


def price(spot: Spot, axis: Axis) -> tuple[str, str]:
    """Write a price, and its spread over the seeds where there is one."""
    if axis.key not in spot.prices:
        return DASH, ""
    mean, low, high = (axis.show(value) for value in spot.prices[axis.key])
    return mean, f"{low} to {high}" if low != high else ""


def marks(rows: Sequence[Row]) -> dict[tuple[TrialSetting, str], str]:
    """Name the fronts that each defence is on, where it leaks most, by its setting whatever the round."""
    found: dict[tuple[TrialSetting, str], str] = {}
    for chart in charts(verdicts(rows), (), {}):
        for spot in chart.worst.spots:
            on = [axis.key for axis in AXES if spot.name in chart.worst.members[axis.key]]
            off = "upper bound" if spot.is_bound else "dominated" if spot.whole else "a round without a rate"
            found[chart.setting, spot.verdict.best.defence] = ", ".join(on) or off
    return found


def mark(row: Row, found: Mapping[tuple[TrialSetting, str], str]) -> str | None:
    """Look up the fronts of a row's defence; None where nothing was trained, or nothing is known."""
    return found.get((row.setting._replace(trained=None), row.defence)) if row.setting.trained is not None else None


def as_object(found: Sequence[Findings]) -> dict[str, Any]:
    """Return what `gradveil summary --json` prints of these runs."""
    return {
        "schema": SCHEMA,
        "verdict": sentence_of(found),
        "settings": [entry for each in found for entry in each.settings],
        "trials": [entry for each in found for entry in trials_with_fronts(each)],
    }


def trials_with_fronts(found: Findings) -> list[dict[str, Any]]:
    """Sum every trial up, with `pareto`: the fronts that its defence is on, or why it is on none."""
    fronts = marks([row for row in found.finished if row.trial.unscored is None])
    return [
        {**told, "pareto": mark(row, fronts) if row.trial.failed is None and not row.is_control else None}
        for row, told in zip(found.rows, found.trials, strict=True)
    ]
