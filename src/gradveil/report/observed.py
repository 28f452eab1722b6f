"""Recorded updates in the report: what came back where the truth is not known, and what does not fit the belief."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.audit.attacker import ATTACKERS
from gradveil.audit.health import descent
from gradveil.audit.rows import Row
from gradveil.report.pictures import contact_sheet, data_uri, png


def section(rows: Sequence[Row]) -> dict[str, Any]:
    """Work out what the page says of recorded updates: whether there are any, what has no score, what does not fit."""
    return {
        "recorded": any("observed" in row.info for row in rows),
        "guesses": guesses([row for row in rows if row.cell.unscored is not None]),
        "notes": notes(rows),
    }


def guesses(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Lay out what was reconstructed without a truth to compare it with: pictures, labels, objectives."""
    return [
        {
            "defence": row.defence,
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "descent": descent(row),
            "victims": [
                _victim(told, record) for told, record in zip(row.info["observed"], row.cell.records, strict=True)
            ],
            "picture": _picture(row),
        }
        for row in rows
    ]


def _victim(told: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    fell = None if record["objective"] is None else (record["initial"], record["objective"])
    return {"who": f"client {told['client']}, round {told['round']}", "labels": record["predicted"], "fell": fell}


def _picture(row: Row) -> str | None:
    images = row.cell.images()
    if images is None:
        return None
    flat = images["reconstruction"].flatten(0, 1)
    return data_uri(png(contact_sheet(flat if flat.shape[1] in (1, 3) else flat[:, :1])))


def notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List what of the records contradicts a belief, or had to be assumed: of which belief, and what."""
    return list(dict.fromkeys((row.defence, note) for row in rows for note in row.info.get("notes", ())))
