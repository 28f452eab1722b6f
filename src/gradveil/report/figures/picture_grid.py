"""The reconstruction grid: targets in columns, the ground truth on top, a row per defence or attack below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradveil.audit.result_rows import Row
from gradveil.core.errors import Problem
from gradveil.core.formatting import DASH
from gradveil.report.figures.figure_data import AuditPanel, FigureChoices, target_numbers
from gradveil.report.figures.figure_kinds import KINDS
from gradveil.report.figures.figure_style import QUIET, SMALL, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Picture = NDArray[np.float32]
_GAP = 0.04
"""Inches between pictures."""
_MARGIN = 0.06
"""Inches between a label and its pictures."""
_BETWEEN = 0.06
"""Inches between blocks."""
_LARGEST = 1.0
"""Inches of the side of a picture at most."""
_SHARPEST = 256
"""Pixels of a picture at least: viewers would blur smaller ones."""
_SIGNS = ("outcome", "none")
"""What is no number below a picture."""
_OUTCOMES = {"identifiable": "recovered and identified", "partly": "recovered or identified", "neither": "neither"}

_SCORES = {name: title for name, title in KINDS["grid"].metrics.items() if name not in _SIGNS}
"""The scores below pictures, by metric, in words."""


@dataclass(frozen=True)
class GridRow:
    """A row of pictures."""

    label: str
    note: str
    pictures: Sequence[Picture]
    captions: Sequence[str]


@dataclass(frozen=True)
class GridBlock:
    """The rows that show the same targets, the ground truth first."""

    title: str
    rows: Sequence[GridRow]


def grid_problems(panels: Sequence[AuditPanel], choices: FigureChoices) -> Iterator[Problem]:
    """Find trials without pictures, targets that no trial has, and scores that were not computed."""
    rows = [row for panel in panels for row in panel.rows]
    if rows and not any(row.words.drawn for row in rows):
        what = f"shows pictures, and these runs attack {rows[0].words.plural}"
        yield Problem("grid", what, f"choose the kind pareto; the report shows {rows[0].words.plural}")
        return
    if not any("truth" in (row.trial.images() or {}) for row in _shown(panels)):
        yield Problem("grid", "shows pictures, and these runs kept none", "audit again without --no-images")
    known = {int(record["target_client"]) for row in rows for record in row.trial.records}
    if unknown := [number for number in choices.targets if number not in known]:
        fix = f"choose from {min(known)} to {max(known)}"
        yield Problem("targets", f"{', '.join(map(str, unknown))} was not attacked in these runs", fix)
    metric = choices.metric or "ssim"
    scored = any(metric in scores for row in rows for _, _, scores in row.scores())
    if metric not in _SIGNS and not scored:
        yield Problem("metric", f"'{metric}' was not computed in these runs", 'choose ssim, or audit with lpips="alex"')


def _shown(panels: Sequence[AuditPanel]) -> list[Row]:
    """Return the trials in rows: the strongest attack on each defence, or every chosen attack."""
    return [row for panel in panels for row in _rows_of(panel)]


def _rows_of(panel: AuditPanel) -> list[Row]:
    seeds = {row.seed for row in panel.rows}
    first = min(seeds) if not panel.choices.seeds else None
    kept: list[Row] = []
    for verdict in panel.verdicts.values():
        rows = [row for row in verdict.rows if first is None or row.seed == first]
        if not panel.choices.attacks:
            eligible = [row for row in verdict.judged if first is None or row.seed == first]
            kept += [*eligible, *rows][:1]
        else:
            by_attack = {row.attack: row for row in rows}
            kept += [
                by_attack[name] for name in panel.choices.sort(row.attack for row in panel.rows) if name in by_attack
            ]
    return kept


def grid_blocks(panels: Sequence[AuditPanel], choices: FigureChoices) -> list[GridBlock]:
    """Lay the pictures out: one block for each setting and each set of targets."""
    blocks: list[GridBlock] = []
    for panel in panels:
        rows = [row for row in _rows_of(panel) if "truth" in (row.trial.images() or {})]
        several = len({row.attack for row in rows}) > 1
        numbers = target_numbers(panel)
        groups: dict[bytes, list[GridRow]] = {}
        for row in rows:
            truth, found, scores = _pictures(row, numbers)
            digest = b"".join(picture.tobytes() for picture in truth)
            if digest not in groups:
                groups[digest] = [GridRow(choices.header("truth", "Ground truth"), "", truth, [])]
            note = choices.label(row.attack) if several else ""
            captions = [_caption(choices.metric or "ssim", each) for each in scores]
            groups[digest].append(GridRow(_defence(row, choices), note, found, captions))
        titled = len(panels) > 1 or len(groups) > 1
        blocks += [GridBlock(panel.title if titled else "", group) for group in groups.values()]
    return blocks


def _defence(row: Row, choices: FigureChoices) -> str:
    label = choices.label(row.defence)
    return "No defence" if label == row.defence and row.undefended else label


def _pictures(row: Row, numbers: Sequence[int]) -> tuple[list[Picture], list[Picture], list[Mapping[str, Any]]]:
    """Return the ground truths, the reconstructions and the scores of these target clients."""
    images = row.trial.images() or {}
    places = {int(record["target_client"]): place for place, record in enumerate(row.trial.records)}
    chosen = [places[number] for number in numbers if number in places]
    truth, found = (
        [
            np.asarray(images[name][place, b].numpy(), dtype=np.float32)
            for place in chosen
            for b in range(row.setting.batch)
        ]
        for name in ("truth", "reconstruction")
    )
    scores = [each for place in chosen for each in row.trial.records[place]["per_image"]]
    return truth, found, scores


def _caption(metric: str, scores: Mapping[str, Any]) -> str:
    if metric == "outcome":
        flags = bool(scores["success"]), scores.get("identified")
        hits = sum(bool(flag) for flag in flags) + (flags[1] is None and flags[0])
        return ["neither", "partly", "identifiable"][hits]
    value = scores.get(metric)
    if metric == "none":
        return ""
    if value is None:
        return DASH
    digits = {"psnr": 1, "mse": 3}.get(metric, 2)
    return f"{value:z.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class GridLayout:
    """Sizes in inches."""

    labels: float
    side: float
    """Width of a picture."""
    tall: float
    """Height of a picture."""
    caption: float
    title: float
    legend: float
    width: float
    height: float


def grid_layout(blocks: Sequence[GridBlock], choices: FigureChoices, width: float, measure: Any) -> GridLayout:
    """Fit labels and pictures into a width in inches; `measure` returns the width of a text in inches."""
    rows = [row for block in blocks for row in block.rows]
    count = max(len(row.pictures) for row in rows)
    _, high, wide = rows[0].pictures[0].shape
    texts = [line for row in rows for line in _lines(row, width)] + [_SCORES.get(choices.metric or "ssim", "")]
    labels = max(map(measure, texts)) + _MARGIN + 0.02
    caption = SMALL * 1.25 / 72 if (choices.metric or "ssim") != "none" else 0.0
    title = TEXT * 1.7 / 72
    legend = SMALL * 1.8 / 72 if choices.metric == "outcome" else 0.0
    above = 0.01 + legend + title * (bool(choices.title) + sum(bool(block.title) for block in blocks))
    above += _BETWEEN * (len(blocks) - 1) + sum(_GAP + (caption if row.captions else 0.0) for row in rows)
    side = min(_LARGEST, (width - labels - (count - 1) * _GAP) / count)
    if choices.height is not None:
        side = min(side, (choices.height - above) / len(rows) * wide / high)
    side = max(side, 0.05)
    height = above + len(rows) * side * high / wide
    across = labels + count * side + (count - 1) * _GAP
    return GridLayout(labels, side, side * high / wide, caption, title, legend, across, height)


def _lines(row: GridRow, width: float) -> list[str]:
    return [*_wrapped(row.label, width), *_wrapped(row.note, width)]


def _wrapped(text: str, width: float) -> list[str]:
    """Wrap a label, which may take a third of the width in inches, at spaces; math stays whole."""
    most = max(16, int(width / 3 / 0.055))
    return [text] if "$" in text else textwrap.wrap(text, most, break_long_words=False, break_on_hyphens=False)


def draw_grid(
    axes: Axes, blocks: Sequence[GridBlock], choices: FigureChoices, layout: GridLayout, width: float
) -> None:
    """Draw the blocks; the axes' units are inches, counted from the top left."""
    axes.set_axis_off()
    top = 0.01
    if choices.title:
        axes.text(layout.width / 2, top, choices.title, ha="center", va="top", fontsize=TEXT)
        top += layout.title
    for number, block in enumerate(blocks):
        top += _BETWEEN if number else 0.0
        if block.title:
            axes.text(layout.labels, top, block.title, va="top", fontsize=SMALL, color=QUIET)
            top += layout.title
        for row in block.rows:
            _draw_row(axes, row, layout, top, choices, width)
            top += layout.tall + _GAP + (layout.caption if row.captions else 0.0)
    if layout.legend:
        _draw_legend(axes, layout, top)
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height, 0)
    axes.set_aspect("equal")


