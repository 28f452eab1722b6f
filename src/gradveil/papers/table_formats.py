"""A compared table as text: for the terminal, Markdown, LaTeX, HTML, JSON and CSV.

Each printed setting is a block in the shape of the printed table: rows, and columns with a metric each.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from gradveil.core.formatting import DASH
from gradveil.papers.comparison import (
    AGREES,
    DIFFERS,
    DRAWN,
    LEAST,
    NOT_RUN,
    PENDING,
    ComparedCell,
    ComparedTable,
)
from gradveil.papers.table_figure import figure_of
from gradveil.report.paper_table import PaperTable, PlacedText, as_latex, as_markdown

MARKS = {AGREES: "=", DIFFERS: "≠", DRAWN: "", NOT_RUN: ""}
"""Marks of our numbers in a table."""
WIDTH = 80


@dataclass(frozen=True)
class TableBlock:
    """The cells of one printed setting, in the shape of the printed table."""

    setting: str
    columns: tuple[tuple[str, str], ...]
    """Printed column and metric."""
    rows: Mapping[str, Mapping[tuple[str, str], ComparedCell]]

    def floor(self, row: str) -> str:
        """Write what the best guess reaches in a row without the update."""
        return _shared(_plain(cell.floor) for cell in self.rows[row].values() if cell.floor is not None)

    def adaptive(self, row: str) -> str:
        """Write what the strongest attack that knows the defence reaches in a row."""
        cells = [cell for cell in self.rows[row].values() if cell.attacks]
        known = _shared(_plain(cell.adaptive) for cell in cells if cell.adaptive is not None)
        return known or (PENDING if cells else "")


def _shared(texts: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def blocks(table: ComparedTable) -> list[TableBlock]:
    """Arrange the cells of a table by setting, row and column."""
    made = []
    for setting in dict.fromkeys(compared.cell.setting for compared in table.cells):
        cells = [compared for compared in table.cells if compared.cell.setting == setting]
        rows: dict[str, dict[tuple[str, str], ComparedCell]] = {}
        for compared in cells:
            rows.setdefault(compared.cell.row, {})[compared.cell.column, compared.cell.metric] = compared
        columns = tuple(dict.fromkeys((compared.cell.column, compared.cell.metric) for compared in cells))
        made.append(TableBlock(setting, columns, rows))
    return made


def _plain(value: float | None) -> str:
    return (
        DASH
        if value is None
        else f"{value:.2g}"
        if abs(value) < 1
        else f"{value:.3g}"
        if abs(value) < 100
        else f"{value:.0f}"
    )


def printed_text(compared: ComparedCell) -> str:
    """Write the paper's number with its spread."""
    cell = compared.cell
    return (cell.printed or DASH) + ("" if cell.spread is None else f" ± {cell.spread:g}")


def our_text(compared: ComparedCell) -> str:
    """Write our number with its interval or spread, and the mark of its status."""
    if compared.ours is None or compared.low is None or compared.high is None:
        return DASH
    ends = (
        f" ({compared.low:.0f}–{compared.high:.0f})" if compared.rate else f" ± {_plain(compared.high - compared.ours)}"
    )
    shown = ends if compared.low < compared.high else ""
    return f"{_plain(compared.ours)}{shown}{MARKS[compared.status] and ' ' + MARKS[compared.status]}"


def heading(column: tuple[str, str], sep: str = " ") -> str:
    """Write a column with its metric."""
    return sep.join(part for part in column if part)


LEGEND = "= agrees, ≠ differs. In brackets: 95% interval of a rate. After ±: one standard deviation."
MEANING = {
    "floor": "what the best guess reaches without the update",
    "adaptive": "the strongest attack that knows the defence",
}


