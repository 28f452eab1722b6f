"""What the interactive plots are drawn from: one point a cell, or one a defence beside the price of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradveil.audit.attacker import ATTACKERS
from gradveil.audit.rows import Row
from gradveil.audit.verdict import LEVELS, strength
from gradveil.core.words import interval, number, percent, size
from gradveil.report.pareto import AXES, Chart, Spot, View, price, when


def series(rows: Sequence[Row]) -> dict[str, int]:
    """Give every defence its number in the run's order: one colour and shape in all plots."""
    return {name: place for place, name in enumerate(dict.fromkeys(row.defence for row in rows))}


def points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Describe every cell as a point: its series (the defence), its coordinates and what its tooltip says.

    `best` marks the strongest attack of each kind of attacker on each defence, over attacks and seeds.
    """
    places = series(rows)
    seeds, settings = {row.seed for row in rows}, {row.setting for row in rows}
    strongest = _strongest(rows)
    found = []
    for row in rows:
        if not row.images:
            continue
        low, high = row.bounds
        about = [f"{row.attack} · {ATTACKERS[row.attacker][0]}"]
        about += [f"seed {row.seed}"] if len(seeds) > 1 else []
        about += [row.setting.title()] if len(settings) > 1 else []
        found.append(
            {
                "series": places[row.defence],
                "name": row.defence_name,
                "attacker": row.attacker,
                "bytes": row.info.get("bytes_sent"),
                "distance": row.info.get("distance"),
                "asr": row.asr,
                "low": low,
                "high": high,
                "ssim": row.mean("ssim"),
                "floor": row.floor,
                "group": f"{row.defence}|{row.setting}",
                "seed": row.seed,
                "best": row.number in strongest,
                "lines": [
                    *about,
                    f"{row.recovered} of {row.images} recovered, {percent(row.asr)} ({interval(low, high)})",
                    f"mean SSIM {number(row.mean('ssim'))} · guessing {percent(row.floor)}",
                    f"{size(row.info.get('bytes_sent'))} sent · distance {number(row.info.get('distance'))}",
                ],
            }
        )
    return found


def _strongest(rows: Sequence[Row]) -> set[int]:
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        kind = (row.defence, row.setting, row.attacker)
        if row.images and (kind not in best or strength(row) > strength(best[kind])):
            best[kind] = row
    return {row.number for row in best.values()}


def fronts(found: Sequence[Chart], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Describe the charts for the page's script; a defence has the colour that it has in the other plots."""
    places = series(rows)
    return [
        {
            "views": [
                {
                    "said": {axis.key: view.sentence(axis) for axis in AXES},
                    "spots": [_drawn(spot, view, chart, places) for spot in view.spots],
                }
                for view in chart.views
            ]
        }
        for chart in found
    ]


def _drawn(spot: Spot, view: View, chart: Chart, places: Mapping[str, int]) -> dict[str, Any]:
    best = spot.verdict.best
    steps = [*chart.stages[spot.name].items()]
    return {
        "series": places[best.defence],
        "name": spot.name,
        "bare": best.undefended,
        "bound": spot.is_bound or not spot.whole,
        "vague": spot.is_vague,
        "rate": spot.rate,
        "bounds": spot.bounds,
        "prices": spot.prices,
        "front": {key: spot.name in names for key, names in view.members.items()},
        "trail": [[place / max(1, len(steps) - 1), each.rate] for place, (_, each) in enumerate(steps)]
        if view is chart.worst
        else [],
        "lines": list(_lines(spot, view, chart)),
    }


def _lines(spot: Spot, view: View, chart: Chart) -> Iterator[str]:
    low, high = spot.bounds
    seeds = f", the mean of {len(spot.rates)} seeds" if len(spot.rates) > 1 else ""
    yield f"{percent(spot.rate)} identifiable {when(spot.stage)}{seeds} ({interval(low, high)})"
    yield f"{LEVELS[spot.verdict.level][0]} · {spot.verdict.best.attack}"
    if view is chart.worst:
        yield ", ".join(chart.trail(spot))
    yield " · ".join(f"{axis.title.lower()} {price(spot, axis)[0]}" for axis in AXES)
