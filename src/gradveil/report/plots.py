"""Data of the interactive plots: leak against cost, quality against iterations, curves over rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from statistics import fmean
from typing import Any

from gradveil.audit.attack_check import examine
from gradveil.audit.result_rows import BudgetPoint, Row, TrialSetting
from gradveil.audit.verdict import LEVELS, Verdict
from gradveil.core.formatting import interval, listing, number, percent, size
from gradveil.federated.training_groups import TrainingGroup
from gradveil.report.pareto import ParetoChart, Spot, View, cost, when


def training_curves(groups: Sequence[TrainingGroup]) -> list[dict[str, Any]]:
    """Describe the curves for the page's script; a defence keeps its colour if an earlier one has no curve."""
    return [
        {"series": series_number, "name": group.name, "points": list(_points(group)), "best": list(_best(group))}
        for series_number, group in enumerate(groups)
        if any(summary["curve"] for summary in group.completed)
    ]


def _points(group: TrainingGroup) -> Iterator[dict[str, Any]]:
    """Average the seeds that reached each round; the model before the first round is round 0."""
    starts = [summary["start"]["accuracy"] for summary in group.completed if summary["start"]]
    if starts:
        yield {"round": 0, "sent": 0, "loss": None, "seeds": len(starts), **_band("accuracy", starts)}
    for index in range(max(len(summary["curve"]) for summary in group.completed)):
        curves = [summary["curve"] for summary in group.completed if len(summary["curve"]) > index]
        points = [curve[index] for curve in curves]
        losses = [point["validation_loss"] for point in points if point["validation_loss"] is not None]
        yield {
            "round": points[0]["number"],
            "sent": fmean(list(accumulate(point["bytes_up"] for point in curve))[index] for curve in curves),
            "seeds": len(points),
            **_band("accuracy", [point["accuracy"] for point in points]),
            **_band("loss", losses),
            "lines": [f"round {points[0]['number']}", *_tooltip(points, losses)],
        }