def as_text(table: ComparedTable, width: int = WIDTH, every: bool = False) -> str:
    """Write a table for a terminal; a block whose cells do not fit side by side becomes a list."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    console.print(f"{table.study.citation}\n{table.entry.name}: {table.entry.shows}")
    shown = 0
    for block in blocks(table):
        measured = any(cell.ours is not None for row in block.rows.values() for cell in row.values())
        if not (measured or every):
            continue
        shown += 1
        console.print(f"\n{block.setting}" if block.setting else "")
        console.print(_grid(block) if _fits(block, width) else _lines(block, every))
    console.print(f"\n{table.summary}.")
    for reason in table.reasons:
        console.print(f"- {reason}")
    if shown:
        console.print(f"{LEGEND} floor: {MEANING['floor']}. adaptive: {MEANING['adaptive']}.")
    elif not every:
        console.print("Nothing is measured yet: --all shows the printed numbers.")
    if table.notice:
        console.print(table.notice)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _cell_lines(compared: ComparedCell | None) -> str:
    return "" if compared is None else f"{printed_text(compared)}\n{our_text(compared)}"


def _fits(block: TableBlock, width: int) -> bool:
    needed = max(map(len, block.rows)) + 2 + 6 + 9 + 5
    for column in block.columns:
        cells = [row[column] for row in block.rows.values() if column in row]
        parts = [
            *heading(column, "\n").split("\n"),
            *(part for cell in cells for part in _cell_lines(cell).split("\n")),
        ]
        needed += max(map(len, parts)) + 2
    return needed <= width and len(block.columns) > 1


def _table(*headings: str) -> Table:
    lines = Table(box=None, padding=(0, 2, 0, 0))
    for name in headings:
        lines.add_column(name, overflow="fold")
    return lines


def _grid(block: TableBlock) -> Table:
    lines = _table("", "", *(heading(column, "\n") for column in block.columns), "floor", "adaptive")
    for name, row in block.rows.items():
        cells = [_cell_lines(row.get(column)) for column in block.columns]
        lines.add_row(name, "paper\nours", *cells, f"\n{block.floor(name)}", f"\n{block.adaptive(name)}")
    return lines


def _lines(block: TableBlock, every: bool) -> Table:
    lines = _table("row", "column", "metric", "paper", "ours", "n", "floor", "adaptive")
    for name, row in block.rows.items():
        before = ("", "")
        for column, compared in row.items():
            if compared.ours is None and not every:
                continue
            place = (name, column[0])
            texts = [new if place != before else "" for new in place]
            adaptive = (
                DASH if not compared.attacks else PENDING if compared.adaptive is None else _plain(compared.adaptive)
            )
            lines.add_row(
                *texts,
                column[1],
                printed_text(compared),
                our_text(compared),
                str(compared.count or ""),
                _plain(compared.floor),
                adaptive,
            )
            before = place
    return lines


def _sheets(table: ComparedTable) -> list[PaperTable]:
    notes = [("=", "agrees"), ("≠", "differs"), ("floor:", MEANING["floor"]), ("adaptive:", MEANING["adaptive"])]
    sheets = []
    for block in blocks(table):
        head = [PlacedText(""), *(PlacedText(heading(column)) for column in block.columns)]
        measured = [cell for row in block.rows.values() for cell in row.values() if cell.ours is not None]
        extents = Counter(map(_extent, measured))
        usual = max(extents, key=lambda extent: extents[extent], default="")
        rows = []
        for name, row in block.rows.items():
            cells = [_both(row[column], usual) if column in row else "" for column in block.columns]
            rows.append([PlacedText(text) for text in (name, *cells, block.floor(name), block.adaptive(name))])
        sentences = [
            f"{table.study.citation}, {table.entry.name}",
            block.setting,
            "Each cell: paper / ours",
            usual and f"Ours: {usual}{' unless noted' if len(extents) > 1 else ''}",
            f"Fewer than {LEAST} images: not comparable"
            if any(c.attacks and c.count < LEAST for c in measured)
            else "",
            table.summary,
        ]
        caption = " ".join(f"{sentence}." for sentence in sentences if sentence)
        sheets.append(PaperTable(caption, [*head, PlacedText("floor"), PlacedText("adaptive")], rows, notes))
    return sheets


def _extent(compared: ComparedCell) -> str:
    """Write how many images or trainings are behind our number, and the scale."""
    assert compared.record is not None
    return f"n = {compared.count} at {compared.record.scale} scale"


def _both(compared: ComparedCell, usual: str) -> str:
    if compared.ours is None:
        return f"{printed_text(compared)} / {NOT_RUN}"
    extent = _extent(compared)
    return f"{printed_text(compared)} / {our_text(compared)}{'' if extent == usual else f', {extent}'}"


def _markdown(table: ComparedTable) -> str:
    reasons = "".join(f"- {reason}\n" for reason in table.reasons)
    return as_markdown(_sheets(table)) + (f"\n{reasons}" if reasons else "")


def _latex(table: ComparedTable) -> str:
    comments = "".join(f"% {reason}\n" for reason in table.reasons)
    return comments + as_latex(_sheets(table))


def as_objects(table: ComparedTable) -> Iterator[dict[str, Any]]:
    """Yield one object per printed number."""
    for compared in table.cells:
        cell, record = compared.cell, compared.record
        named = {name: getattr(cell, name) for name in ("table", "setting", "row", "column", "metric", "unit")}
        numbers = {name: getattr(compared, name) for name in ("ours", "low", "high", "count", "status", "reason")}
        printed = {"paper": cell.number if cell.number is not None else cell.printed, "paper_spread": cell.spread}
        more = {"floor": compared.floor, "adaptive": compared.adaptive if compared.adaptive is not None else PENDING}
        facts = {
            name: getattr(record, name) if record else None
            for name in ("scale", "seed", "iterations", "seconds", "date", "machine", "code", "command")
        }
        yield {**named, **printed, **numbers, **more, **facts}


def _json(table: ComparedTable) -> str:
    facts = {"paper": table.study.citation, "table": table.entry.name, "summary": table.summary}
    return json.dumps({**facts, "cells": list(as_objects(table))}, indent=1, ensure_ascii=False)


def _csv(table: ComparedTable) -> str:
    objects = list(as_objects(table))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(objects[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(objects)
    return text.getvalue()


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top }
small { color: #555 } .agrees { background: #e5f4ea } .differs { background: #fdeadf } .not { color: #666 }
"""


