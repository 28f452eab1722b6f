"""Leak against a cost, with 95% intervals and the front of the defences that none other beats in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from gradveil.audit.defence_costs import joined
from gradveil.core.errors import Problem
from gradveil.core.formatting import listing
from gradveil.federated.training_run import StoredTraining
from gradveil.metrics import wilson
from gradveil.report.figures.figure_data import AuditPanel, FigureChoices, Runs, spots_of, trainings_of
from gradveil.report.figures.figure_kinds import COSTS, MORE_IS_BETTER
from gradveil.report.figures.figure_style import QUIET, colour, marker
from gradveil.report.pareto import Span, Spot, front
from gradveil.runs.run_folder import noting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAY_LEAK_MORE = "hollow: may leak more"
"""The label of points that are only lower bounds."""
_SHARES = ("accuracy", "utility")
"""Costs that are shown in percent."""


@dataclass(frozen=True)
class FigurePoint:
    """A defence in the figure."""

    defence: str
    leak: Span
    """The leak with its interval."""
    cost: Span
    """The cost with its range over seeds."""
    may_leak_more: bool
    is_bound: bool


def pareto_points(panel: AuditPanel, trainings: Sequence[StoredTraining], metric: str, cost: str) -> list[FigurePoint]:
    """Return the defences that have this cost."""
    return [
        FigurePoint(spot.verdict.defence, _leak(spot, metric), _cost(spot, cost), spot.may_leak_more, spot.is_bound)
        for spot in spots_of(panel, trainings)
        if cost in spot.costs
    ]


def pareto_problems(panels: Sequence[AuditPanel], runs: Runs, cost: str | None) -> Iterator[Problem]:
    """Find a cost that no defence has, and trainings that fit no audit or do not compare."""
    known = _known(panels, runs)
    if cost is not None and cost not in known:
        measured = listing(key for key in COSTS if key in known) or "no cost"
        fix = f"choose from: {measured}; or add a training of the same model and data to the command"
        yield Problem("against", f"these runs have no {cost}", fix)
    if panels and runs.trainings:
        problems: list[Problem] = []
        with noting(problems):
            joined(runs.audits, runs.trainings)
        yield from problems


def _known(panels: Sequence[AuditPanel], runs: Runs) -> set[str]:
    return {key for panel in panels for spot in spots_of(panel, trainings_of(panel, runs)) for key in spot.costs}


def usual_cost(panels: Sequence[AuditPanel], runs: Runs) -> str:
    """Return the first cost that the defences have: accuracy where there is a training."""
    known = _known(panels, runs)
    return next((key for key in COSTS if key in known), "bytes")


def draw_pareto(
    axes: Axes, points: Sequence[FigurePoint], series: Sequence[str], choices: FigureChoices, metric: str, cost: str
) -> list[Any]:
    """Draw the points and their front; return the handles of the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    _draw_front(axes, points, cost)
    for point in points:
        place = series.index(point.defence)
        leak, low, high = point.leak
        mean, least, most = point.cost
        hollow = point.may_leak_more or point.is_bound
        axes.errorbar(
            mean,
            leak,
            yerr=[[max(0.0, leak - low)], [max(0.0, high - leak)]],
            xerr=[[mean - least], [most - mean]] if most > least else None,
            fmt=marker(place),
            color=colour(place),
            markerfacecolor="white" if hollow else colour(place),
            markeredgewidth=1.0,
            elinewidth=0.8,
            capsize=1.8,
            zorder=3,
        )
    if metric != "ssim":
        axes.set_ylim(-4, 104)
    axes.margins(x=0.08)
    if cost == "bytes":
        axes.xaxis.set_major_formatter(bytes_tick)
        axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    shown = [name for name in series if any(point.defence == name for point in points)]
    hollow = {point.defence for point in points if point.may_leak_more or point.is_bound}
    handles: list[Any] = []
    for name in shown:
        place = series.index(name)
        fill = "white" if name in hollow else colour(place)
        mark: dict[str, Any] = {"marker": marker(place), "color": colour(place), "markerfacecolor": fill}
        handles.append(Line2D([], [], linestyle="", **mark, label=_name(name, choices)))
    style: dict[str, Any] = {"linestyle": "", "marker": "o", "color": QUIET, "markerfacecolor": "white"}
    if any(point.may_leak_more and not point.is_bound for point in points):
        handles.append(Line2D([], [], **style, label=MAY_LEAK_MORE))
    if any(point.is_bound for point in points):
        handles.append(Line2D([], [], **style, label="hollow: upper bound"))
    return handles


def _draw_front(axes: Axes, points: Sequence[FigurePoint], cost: str) -> None:
    """Join the defences that no other beats in leak and cost by steps."""
    compared = [point for point in points if not point.is_bound]
    sign = -1 if cost in MORE_IS_BETTER else 1
    members = [compared[i] for i in front([(point.leak[0], sign * point.cost[0]) for point in compared])]
    line = sorted({(point.cost[0], point.leak[0]) for point in members})
    if len(line) > 1:
        where = "post" if sign > 0 else "pre"
        xs, ys = zip(*line, strict=True)
        axes.step(xs, ys, where=where, color=QUIET, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)


def _name(defence: str, choices: FigureChoices) -> str:
    label = choices.label(defence)
    return "No defence" if label == defence == "none" else label


def _cost(spot: Spot, cost: str) -> Span:
    mean, low, high = spot.costs[cost]
    return (100 * mean, 100 * low, 100 * high) if cost in _SHARES else (mean, low, high)


def _leak(spot: Spot, metric: str) -> Span:
    rows = [row for _, row in spot.verdict.seeds]
    if metric == "ssim":
        values = [value for row in rows for value in row.headlines]
        return fmean(values), fmean(values) - pstdev(values), fmean(values) + pstdev(values)
    if metric == "identifiable":
        return 100 * spot.rate, 100 * spot.bounds[0], 100 * spot.bounds[1]
    counts = [(getattr(row, metric), row.images) for row in rows]
    ends = [wilson(count, images) for count, images in counts]
    mean = fmean(count / images for count, images in counts)
    return 100 * mean, 100 * min(low for low, _ in ends), 100 * max(high for _, high in ends)


def bytes_tick(value: float, _: object) -> str:
    """Write a tick of bytes.

    >>> bytes_tick(0, None), bytes_tick(50_000, None), bytes_tick(2.5e6, None)
    ('0', '50 kB', '2.5 MB')
    """
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= power:
            return f"{value / power:g} {unit}"
    return f"{value:g}"
