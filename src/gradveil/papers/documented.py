"""What the documentation shows of the papers: claims and cells by the records alone, local runs left out."""

from __future__ import annotations

from gradveil.papers.claims import JudgedClaim, judged_claims
from gradveil.papers.comparison import PENDING, ComparedCell, ComparedTable, Measured, compare
from gradveil.papers.paper import PaperStudy, studies
from gradveil.papers.records import best, read, records_folder
from gradveil.papers.table_formats import our_text, printed_text

CORES = 2
"""Cores of the machine whose hours the documentation names."""


def recorded(paper: PaperStudy) -> Measured:
    """Choose the best record of each place, local runs left out."""
    folder = records_folder()
    return best(read(folder / paper.key) if folder else ())


def recorded_claims() -> list[JudgedClaim]:
    """Judge the claims of every paper by the records alone."""
    return [claim for paper in studies().values() for claim in judged_claims(paper, recorded(paper))]


def recorded_tables() -> list[ComparedTable]:
    """Compare every table that is measured with the records alone."""
    found = []
    for paper in studies().values():
        measured = recorded(paper)
        compared = (compare(paper, entry.name, measured) for entry in paper.tables.values() if not entry.in_text)
        found += [paper.with_times(each, measured, workers=CORES) for each in compared]
    return found


def recorded_cells() -> list[list[tuple[str, ...]]]:
    """List every printed number next to ours for the documentation: cells of a text, a smaller one, and a sort key."""
    return [_documented(table, one) for table in recorded_tables() for one in table.cells]


def _documented(table: ComparedTable, one: ComparedCell) -> list[tuple[str, ...]]:
    cell, record = one.cell, one.record
    facts = (
        f"{one.count} at scale {record.scale}, seed {record.seed}, {record.date}, {record.machine}" if record else ""
    )
    adaptive = "" if not one.attacks else PENDING if one.adaptive is None else f"{one.adaptive:.3g}"
    return [
        (f"{table.study.content.authors.split(',')[0]} {table.study.content.year}",),
        (table.entry.name,),
        (cell.setting,),
        (cell.row,),
        (" ".join(part for part in (cell.column, cell.metric) if part),),
        (printed_text(one), "", str(cell.number or "")),
        (our_text(one), "", "" if one.ours is None else str(one.ours)),
        (one.status, one.reason),
        ("" if one.floor is None else f"{one.floor:.3g}",),
        (adaptive,),
        (facts, record.command if record else ""),
    ]