def _draw_row(axes: Axes, row: GridRow, layout: GridLayout, top: float, choices: FigureChoices, width: float) -> None:
    lines = _lines(row, width)
    black = len(lines) - len(_wrapped(row.note, width))
    middle = top + layout.tall / 2
    step = SMALL * 1.2 / 72
    start = middle - step * (len(lines) - 1) / 2
    for place, text in enumerate(lines):
        at, shade = start + place * step, "k" if place < black else QUIET
        axes.text(layout.labels - _MARGIN, at, text, ha="right", va="center", fontsize=SMALL, color=shade)
    if row.captions and (score := _SCORES.get(choices.metric or "ssim")):
        under = top + layout.tall + layout.caption / 2
        named = {"ha": "right", "va": "center", "fontsize": SMALL - 0.5, "color": QUIET}
        axes.text(layout.labels - _MARGIN, under, score, **named)
    for place, picture in enumerate(row.pictures):
        left = layout.labels + place * (layout.side + _GAP)
        _draw_picture(axes, picture, (left, left + layout.side, top + layout.tall, top))
        if place < len(row.captions):
            at = (left + layout.side / 2, top + layout.tall + layout.caption / 2)
            if choices.metric == "outcome":
                _draw_outcome(axes, at, row.captions[place])
            else:
                axes.text(*at, row.captions[place], ha="center", va="center", fontsize=SMALL - 0.5)


