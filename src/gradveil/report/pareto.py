"""Pareto fronts of defences: leak against what a training says of accuracy, bytes and time, or the bytes of an update.

The leak of a defence is the rate of its verdict: the strongest attacker that knows no client secrets, mean over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from gradveil.audit.attack_selection import canonical
from gradveil.audit.baselines import interval_of
from gradveil.audit.defence_costs import Costs
from gradveil.audit.findings import SCHEMA, Findings, sentence_of
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.run_directory import Trial
from gradveil.audit.verdict import Verdict
from gradveil.core.formatting import DASH, listing, number, percent, plural, size
from gradveil.federated.training_groups import proven

Point = Sequence[float]
"""Quantities to minimise, one per criterion."""


def dominates(one: Point, other: Point) -> bool:
    """Return whether a point is nowhere larger than another and smaller somewhere. Equal points do not dominate.

    >>> dominates((1, 2), (1, 3)), dominates((1, 3), (2, 2)), dominates((1, 2), (1, 2))
    (True, False, False)
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def front(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that no other point dominates, in order.

    >>> front([(0, 3), (1, 1), (2, 2), (3, 0), (1, 1)])
    [0, 1, 3, 4]
    """
    return [index for index, point in enumerate(points) if not any(dominates(other, point) for other in points)]


def dominators(points: Sequence[Point]) -> dict[int, list[int]]:
    """Return, for every point off the front, the indices of the members of the front that dominate it."""
    members = front(points)
    every = {index: [m for m in members if dominates(points[m], point)] for index, point in enumerate(points)}
    return {index: masters for index, masters in every.items() if masters}


@dataclass(frozen=True)
class Axis:
    """A cost: its key among a trial's facts about its training, its texts, and whether more of it is better."""

    key: str
    title: str
    unit: str
    show: Any
    criterion: str
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
    Axis("bytes", "Bytes per round", "sent by all clients, as encoded: better to the left", size, "bytes"),
    Axis("seconds", "Seconds per client", "to compute an update (median): better to the left", _seconds, "time"),
)
"""The costs of a defence over a training."""
UPDATE_AXES = (
    Axis("bytes", "Bytes per update", "as encoded: better to the left", size, "bytes"),
    Axis("distortion", "Update distortion", "relative L2 distance: better to the left", number, "distortion"),
)
"""The costs of a defence for one update, where nothing was trained."""
Span = tuple[float, float, float]
"""The mean over the seeds, the lowest and the highest."""


@dataclass(frozen=True)
class Spot:
    """Leak and costs of a defence at one stage of its training."""

    verdict: Verdict
    costs: Mapping[str, Span]
    failed: bool = False
    """Whether an attack on it failed, which may have recovered more."""
    is_complete: bool = True
    """Whether every stage has a rate, so that the worst stage is known."""
    proof: str = ""
    """What is proven of the training, in a few words; empty without a training."""

    @property
    def name(self) -> str:
        """The name of the defence."""
        return self.verdict.best.defence_name

    @property
    def stage(self) -> int:
        """The rounds of training before the attack."""
        return self.verdict.setting.trained or 0

    @property
    def rates(self) -> list[float]:
        """The share of images that the strongest attacker recovers and identifies, per seed."""
        return [row.identifiable / row.images for _, row in self.verdict.seeds]

    @property
    def rate(self) -> float:
        """The mean rate over the seeds."""
        return fmean(self.rates)

    @property
    def bounds(self) -> tuple[float, float]:
        """From the lowest to the highest end of the seeds' intervals: seeds share targets and do not add up."""
        ends = [interval_of(row, self.verdict.judged) for _, row in self.verdict.seeds]
        return min(low for low, _ in ends), max(high for _, high in ends)

    @property
    def is_bound(self) -> bool:
        """Whether every attacker knows client secrets: an upper bound, which is not compared."""
        return self.verdict.best.attacker == "informed"

    @property
    def may_leak_more(self) -> bool:
        """Whether the rate may be too low: no adaptive attack was run, or an attack is doubtful or failed."""
        return self.verdict.level in ("not tested", "inconclusive") or bool(self.verdict.warning) or self.failed

    def point(self, axes: Sequence[Axis]) -> tuple[float, ...] | None:
        """Return the quantities to minimise, the leak first; None where a cost is not known."""
        if self.is_bound or not self.is_complete or any(axis.key not in self.costs for axis in axes):
            return None
        costs = ((-1 if axis.more_is_better else 1) * self.costs[axis.key][0] for axis in axes)
        return self.rate, *costs


