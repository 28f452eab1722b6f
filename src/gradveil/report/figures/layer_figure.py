"""The noise of a defence in each layer, next to the update without noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradveil.core.errors import Problem
from gradveil.report.figures.figure_data import AuditPanel, FigureChoices
from gradveil.report.figures.figure_style import QUIET, colour, line, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMED = 14
"""More layers than these are numbered."""


@dataclass(frozen=True)
class LayerSeries:
    """Root mean squares of a defence's noise, and of its update without noise, layer by layer."""

    defence: str
    layers: Sequence[str]
    noise: Sequence[float]
    update: Sequence[float]


def layer_series(panel: AuditPanel, against: str) -> list[LayerSeries]:
    """Return the defences that add noise."""
    result: list[LayerSeries] = []
    for defence, verdict in panel.verdicts.items():
        row = next((row for row in verdict.rows if _whole(row.info.get("layers"))), None)
        if row is not None:
            result.append(_joined(defence, row.info["layers"], against))
    return result


def _whole(layers: Sequence[Any] | None) -> bool:
    return bool(layers) and all(each["noise"] is not None and each["update"] is not None for each in layers or ())


def _joined(defence: str, layers: Sequence[Any], against: str) -> LayerSeries:
    """Join the parameters of a layer: the root of the mean square of all their values."""
    groups: dict[str, list[Any]] = {}
    for each in layers:
        name = str(each["parameter"])
        groups.setdefault(name.rpartition(".")[0] or name if against == "layer" else name, []).append(each)
    means = {
        key: [
            (sum(e["values"] * e[key] ** 2 for e in group) / sum(e["values"] for e in group)) ** 0.5
            for group in groups.values()
        ]
        for key in ("noise", "update")
    }
    return LayerSeries(defence, list(groups), means["noise"], means["update"])


def layer_problems(panels: Sequence[AuditPanel]) -> Iterator[Problem]:
    """Find runs without noise, and those of an earlier version, which recorded none."""
    if not panels or any(layer_series(panel, "layer") for panel in panels):
        return
    recorded = any("layers" in row.info for panel in panels for row in panel.rows)
    if recorded:
        fix = "choose a defence that adds noise to the update, such as optimal-noise or dp"
        yield Problem("layers", "none of the selected defences adds noise to the update", fix)
    else:
        yield Problem("layers", "these runs have no noise per layer: an earlier version made them", "audit again")


def draw_layers(
    axes: Axes, found: Sequence[LayerSeries], series: Sequence[str], choices: FigureChoices, metric: str
) -> list[Any]:
    """Draw noise and update in each layer; return the handles of the legend."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    names = max((each.layers for each in found), key=len)
    for each in found:
        place = series.index(each.defence)
        xs = [names.index(name) + 1 for name in each.layers]
        style: dict[str, Any] = {"color": colour(place), "marker": marker(place), "markersize": 4}
        if metric == "ratio":
            ratios = [
                noise / update if update else float("nan")
                for noise, update in zip(each.noise, each.update, strict=True)
            ]
            handles += axes.plot(xs, ratios, **style, linestyle=line(place), label=choices.label(each.defence))
        else:
            handles += axes.plot(xs, each.noise, **style, linestyle="-", label=choices.label(each.defence))
            hollow = {**style, "markerfacecolor": "white", "linewidth": 0.8}
            axes.plot(xs, each.update, **hollow, linestyle=":")
    if metric != "ratio":
        quiet: dict[str, Any] = {"color": QUIET, "linestyle": ":", "linewidth": 0.8, "marker": "o", "markersize": 4}
        handles.append(Line2D([], [], **quiet, markerfacecolor="white", label="update without noise"))
    axes.set_yscale("log")
    if len(names) <= _NAMED:
        axes.set_xticks(range(1, len(names) + 1), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_xlim(0.6, len(names) + 0.4)
    return handles