def _band(key: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean over the seeds, the lowest and the highest value."""
    if not values:
        return dict.fromkeys((key, f"{key}_low", f"{key}_high"))
    return {key: fmean(values), f"{key}_low": min(values), f"{key}_high": max(values)}


def _tooltip(points: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Iterator[str]:
    shares = [point["accuracy"] for point in points]
    several = f" ({percent(min(shares))} to {percent(max(shares))} of {len(shares)} seeds)" if len(shares) > 1 else ""
    yield f"accuracy {percent(fmean(shares))}{several}"
    if losses:
        yield f"validation loss {number(fmean(losses))}"
    up, down = (fmean(point[key] for point in points) for key in ("bytes_up", "bytes_down"))
    yield f"{size(up)} sent, {size(down)} received, {fmean(point['seconds'] for point in points):.1f} s"


def _best(group: TrainingGroup) -> Iterator[dict[str, Any]]:
    """Mark the round whose parameters each seed keeps."""
    for summary in group.completed:
        if best := summary["best_round"]:
            point = summary["curve"][best - 1]
            yield {
                "round": point["number"],
                "sent": sum(earlier["bytes_up"] for earlier in summary["curve"][:best]),
                "accuracy": point["accuracy"],
                "loss": point["validation_loss"],
                "lines": [f"seed {summary['seed']}: best round {point['number']}", *_tooltip([point], _known(point))],
            }


def _known(point: Mapping[str, Any]) -> list[float]:
    return [] if point["validation_loss"] is None else [point["validation_loss"]]


def series(rows: Sequence[Row]) -> dict[str, int]:
    """Assign each defence its index in the run's order: one colour and shape in all plots."""
    return {name: index for index, name in enumerate(dict.fromkeys(row.defence for row in rows))}


def fronts(charts: Sequence[ParetoChart], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Describe the charts for the page's script; a defence has the same colour as in the other plots."""
    numbers = series(rows)
    return [
        {
            "axes": [{"key": axis.key, "title": axis.title} for axis in chart.axes],
            "views": [
                {
                    "sentences": {axis.key: view.sentence(axis) for axis in chart.axes},
                    "spots": [_spot(spot, view, chart, numbers) for spot in view.spots],
                }
                for view in chart.views
            ],
        }
        for chart in charts
    ]


def _spot(spot: Spot, view: View, chart: ParetoChart, numbers: Mapping[str, int]) -> dict[str, Any]:
    best = spot.verdict.best
    stages = [*chart.stages[spot.name].items()]
    return {
        "series": numbers[best.defence],
        "name": spot.name,
        "undefended": best.undefended,
        "compared": not spot.is_bound and spot.is_complete,
        "may_leak_more": spot.may_leak_more,
        "rate": spot.rate,
        "bounds": spot.bounds,
        "costs": spot.costs,
        "front": {key: spot.name in names for key, names in view.members.items()},
        "trail": [[index / max(1, len(stages) - 1), each.rate] for index, (_, each) in enumerate(stages)]
        if view is chart.worst
        else [],
        "lines": list(_lines(spot, view, chart)),
    }


def _lines(spot: Spot, view: View, chart: ParetoChart) -> Iterator[str]:
    low, high = spot.bounds
    seeds = f", the mean of {len(spot.rates)} seeds" if len(spot.rates) > 1 else ""
    stage = f" {when(spot.stage)}" if spot.verdict.setting.trained is not None else ""
    yield f"{percent(spot.rate)} identifiable{stage}{seeds} ({interval(low, high)})"
    yield f"{LEVELS[spot.verdict.level][0]} · {spot.verdict.best.attack}"
    if view is chart.worst and len(chart.views) > 2:
        yield ", ".join(chart.trail(spot))
    yield " · ".join(f"{axis.title.lower()} {cost(spot, axis)[0]}" for axis in chart.axes)


RISING = 0.02
"""A curve that gains more mean SSIM than this in its last doubling is still rising."""


@dataclass(frozen=True)
class ProgressChart:
    """The curves of one setting: for every defence, the strongest attack that iterates."""

    setting: TrialSetting
    rows: tuple[Row, ...]
    passed_over: tuple[Verdict, ...]
    """Verdicts on defences whose strongest attack does not iterate."""
    short: tuple[Row, ...]
    """Curves of attacks that ended above the objective of the true images."""

    @property
    def advice(self) -> str:
        """Defences against which more iterations would likely help, and those against which they would not."""
        rising = [(row, gain) for row in self.rows if (gain := row.last_doubling) is not None and gain > RISING]
        level = [row for row in self.rows if all(row is not other for other, _ in rising)]
        stuck = [row for row in level if any(row is other for other in self.short)]
        other = "; restarts or another attack may" if stuck else ""
        if len(level) > len(stuck) > 0:
            other += f" {_where(stuck)}"
        metric = f"mean {self.rows[0].words.metric}"
        if not rising:
            flat = f"no {metric} rose by more than {RISING} in the last doubling"
            return f"More iterations would hardly help: {flat}{other}."
        where = _where([row for row, _ in rising])
        gains = listing(number(gain, 2) for _, gain in rising)
        rest = f", but hardly {_where(level)}{other}" if level else ""
        return f"More iterations would likely help {where} ({metric} rose by {gains} in the last doubling){rest}."

    @property
    def note(self) -> str:
        """Defences whose curve is not of the strongest attack."""
        if not self.passed_over:
            return ""
        attacks = listing(dict.fromkeys(verdict.best.attack for verdict in self.passed_over))
        where = _where([verdict.best for verdict in self.passed_over])
        return f"The strongest attack {where} ({attacks}) does not iterate: the curve is of the next strongest."

    @property
    def table(self) -> list[tuple[Row, list[BudgetPoint | None]]]:
        """The curves as numbers, at every share of the budget that any curve has."""
        width = max(len(row.curve) for row in self.rows)
        return [(row, [None] * (width - len(row.curve)) + list(row.curve)) for row in self.rows]

    @property
    def shares(self) -> list[str]:
        """Shares of the budget, the column titles of the table: every point is at half the budget of the next."""
        width = max(len(row.curve) for row in self.rows)
        return [str(Fraction(1, 2**halving)) for halving in reversed(range(width))]


def progress_charts(judged: Sequence[Verdict]) -> list[ProgressChart]:
    """Choose the curves: one chart per setting, none for a setting without an attack that iterates."""
    result = []
    for setting in dict.fromkeys(verdict.setting for verdict in judged):
        here = [verdict for verdict in judged if verdict.setting == setting]
        best = [(verdict, next((row for row in verdict.judged if row.curve), None)) for verdict in here]
        rows = tuple(row for _, row in best if row is not None)
        if rows:
            over = tuple(verdict for verdict, row in best if row is not None and row is not verdict.best)
            every = [row for verdict in here for row in verdict.rows]
            short = tuple(row for row in rows if examine(row, every).state == "under-optimised")
            result.append(ProgressChart(setting, rows, over, short))
    return result


def curves(charts: Sequence[ProgressChart], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Describe the charts for the page's script; a defence has the same colour as in the other plots."""
    numbers = series(rows)
    return [
        {
            "baseline": {
                "asr": _baseline(chart.rows, "asr"),
                "score": _baseline(chart.rows, f"{chart.rows[0].words.headline}_mean"),
            },
            "lines": [
                {
                    "series": numbers[row.defence],
                    "name": row.defence_name,
                    "attack": row.attack,
                    "points": [{**point._asdict(), "lines": list(_progress(row, point))} for point in row.curve],
                }
                for row in chart.rows
            ],
        }
        for chart in charts
    ]


def _progress(row: Row, point: BudgetPoint) -> Iterator[str]:
    total = row.curve[-1].iterations
    yield f"after {point.iterations:,} iterations" + ("" if point.iterations == total else f" of {total:,}")
    yield f"mean {row.words.metric} {number(point.score)} · {percent(point.asr)} recovered"


def _baseline(rows: Sequence[Row], score: str) -> float | None:
    values = [row.baseline_of(score) for row in rows]
    return max((value for value in values if value is not None), default=None)


def _where(rows: Sequence[Row]) -> str:
    undefended = ["without a defence"] if any(row.undefended for row in rows) else []
    names = [row.defence for row in rows if not row.undefended]
    return listing([*undefended, f"against {listing(names)}"] if names else undefended)