@dataclass(frozen=True)
class View:
    """All defences at one stage, or each at the stage where it leaks most."""

    title: str
    spots: tuple[Spot, ...]
    members: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The names on the front of each axis."""
    dominated: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict[str, Mapping[str, list[str]]])
    """For each axis: the dominated defences, each with the members that dominate it."""

    def sentence(self, axis: Axis) -> str:
        """List the members of the front of an axis, and the dominated defences."""
        members = [spot.name for spot in self.spots if spot.name in self.members[axis.key]]
        if not members:
            return "No defence has both a rate and a cost."
        dominated = self.dominated[axis.key]
        bounds = [spot.name for spot in self.spots if spot.is_bound]
        losers = f"Dominated: {_grouped(dominated)}." if dominated else "No defence is dominated."
        sentences = [f"On the front: {listing(members)}.", losers]
        sentences += [f"Upper bounds, not compared: {listing(bounds)}."] if bounds else []
        partly = [spot.name for spot in self.spots if not spot.is_complete]
        sentences += [f"Without a rate at some round, not compared: {listing(partly)}."] if partly else []
        vague = [s.name for s in self.spots if s.may_leak_more and s.name in self.members[axis.key]]
        sentences += (
            [f"These members may leak more than measured: {listing(vague)}; see the verdicts."] if vague else []
        )
        return " ".join(sentences)


@dataclass(frozen=True)
class ParetoChart:
    """One setting with its views: the worst stage of each defence first, then every stage."""

    setting: TrialSetting
    axes: tuple[Axis, ...]
    """The costs that are known."""
    views: tuple[View, ...]
    missing: tuple[tuple[str, str], ...]
    """Defences without any rate, each with the reason."""
    stages: Mapping[str, Mapping[int, Spot]]
    """For each defence, the stages that have a rate."""

    @property
    def worst(self) -> View:
        """Each defence at the stage where it leaks most."""
        return self.views[0]

    @property
    def view_titles(self) -> list[tuple[int, str]]:
        """Number the views for the buttons of the page."""
        return [(number, view.title) for number, view in enumerate(self.views)]

    @property
    def overall(self) -> str:
        """List the defences that another dominates in all criteria at once."""
        dominated = _compare(self.worst.spots, self.axes)[1]
        criteria = listing(["leak", *(axis.criterion for axis in self.axes)])
        if not dominated:
            return f"No defence is dominated in {criteria} at once."
        return f"Dominated in {criteria} at once: {_grouped(dominated)}."

    def trail(self, spot: Spot) -> list[str]:
        """List the rates of a defence at every stage; stages with failed or unfinished attacks have none."""
        rates = self.stages[spot.name]
        every = sorted({stage for of_each in self.stages.values() for stage in of_each})
        return [f"{percent(rates[stage].rate) if stage in rates else 'no rate'} {when(stage)}" for stage in every]


def charts(
    judged: Sequence[Verdict],
    empty: Sequence[Trial],
    config: Mapping[str, Any],
    measured: Costs = MappingProxyType({}),
) -> list[ParetoChart]:
    """Build the charts of an audit, one per setting over all rounds of a training.

    The audit attacks the clients of the training, or the training only measured costs (`measured`). `empty` are the
    trials without a result: attacks that failed, or do not apply.
    """
    failed = [Row(number, trial) for number, trial in enumerate(empty) if trial.broken]
    broken = {(row.setting, row.defence) for row in failed}
    result = []
    for setting in dict.fromkeys(verdict.setting._replace(trained=None) for verdict in judged):
        here = [verdict for verdict in judged if verdict.setting._replace(trained=None) == setting]
        rows = [row for verdict in here for row in verdict.rows]
        is_trained = any(row.info.get("training") for row in rows)
        costs: Mapping[str, Mapping[str, Span]]
        costs = _costs(rows) if is_trained else _measured(rows, measured) if measured else _update_costs(rows)
        axes = tuple(
            axis
            for axis in (AXES if is_trained or measured else UPDATE_AXES)
            if any(axis.key in of_each for of_each in costs.values())
        )
        if not axes:
            continue
        spots = [
            Spot(
                verdict,
                costs[verdict.best.defence],
                (verdict.setting, verdict.best.defence) in broken,
                proof=_proof(verdict, measured),
            )
            for verdict in here
        ]
        first = {s.name: min(row.number for row in s.verdict.rows) for s in sorted(spots, key=lambda s: -s.stage)}
        names = sorted(first, key=lambda name: first[name])
        stages = {name: {s.stage: s for s in sorted(spots, key=lambda s: s.stage) if s.name == name} for name in names}
        every = {spot.stage for spot in spots}
        worst = [max(of_each.values(), key=lambda s: (s.rate, s.verdict.best.asr)) for of_each in stages.values()]
        views = [_view("Worst round", [replace(s, is_complete=stages[s.name].keys() == every) for s in worst], axes)]
        for stage in sorted(every):
            views.append(_view(when(stage).capitalize(), [s[stage] for s in stages.values() if stage in s], axes))
        missing = tuple(_missing({row.defence for verdict in here for row in verdict.rows}, empty, config))
        result.append(ParetoChart(setting, axes, tuple(views), missing, stages))
    return result


def _grouped(dominated: Mapping[str, Sequence[str]]) -> str:
    """List dominated defences, those with the same dominators together.

    >>> _grouped({"a": ["x"], "b": ["x"], "c": ["x", "y"]})
    'a and b, by x; c, by x and y'
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, masters in dominated.items():
        groups.setdefault(tuple(masters), []).append(name)
    return "; ".join(f"{listing(names)}, by {listing(masters)}" for masters, names in groups.items())


