"""A figure from run directories: its choices checked all at once, drawn, and written to a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.private_files import write_private
from gradveil.report.figures.curve_figure import (
    baseline_of,
    curve_problems,
    draw_curves,
    progress_curves,
    training_series,
)
from gradveil.report.figures.figure_data import (
    AuditPanel,
    FigureChoices,
    Runs,
    audit_panels,
    joined_stages,
    open_for_figure,
    training_panels,
    trainings_of,
)
from gradveil.report.figures.figure_kinds import FONTS, FORMATS, KINDS, WIDTHS, FigureKind
from gradveil.report.figures.figure_style import (
    SMALL,
    encoded,
    legend_below,
    legend_rows,
    missing_extra,
    new_figure,
    styled,
)
from gradveil.report.figures.layer_figure import draw_layers, layer_problems, layer_series
from gradveil.report.figures.pareto_figure import (
    MAY_LEAK_MORE,
    bytes_tick,
    draw_pareto,
    pareto_points,
    pareto_problems,
    usual_cost,
)
from gradveil.report.figures.picture_grid import draw_grid, grid_blocks, grid_layout, grid_problems

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 5.0
"""Figures of this width in inches have three panels in a row, narrower ones one."""
_OTHER_FILE = "choose another file"


def draw_figure(
    runs: Sequence[Path | str],
    kind: str = "grid",
    *,
    ax: Axes | None = None,
    out: Path | str | None = None,
    format: str | None = None,
    metric: str | None = None,
    against: str | None = None,
    defences: Sequence[str] = (),
    attacks: Sequence[str] = (),
    targets: Sequence[int] = (),
    seeds: Sequence[int] = (),
    order: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    title: str | None = None,
    size: str | float | tuple[float, float] = "single",
    font: str = "sans",
    dpi: float = 300,
    problems: Sequence[Problem] = (),
) -> Figure:
    """Draw a figure from these run directories, into `ax` if it is given, and write it to `out` if that is given.

    Everything that is wrong with the choices is raised at once, together with `problems`.
    """
    found = [*problems, *missing_extra()]
    opened = open_for_figure([Path(run) for run in runs])
    width, height = _inches(size, found)
    choices = FigureChoices(
        **{"defences": defences, "attacks": attacks, "order": order, "labels": dict(labels or {})},
        **{"metric": metric, "against": against, "targets": targets, "seeds": seeds, "headers": dict(headers or {})},
        **{"title": title, "width": width, "height": height, "font": font, "dpi": dpi},
    )
    found += _wrong_choices(kind, opened, choices)
    file = None if out is None else Path(out)
    written = _format(file, format, found)
    refuse(found)
    with styled(font):
        figure = _KINDS[kind](opened, choices, ax)
    if file is not None:
        _write(file, encoded(figure, written, dpi, font))
    return figure


def _inches(size: str | float | tuple[float, float], problems: list[Problem]) -> tuple[float, float | None]:
    """Read a size: the name of a width, a width, or width and height in inches."""
    if isinstance(size, str) and size in WIDTHS:
        return WIDTHS[size], None
    if isinstance(size, str):
        numbers = re.fullmatch(r"(\d+(?:\.\d+)?)(?:x(\d+(?:\.\d+)?))?", size.replace(" ", ""))
        sides = [float(side) for side in numbers.groups() if side] if numbers else []
    else:
        sides = [*size] if isinstance(size, tuple) else [float(size)]
    if not 1 <= len(sides) <= 2 or any(not 0.5 <= side <= 40 for side in sides):
        fix = f"give {', '.join(WIDTHS)}, a width such as 5.5, or width and height such as 3.4x2.2, in inches"
        problems.append(Problem("size", f"'{size}' is no size", fix))
        return WIDTHS["single"], None
    return sides[0], sides[1] if len(sides) > 1 else None


def _format(file: Path | None, format: str | None, problems: list[Problem]) -> str:
    suffix = file.suffix.lstrip(".").lower() if file is not None else ""
    known = f"choose one of: {', '.join(FORMATS)}"
    if format is not None and format not in FORMATS:
        problems.append(Problem("format", f"'{format}' is no format of figures", known))
    elif file is not None and format is None and suffix not in FORMATS:
        problems.append(
            Problem("out", f"'{file}' does not say its format", f"end it in one of: .{', .'.join(FORMATS)}")
        )
    elif format is not None and suffix in FORMATS and suffix != format:
        problems.append(Problem("format", f"is {format}, and the file ends in .{suffix}", "leave one of them out"))
    if file is not None and file.is_dir():
        problems.append(Problem("out", f"'{file}' is a folder", f"name a file in it, such as {file / 'figure.pdf'}"))
    return format or suffix or "png"


def _wrong_choices(kind: str, runs: Runs, choices: FigureChoices) -> Iterator[Problem]:
    """Find what is wrong with the choices: first what is unknown, then what these runs do not have."""
    wrong = [*choices.problems(runs.defences, runs.attacks)]
    if choices.font not in FONTS:
        wrong.append(Problem("font", f"'{choices.font}' is no font here", f"choose one of: {', '.join(FONTS)}"))
    if not 10 <= choices.dpi <= 4000:
        wrong.append(Problem("dpi", f"is {choices.dpi}", "give dots per inch from 10 to 4000, such as 300"))
    if unknown := sorted(set(choices.seeds) - runs.seeds):
        fix = f"choose from: {', '.join(map(str, sorted(runs.seeds)))}"
        wrong.append(Problem("seed", f"{', '.join(map(str, unknown))} was not run", fix))
    if kind not in KINDS:
        wrong.append(Problem("kind", f"'{kind}' is no kind of figure", f"choose one of: {', '.join(KINDS)}"))
        yield from wrong
        return
    wrong += _wrong_words(kind, KINDS[kind], runs, choices)
    yield from wrong
    if not wrong:
        yield from _not_there(kind, runs, choices)


def _wrong_words(kind: str, entry: FigureKind, runs: Runs, choices: FigureChoices) -> Iterator[Problem]:
    trains = not runs.audits
    if trains and not entry.training_metrics:
        fix = "give a run directory of gradveil audit, or draw --kind curve"
        yield Problem("kind", f"'{kind}' is drawn from audits, and these are trainings", fix)
        return
    if runs.audits and runs.trainings and kind != "pareto":
        fix = "give runs of one kind; audits and trainings together are for --kind pareto"
        yield Problem("runs", f"hold audits and trainings, and '{kind}' is drawn from one kind", fix)
    metrics = entry.training_metrics if trains else entry.metrics
    axes = entry.training_against if trains else entry.against
    for option, value, known in (("metric", choices.metric, metrics), ("against", choices.against, axes)):
        if value is not None and value not in known:
            fix = f"choose one of: {', '.join(known)}" if known else "leave it out"
            yield Problem(option, f"'{value}' is nothing that '{kind}' shows", fix)
    for key in choices.headers:
        if key not in entry.headers:
            fix = f"choose from: {', '.join(entry.headers)}"
            yield Problem("header", f"'{key}' is no text of '{kind}'", fix)
    if choices.targets and kind != "grid":
        yield Problem("targets", f"choose pictures, and '{kind}' shows none", "leave it out, or draw --kind grid")


def _not_there(kind: str, runs: Runs, choices: FigureChoices) -> Iterator[Problem]:
    """Find what the selected trials do not have."""
    panels = audit_panels(runs, choices)
    if not panels and not training_panels(runs, choices):
        fix = "select other defences, attacks or seeds; gradveil summary lists the results"
        yield Problem("selection", "no finished trial is left to draw", fix)
        return
    checks: Mapping[str, Any] = {
        "grid": lambda: grid_problems(panels, choices),
        "pareto": lambda: pareto_problems(joined_stages(panels), runs, choices.against),
        "curve": lambda: curve_problems(panels),
        "layers": lambda: layer_problems(panels),
    }
    yield from checks[kind]()


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(str(file), f"cannot be written: {error.strerror}", _OTHER_FILE) from error
    write_private(file, content, _OTHER_FILE)


def _grid(runs: Runs, choices: FigureChoices, ax: Axes | None) -> Figure:
    blocks = grid_blocks(audit_panels(runs, choices), choices)
    if ax is not None:
        figure: Any = ax.figure
        box = ax.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        layout = grid_layout(blocks, choices, box.width, _measure(figure))
        draw_grid(ax, blocks, choices, layout, box.width)
        return figure
    figure = new_figure(choices.width, 1.0, choices.dpi, choices.font, layout=None)
    layout = grid_layout(blocks, choices, choices.width, _measure(figure))
    figure.set_size_inches(layout.width, layout.height)
    axes = figure.add_axes((0, 0, 1, 1))
    draw_grid(axes, blocks, choices, layout, choices.width)
    return figure


def _measure(figure: Any) -> Any:
    """Return a function that measures a text in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(figure).get_renderer()

    def inches(text: str) -> float:
        artist = Text(0, 0, text, fontsize=SMALL, figure=figure)
        return artist.get_window_extent(renderer, dpi=figure.dpi).width / figure.dpi

    return inches


