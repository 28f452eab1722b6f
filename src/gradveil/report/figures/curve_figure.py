"""Quality against the attack's budget, with a band; of trainings accuracy or loss over the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import TYPE_CHECKING, Any

from gradveil.audit.result_rows import Row
from gradveil.core.errors import Problem
from gradveil.metrics import wilson
from gradveil.report.figures.figure_data import AuditPanel, FigureChoices, TrainingPanel
from gradveil.report.figures.figure_style import QUIET, colour, line, marker
from gradveil.report.plots import training_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CurvePoint = tuple[float, float, float | None, float | None]
"""Place, mean, and the ends of the band where there is one."""


@dataclass(frozen=True)
class FigureCurve:
    """A curve: the attack or the training with a defence."""

    defence: str
    attack: str
    points: Sequence[CurvePoint]


def progress_curves(panel: AuditPanel, metric: str, against: str) -> list[FigureCurve]:
    """Return a curve for each defence: that of the strongest attack that iterates, or of each chosen attack."""
    curves: list[FigureCurve] = []
    for defence, verdict in panel.verdicts.items():
        rows = [row for row in verdict.judged if row.curve]
        attacks = panel.choices.sort(row.attack for row in rows)
        shown = attacks if panel.choices.attacks else [row.attack for row in rows[:1]]
        for attack in shown:
            group = sorted((row for row in rows if row.attack == attack), key=lambda row: row.seed)
            curves.append(FigureCurve(defence, attack, _over_seeds(group, metric, against)))
    return curves


def _over_seeds(rows: Sequence[Row], metric: str, against: str) -> list[CurvePoint]:
    """Average the seeds at the points that all of them have, counted from the end: each halves the budget."""
    length = min(len(row.curve) for row in rows)
    return [_point(rows, -back, metric, against) for back in range(length, 0, -1)]


def _point(rows: Sequence[Row], place: int, metric: str, against: str) -> CurvePoint:
    spots = [row.curve[place] for row in rows]
    at = fmean(_place(row, place, against) for row in rows)
    if metric == "recovered":
        rates = [(spot.asr or 0.0, row.images) for spot, row in zip(spots, rows, strict=True)]
        ends = [wilson(round(rate * images), images) for rate, images in rates]
        mean = fmean(rate for rate, _ in rates)
        return at, 100 * mean, 100 * min(low for low, _ in ends), 100 * max(high for _, high in ends)
    means = [spot.score or 0.0 for spot in spots]
    spreads = [spot.spread for spot in spots if spot.spread is not None]
    mean = fmean(means)
    if len(spreads) < len(spots):
        return at, mean, None, None
    half = (fmean(spread**2 for spread in spreads) + pvariance(means)) ** 0.5
    return at, mean, mean - half, mean + half


def _place(row: Row, place: int, against: str) -> float:
    iterations = row.curve[place].iterations
    if against == "iterations":
        return iterations
    return row.info["seconds"] / len(row.trial.records) * iterations / row.curve[-1].iterations


def curve_problems(panels: Sequence[AuditPanel]) -> Iterator[Problem]:
    """Find audits whose attacks do not iterate."""
    if panels and not any(row.curve for panel in panels for row in panel.rows):
        fix = "choose attacks that iterate, such as ig or cdia"
        yield Problem("curve", "none of the selected attacks iterates, so there is no progress curve", fix)


def training_series(panel: TrainingPanel, metric: str, against: str) -> list[FigureCurve]:
    """Return the curve of each defence over rounds or bytes, with the range over the seeds."""
    place = {"rounds": "round", "bytes": "sent"}[against]
    scale = 100 if metric == "accuracy" else 1
    curves: list[FigureCurve] = []
    for each in training_curves(panel.groups):
        points = [
            (float(p[place]), scale * p[metric], scale * p[f"{metric}_low"], scale * p[f"{metric}_high"])
            for p in each["points"]
            if p.get(metric) is not None
        ]
        curves += [FigureCurve(each["name"], "", points)] if points else []
    return curves


def baseline_of(panel: AuditPanel, metric: str) -> float | None:
    """Return what the best guess that sees no update reaches."""
    key = {"ssim": "ssim_mean", "recovered": "asr"}[metric]
    values = [value for row in panel.rows if (value := row.baseline_of(key)) is not None]
    return max(values) * (100 if metric == "recovered" else 1) if values else None


def draw_curves(
    axes: Axes, curves: Sequence[FigureCurve], series: Sequence[str], choices: FigureChoices, guess: float | None
) -> list[Any]:
    """Draw the curves with their bands; return the handles of the legend."""
    handles: list[Any] = []
    several = len({curve.attack for curve in curves}) > 1
    per_defence = len({curve.defence for curve in curves}) < len(curves)
    for number, curve in enumerate(curves):
        place = number if per_defence else series.index(curve.defence)
        xs, ys = [point[0] for point in curve.points], [point[1] for point in curve.points]
        bands = [(x, low, high) for x, _, low, high in curve.points if low is not None and high is not None]
        if bands and any(high > low for _, low, high in bands):
            axes.fill_between(*zip(*bands, strict=True), color=colour(place), alpha=0.13, linewidth=0, zorder=1)  # pyright: ignore[reportArgumentType]
        name = _name(curve, choices, several)
        style: dict[str, Any] = {"color": colour(place), "linestyle": line(place), "marker": marker(place)}
        every = max(1, len(xs) // 8)
        handles += axes.plot(xs, ys, **style, markersize=3.5, markevery=every, label=name, zorder=3)
    if guess is not None:
        handles.append(axes.axhline(guess, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), label="best guess"))
    return handles


def _name(curve: FigureCurve, choices: FigureChoices, several: bool) -> str:
    label = choices.label(curve.defence)
    shown = "No defence" if label == curve.defence == "none" else label
    return f"{shown}, {choices.label(curve.attack)}" if several else shown