def when(stage: int) -> str:
    """Return the stage of an attack in words."""
    return f"after {plural(stage, 'round')}" if stage else "untrained"


def _view(title: str, spots: Sequence[Spot], axes: Sequence[Axis]) -> View:
    compared = {axis.key: _compare(spots, (axis,)) for axis in axes}
    members = {key: names for key, (names, _) in compared.items()}
    return View(title, tuple(spots), members, {key: dominated for key, (_, dominated) in compared.items()})


def _compare(spots: Sequence[Spot], axes: Sequence[Axis]) -> tuple[frozenset[str], dict[str, list[str]]]:
    """Return the names on the front, and the dominated names with their dominators."""
    known = [(spot.name, point) for spot in spots if (point := spot.point(axes)) is not None]
    names, points = [name for name, _ in known], [point for _, point in known]
    dominated = {names[i]: [names[master] for master in masters] for i, masters in dominators(points).items()}
    return frozenset(names[i] for i in front(points)), dominated


def _proof(verdict: Verdict, measured: Costs) -> str:
    if (cost := measured.get(canonical(verdict.defence))) and verdict.setting.trained is None:
        return cost.proven
    facts = verdict.best.info.get("training") or verdict.best.info
    return proven(facts) if facts.get("guarantee") else ""


def _measured(rows: Sequence[Row], measured: Costs) -> dict[str, Mapping[str, Span]]:
    """Look up the costs of each defence in trainings next to the attacks."""
    found = {row.defence: measured.get(canonical(row.defence)) for row in rows}
    return {defence: cost.spans if cost else {} for defence, cost in found.items()}