def _draw_picture(axes: Axes, picture: Picture, extent: tuple[float, float, float, float]) -> None:
    channels, high, wide = picture.shape
    times = max(1, -(-_SHARPEST // min(high, wide)))
    values = np.nan_to_num(picture[: 3 if channels >= 3 else 1]).clip(0, 1)
    eight = (values * 255).round().astype(np.uint8).repeat(times, 1).repeat(times, 2)
    shown = eight.transpose(1, 2, 0) if channels >= 3 else np.repeat(eight.transpose(1, 2, 0), 3, 2)
    axes.imshow(shown, extent=extent, interpolation="none", aspect="auto", zorder=2)


def _draw_outcome(axes: Axes, at: tuple[float, float], outcome: str) -> None:
    style: Mapping[str, Any] = {"color": "k", "marker": "o", "markersize": 4, "markeredgewidth": 0.6, "linestyle": ""}
    fill = {"identifiable": "full", "partly": "left", "neither": "none"}[outcome]
    axes.plot(*at, **style, fillstyle=fill, markerfacecoloralt="w")


def _draw_legend(axes: Axes, layout: GridLayout, top: float) -> None:
    left = layout.labels
    middle = top + layout.legend / 2
    for outcome, text in _OUTCOMES.items():
        _draw_outcome(axes, (left + 0.04, middle), outcome)
        axes.text(left + 0.12, middle, text, va="center", fontsize=SMALL - 0.5)
        left += 0.3 + 0.055 * len(text)