def _html(table: ComparedTable) -> str:
    parts = [
        f"<h1>{escape(table.entry.name)}: {escape(table.entry.shows)}</h1>",
        f"<p>{escape(table.study.citation)}</p><p><strong>{escape(table.summary)}.</strong></p>",
        figure_of(table),
    ]
    for block in blocks(table):
        head = "".join(f"<th>{escape(heading(column))}</th>" for column in block.columns)
        parts.append(
            f"<h2>{escape(block.setting)}</h2><table><thead><tr><th>row</th>{head}<th>floor</th><th>adaptive</th>"
        )
        parts.append("</tr></thead><tbody>")
        for name, row in block.rows.items():
            cells = "".join(_html_cell(row.get(column)) for column in block.columns)
            parts.append(
                f"<tr><th>{escape(name)}</th>{cells}<td>{block.floor(name)}</td><td>{block.adaptive(name)}</td></tr>"
            )
        parts.append("</tbody></table>")
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in table.reasons)
    parts.append(f"<ul>{reasons}</ul><p>Each cell: paper, below it ours. {escape(LEGEND)}")
    parts.append(" ".join(f"{name}: {meaning}." for name, meaning in MEANING.items()) + "</p>")
    title = f"{table.study.key} {table.entry.name}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _html_cell(compared: ComparedCell | None) -> str:
    if compared is None:
        return "<td></td>"
    ours = our_text(compared) if compared.ours is not None else NOT_RUN
    command = compared.record.command if compared.record else ""
    title = escape("\n".join(part for part in (compared.status, compared.reason, command) if part), quote=True)
    name = compared.status.split()[0]
    return f'<td class="{name}" title="{title}">{escape(printed_text(compared))}<br><small>{escape(ours)}</small></td>'


FORMATS: dict[str, Callable[[ComparedTable], str]] = {
    "text": as_text,
    "markdown": _markdown,
    "latex": _latex,
    "html": _html,
    "json": _json,
    "csv": _csv,
}
"""How a compared table can be written."""