def _costs(rows: Sequence[Row]) -> dict[str, dict[str, Span]]:
    """Collect the training costs of each defence over its seeds."""
    result: dict[str, dict[str, Span]] = {}
    for defence in dict.fromkeys(row.defence for row in rows):
        # The latest stage of each seed: an earlier version stored the accuracy of that round only.
        latest: dict[int, Mapping[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row.setting.trained or 0):
            if row.defence == defence and row.info.get("training"):
                latest[row.seed] = row.info["training"]
        values = {
            "accuracy": [facts.get("final_accuracy", facts["accuracy"]) for facts in latest.values()],
            "bytes": [facts["bytes_up"] for facts in latest.values()],
            "seconds": [
                facts["client_seconds"] for facts in latest.values() if facts.get("client_seconds") is not None
            ],
        }
        result[defence] = {key: (fmean(each), min(each), max(each)) for key, each in values.items() if each}
    return result


def _update_costs(rows: Sequence[Row]) -> dict[str, dict[str, Span]]:
    """Collect the costs of each defence for one update of the honest model, over its seeds."""
    result: dict[str, dict[str, Span]] = {}
    for defence in dict.fromkeys(row.defence for row in rows):
        mine = [row for row in rows if row.defence == defence]
        honest = {row.seed: row for row in [row for row in mine if not row.planted] or mine}
        result[defence] = {}
        for key, name in (("bytes", "bytes_sent"), ("distortion", "distance")):
            values = [float(row.info[name]) for row in honest.values() if row.info.get(name) is not None]
            if values:
                result[defence][key] = (fmean(values), min(values), max(values))
    return result


def _missing(present: set[str], empty: Sequence[Trial], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for defence in config.get("defences") or ():
        if defence not in present:
            trials = [trial for trial in empty if trial.info["defence"] == defence]
            failed = dict.fromkeys(str(trial.failed) for trial in trials if trial.broken)
            attacks = listing(dict.fromkeys(trial.info["attack"] for trial in trials))
            unfit = f"no attack applies: {attacks}"
            yield defence, f"failed: {'; '.join(failed)}" if failed else unfit if trials else "not done yet"


def section(fronts: Sequence[ParetoChart], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the values that the section of the page shows."""
    axes = {axis.key: axis for chart in fronts for axis in chart.axes}
    titles = [(axis.key, axis.title) for axis in axes.values()]
    return {
        "fronts": fronts,
        "axis_titles": titles,
        "cost": cost,
        "many_seeds": len({row.seed for row in rows}) > 1,
        "is_trained": any(row.info.get("training") for row in rows),
    }


def cost(spot: Spot, axis: Axis) -> tuple[str, str]:
    """Return a cost and its range over the seeds, empty where there is none."""
    if axis.key not in spot.costs:
        return DASH, ""
    mean, low, high = (axis.show(value) for value in spot.costs[axis.key])
    return mean, f"{low} to {high}" if low != high else ""


def fronts_by_defence(judged: Sequence[Verdict]) -> dict[tuple[TrialSetting, str], str]:
    """Return the fronts that each defence is on at its worst stage, by setting and defence."""
    result: dict[tuple[TrialSetting, str], str] = {}
    trained = [verdict for verdict in judged if verdict.setting.trained is not None]
    for chart in charts(trained, (), {}):
        for spot in chart.worst.spots:
            on = [axis.key for axis in chart.axes if spot.name in chart.worst.members[axis.key]]
            off = "upper bound" if spot.is_bound else "dominated" if spot.is_complete else "a round without a rate"
            result[chart.setting, spot.verdict.best.defence] = ", ".join(on) or off
    return result


def front_of(row: Row, fronts: Mapping[tuple[TrialSetting, str], str]) -> str | None:
    """Look up the fronts of a trial's defence; None without a training or a result."""
    return fronts.get((row.setting._replace(trained=None), row.defence)) if row.setting.trained is not None else None


def as_object(runs: Sequence[Findings]) -> dict[str, Any]:
    """Return the output of `gradveil summary --json` for these runs."""
    return {
        "schema": SCHEMA,
        "verdict": sentence_of(runs),
        "recommendation": _recommendation(runs),
        "settings": [entry for each in runs for entry in each.settings],
        "trials": [entry for each in runs for entry in trials_with_fronts(each)],
    }


def _recommendation(runs: Sequence[Findings]) -> dict[str, Any] | None:
    """Return what a run recommends; None for several runs, each of which has its own."""
    found = runs[0].recommendation if len(runs) == 1 else None
    return found and found.as_object()


def trials_with_fronts(run: Findings) -> list[dict[str, Any]]:
    """Summarise every trial; `pareto` holds the fronts that its defence is on, or the reason why it is on none."""
    fronts = fronts_by_defence(run.verdicts)
    return [
        {**trial, "pareto": front_of(row, fronts) if row.trial.failed is None and not row.is_control else None}
        for row, trial in zip(run.rows, run.trials, strict=True)
    ]
