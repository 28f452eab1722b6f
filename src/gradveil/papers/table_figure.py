"""A paper's figure drawn again from our measurements: bars with intervals, or curves over the rounds of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from gradveil.papers.comparison import ComparedCell, ComparedTable

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
LEFT, WIDE, LINE = 260, 420, 26
HIGH = 220


def figure_of(table: ComparedTable) -> str:
    """Return the figures of a table as inline SVG: one per setting, column and metric that is measured."""
    if not table.entry.is_figure:
        return ""
    groups: dict[tuple[str, str, str], list[ComparedCell]] = {}
    for compared in table.cells:
        if compared.ours is not None:
            cell = compared.cell
            groups.setdefault((cell.setting, cell.column, cell.metric), []).append(compared)
    drawn = []
    for names, cells in groups.items():
        curves = {one.cell.row: curve_of(one) for one in cells}
        title = ", ".join(part for part in names if part)
        figure = _curves(title, curves) if any(len(curve) > 1 for curve in curves.values()) else _bars(title, cells)
        drawn.append(f"<figure>{figure}<figcaption>{escape(title)}</figcaption></figure>")
    return "".join(drawn)


def curve_of(compared: ComparedCell) -> dict[int, float]:
    """Average the recorded accuracies of the seeds by round, in percent."""
    points: dict[int, list[float]] = {}
    for line in compared.record.scores if compared.record else ():
        for pair in str(line.get("curve") or "").split():
            number, _, value = pair.partition(":")
            points.setdefault(int(number), []).append(100 * float(value))
    return {number: fmean(values) for number, values in sorted(points.items())}


def _bars(title: str, cells: Sequence[ComparedCell]) -> str:
    """Draw a bar per row with its interval, and a diamond where the paper prints a number."""
    values = [value for one in cells for value in (one.ours, one.high, one.cell.number) if value is not None]
    top = max([*values, 1e-9])
    height = LINE * len(cells) + 34

    def x(value: float) -> float:
        return LEFT + WIDE * min(max(value, 0.0), top) / top

    parts = [_open(title, LEFT + WIDE + 70, height)]
    for place, one in enumerate(cells):
        y = LINE * place + 8
        assert one.ours is not None
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(one.cell.row)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{x(one.ours) - LEFT:.1f}" height="16" fill="#9CC3E0"/>')
        if one.low is not None and one.high is not None:
            parts.append(_line([(x(one.low), y + 8), (x(one.high), y + 8)], "#0072B2"))
        if one.cell.number is not None:
            at = x(one.cell.number)
            parts.append(f'<path d="M{at:.1f} {y}l6 8l-6 8l-6 -8z" fill="#D55E00"><title>paper</title></path>')
        parts.append(f'<text x="{LEFT + WIDE + 8}" y="{y + 13}">{one.ours:.3g}</text>')
    axis = f'<text x="{LEFT}" y="{height - 6}">0</text><text x="{LEFT + WIDE}" y="{height - 6}" text-anchor="end">'
    return "".join([*parts, f"{axis}{top:.3g} (diamonds: the paper)</text></svg>"])


def _curves(title: str, curves: Mapping[str, Mapping[int, float]]) -> str:
    """Draw a line per row: accuracy in percent over rounds."""
    most = max(number for curve in curves.values() for number in curve)
    height = HIGH + 40 + LINE * len(curves)
    parts = [_open(title, LEFT + WIDE, height)]
    for level in (0, 25, 50, 75, 100):
        y = 10 + HIGH * (1 - level / 100)
        parts.append(_line([(60, y), (LEFT + WIDE - 10, y)], "#DDDDDD"))
        parts.append(f'<text x="54" y="{y + 4:.0f}" text-anchor="end">{level}%</text>')
    for place, (row, curve) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        across = LEFT + WIDE - 70
        points = [(60 + across * number / most, 10 + HIGH * (1 - value / 100)) for number, value in curve.items()]
        parts.append(_line(points, colour))
        y = HIGH + 46 + LINE * place
        parts.append(f"{_line([(60, y), (84, y)], colour)}<text x='92' y='{y + 5}'>{escape(row)}</text>")
    parts.append(f'<text x="{LEFT + WIDE - 10}" y="{HIGH + 26}" text-anchor="end">round {most}</text>')
    return "".join([*parts, "</svg>"])


def _open(title: str, wide: int, high: int) -> str:
    font = "font-family='system-ui,sans-serif' font-size='13'"
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img" aria-label="{label}" {font}>'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