def _panels_of(
    titles: Sequence[str], choices: FigureChoices, ax: Axes | None, labels: list[str], extra: float = 0.0
) -> tuple[Any, list[Any]]:
    """Make axes for these panels, or take those that are given for a single one."""
    if ax is not None:
        if len(titles) > 1:
            raise fail("ax", f"is one, and the runs have {len(titles)} settings", "leave it out, or give one run")
        return ax.figure, [ax]
    columns = min(len(titles), 3 if choices.width > _WIDE else 1)
    rows = -(-len(titles) // columns)
    tall = min(2.6, 0.68 * choices.width / columns)
    height = choices.height or rows * (tall + extra) + 0.15 * legend_rows(labels, choices.width)
    figure = new_figure(choices.width, height, choices.dpi, choices.font)
    axes = [*figure.subplots(rows, columns, squeeze=False, sharey=True).flat]
    for spare in axes[len(titles) :]:
        spare.set_axis_off()
    if len(titles) > 1:
        for each, title in zip(axes, _differences(titles), strict=False):
            each.set_title(title, fontsize=SMALL)
    if choices.title:
        figure.suptitle(choices.title, fontsize=9)
    return figure, axes[: len(titles)]


def _differences(titles: Sequence[str]) -> list[str]:
    """Keep the parts of titles that not all of them have.

    >>> _differences(["a on b, untrained", "a on b, after 2 rounds"]), _differences(["a", "b"])
    (['untrained', 'after 2 rounds'], ['a', 'b'])
    """
    parts = [title.split(", ") for title in titles]
    common = set(parts[0]).intersection(*parts)
    return [", ".join(part for part in each if part not in common) or ", ".join(each) for each in parts]


def _dress(axes: Sequence[Any], choices: FigureChoices, x: str, y: str, handles: Sequence[Any], own: bool) -> None:
    """Name the axes and put the legend, each entry once."""
    for each in axes:
        each.set_xlabel(choices.header("x", x))
        first = each.get_subplotspec() is None or each.get_subplotspec().is_first_col()
        if first:
            each.set_ylabel(choices.header("y", y))
    if choices.title and not own:
        axes[0].set_title(choices.title)
    entries = {str(handle.get_label()): handle for handle in handles}
    legend_below(axes[0], [*entries.values()], outside=own)


def _series(panels: Sequence[AuditPanel], choices: FigureChoices) -> list[str]:
    """Return the defences of all panels in order: each has one colour and marker in the whole figure."""
    return choices.sort(name for panel in panels for name in dict.fromkeys(row.defence for row in panel.rows))


def _pareto(runs: Runs, choices: FigureChoices, ax: Axes | None) -> Figure:
    panels = joined_stages(audit_panels(runs, choices))
    metric, cost = choices.metric or "identifiable", choices.against or usual_cost(panels, runs)
    points = [pareto_points(panel, trainings_of(panel, runs), metric, cost) for panel in panels]
    kept = [(panel, each) for panel, each in zip(panels, points, strict=True) if each]
    series = _series(panels, choices)
    labels = [choices.label(name) for name in series] + [MAY_LEAK_MORE]
    figure, axes = _panels_of([panel.title for panel, _ in kept], choices, ax, labels)
    drawn = [
        draw_pareto(each, spots, series, choices, metric, cost) for each, (_, spots) in zip(axes, kept, strict=True)
    ]
    entry = KINDS["pareto"]
    per_round = (
        " per round" if cost == "bytes" and _is_of_training(kept, runs) else " per update" if cost == "bytes" else ""
    )
    x = entry.against[cost] + per_round
    y = _in_words(entry.metrics[metric], panels)
    _dress(axes, choices, x, y, [h for each in drawn for h in each], own=ax is None)
    return figure


def _in_words(title: str, panels: Sequence[AuditPanel]) -> str:
    """Return an axis title in the words of the examples that were attacked: rows or texts in place of images."""
    rows = [row for panel in panels for row in panel.rows]
    return rows[0].words.told(title) if rows else title


def _is_of_training(kept: Sequence[tuple[AuditPanel, Any]], runs: Runs) -> bool:
    return bool(runs.trainings) or any(row.setting.trained is not None for panel, _ in kept for row in panel.rows)


def _curve(runs: Runs, choices: FigureChoices, ax: Axes | None) -> Figure:
    entry = KINDS["curve"]
    if runs.audits:
        metric, against = choices.metric or "ssim", choices.against or "iterations"
        panels = [panel for panel in audit_panels(runs, choices) if any(row.curve for row in panel.rows)]
        curves = [progress_curves(panel, metric, against) for panel in panels]
        guesses = [baseline_of(panel, metric) for panel in panels]
        series = _series(panels, choices)
        titles = [panel.title for panel in panels]
        x, y = entry.against[against], _in_words(entry.metrics[metric], panels)
    else:
        metric, against = choices.metric or "accuracy", choices.against or "rounds"
        trained = training_panels(runs, choices)
        curves = [training_series(panel, metric, against) for panel in trained]
        guesses = [None for _ in trained]
        series = choices.sort(group.name for panel in trained for group in panel.groups)
        titles = [panel.title for panel in trained]
        x, y = entry.training_against[against], entry.training_metrics[metric]
    names = [choices.label(name) for name in dict.fromkeys(curve.defence for each in curves for curve in each)]
    figure, axes = _panels_of(titles, choices, ax, [*names, "best guess"])
    handles: list[Any] = []
    for each, drawn, guess in zip(axes, curves, guesses, strict=True):
        handles += draw_curves(each, drawn, series, choices, guess)
        if against == "iterations":
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if against == "bytes":
            each.xaxis.set_major_formatter(bytes_tick)
        if metric == "recovered":
            each.set_ylim(-4, 104)
    _dress(axes, choices, x, y, handles, own=ax is None)
    return figure


def _layers(runs: Runs, choices: FigureChoices, ax: Axes | None) -> Figure:
    metric, against = choices.metric or "noise", choices.against or "layer"
    panels = audit_panels(runs, choices)
    found = [(panel, each) for panel in panels if (each := layer_series(panel, against))]
    series = _series(panels, choices)
    names = list(dict.fromkeys(each.defence for _, drawn in found for each in drawn))
    labels = [choices.label(name) for name in names] + ["update without noise"]
    figure, axes = _panels_of([panel.title for panel, _ in found], choices, ax, labels, extra=0.3)
    handles = [
        handle
        for each, (_, drawn) in zip(axes, found, strict=True)
        for handle in draw_layers(each, drawn, series, choices, metric)
    ]
    entry = KINDS["layers"]
    _dress(axes, choices, entry.against[against], entry.metrics[metric], handles, own=ax is None)
    return figure


_KINDS: Mapping[str, Any] = {"grid": _grid, "pareto": _pareto, "curve": _curve, "layers": _layers}
