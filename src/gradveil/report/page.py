"""From a run directory to one HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradveil.audit.attack_check import STATES, descent, examine
from gradveil.audit.attack_check import guesses as only_guesses
from gradveil.audit.attack_selection import ATTACKERS, POSITIONS
from gradveil.audit.findings import Findings, findings, headline, hits, strongest
from gradveil.audit.result_rows import BASELINES, Row
from gradveil.audit.run_directory import RUN, Run, Trial, load_run
from gradveil.audit.run_warnings import proven
from gradveil.audit.threat_model import scope, threat_model
from gradveil.audit.verdict import LEVELS, Verdict
from gradveil.core.errors import fail
from gradveil.core.formatting import interval, listing, percent, plural, size
from gradveil.core.private_files import write_private
from gradveil.federated.training_run import is_training
from gradveil.report import method, pareto, plots, trial_table
from gradveil.report.rendering import Album, contact_sheet, data_uri, pairs, png, render
from gradveil.report.training_page import training_page


def section(rows: Sequence[Row]) -> dict[str, Any]:
    """Work out what the page says of recorded updates: whether there are any, what has no score, what does not fit."""
    return {
        "recorded": any("observed" in row.info for row in rows),
        "guesses": guesses([row for row in rows if row.trial.unscored is not None]),
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
            "target_clients": [
                _target_client(told, record)
                for told, record in zip(row.info["observed"], row.trial.records, strict=True)
            ],
            "picture": _picture(row),
        }
        for row in rows
    ]


def _target_client(told: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    fell = None if record["objective"] is None else (record["initial"], record["objective"])
    return {"who": f"client {told['client']}, round {told['round']}", "labels": record["predicted"], "fell": fell}


def _picture(row: Row) -> str | None:
    images = row.trial.images()
    if images is None:
        return None
    flat = images["reconstruction"].flatten(0, 1)
    return data_uri(png(contact_sheet(flat if flat.shape[1] in (1, 3) else flat[:, :1])))


def notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List what of the records contradicts a simulated client, or had to be assumed.

    Of which simulated client, and what.
    """
    return list(dict.fromkeys((row.defence, note) for row in rows for note in row.info.get("notes", ())))


NAME = "report.html"
"""What a report is called within its run directory."""

_ELSEWHERE = "choose another place with --out"
_ICONS = {"broken": "✕", "leaks": "!", "not broken": "✓", "inconclusive": "~", "not tested": "?"}
"""A level never rests on its colour alone."""

_WORDS = {
    "levels": {level: (_ICONS[level], *words) for level, words in LEVELS.items()},
    "positions": POSITIONS,
    "states": STATES,
}
_WORDS |= {"hits": hits, "trained_on": trial_table.TRAINED_ON}
_WORDS |= {
    "headline": headline,
    "strongest": strongest,
    "interval": interval,
    "descent": descent,
    "examine": examine,
    "proven": proven,
}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of an audit's or a training's folder, by default as `report.html` in it, and return its path.

    An audit's page shows private images, so only its owner may read it. It appears whole or not at all.
    """
    out = Path(run_dir) / NAME if out is None else Path(out)
    is_audit = (Path(run_dir) / RUN).is_file() or not is_training(Path(run_dir))
    text = page(load_run(Path(run_dir))) if is_audit else training_page(Path(run_dir))
    if out.is_dir():
        raise fail(str(out), "is a folder", f"name a file in it, such as {out / NAME}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(str(out), f"cannot be written: {error.strerror}", _ELSEWHERE) from error
    write_private(out, text.encode(), _ELSEWHERE)
    return out


def page(run: Run) -> str:
    """Render a run as HTML. Every text of the run is escaped."""
    scripts = ("page.js", "axes.js", "charts.js", "pareto.js", "budget.js", "gallery.js")
    return render("report.html.j2", scripts, context(run))


def context(run: Run) -> dict[str, Any]:
    """Work out everything the template shows."""
    failed = [trial for trial in run.trials if trial.broken]
    unfit = [(trial.info["defence"], trial.info["attack"], trial.failed) for trial in run.trials if trial.unfit]
    done = [trial for trial in run.trials if trial.failed is None]
    found = findings([*done, *(trial for trial in run.trials if trial.failed is not None)])
    every = found.finished
    rows = [row for row in every if row.trial.unscored is None]
    judged = found.verdicts
    album = Album()
    shots = pairs(rows, album)
    shown = trial_table.columns(rows)
    spent = plots.charts(judged)
    config = run.info.get("config") or {}
    fronts = pareto.charts(judged, [trial for trial in run.trials if trial.failed is not None], config)
    return {
        "version": run.info.get("gradveil"),
        "name": run.info.get("name") or "audit",
        "date": str(run.info.get("created", "")).replace("T", " ")[:16],
        "machine": _machine(run.info),
        "threat": threat_model(every, config),
        **section(every),
        "limited": config.get("budget") is not None,
        "thresholds": sorted({float(trial.info.get("threshold", 0.5)) for trial in done}),
        "cards": cards(judged, failed, len(every) - len(rows)),
        **_stated(found, config),
        "baselines": BASELINES,
        **_WORDS,
        "attackers": {key: told for key, told in ATTACKERS.items() if any(row.attacker == key for row in every)},
        "rows": rows,
        "columns": shown,
        "body": trial_table.body(rows, shown),
        "unbounded": trial_table.unbounded(rows),
        "csv": data_uri(trial_table.as_csv(rows, shown).encode(), "text/csv;charset=utf-8"),
        "sheets": album.sheets,
        "budget": spent,
        **pareto.section(fronts, rows),
        "data": {
            **_script_data(rows, shots, album),
            "points": plots.points([row for row in rows if not row.is_control]),
            "curves": plots.curves(spent, rows),
            "fronts": plots.fronts(fronts, rows),
            "side_by_side": side_by_side(judged, shots),
        },
        "has_images": bool(shots),
        "failed": failed,
        "unfit": list(dict.fromkeys(unfit)),
        **_to_know(run),
        "knowledge": method.knowledge(every),
        "descriptions": method.descriptions(every),
        "guarantees": method.guarantees(every),
        "bounds": method.bounds(rows),
        "suspicions": method.suspicions(every),
        "citations": method.citations(every),
        "statuses": method.statuses(every, len(failed)),
        "missing": method.missing([c.info for c in run.trials], [r for row in rows for r in row.trial.records]),
        "facts": method.facts(run.info, every),
        "command": run.info.get("command", ""),
        "config": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _stated(found: Findings, config: Mapping[str, Any]) -> dict[str, Any]:
    """State the verdicts, what the control shows, and what was not tried."""
    return {
        "verdict": found.sentence,
        "verdicts": found.verdicts,
        "gaps": found.gaps,
        "settings": list(dict.fromkeys(entry.setting for entry in found.entries)) if found.verdicts else [],
        "control": found.control,
        "scope": scope([row for row in found.finished if not row.is_control], config),
    }


def _to_know(run: Run) -> dict[str, Any]:
    """Say what no trial says: how many were planned, how many are not there yet, what no attack shows."""
    planned = len(run.info.get("trials") or ())
    return {
        "planned": planned,
        "unfinished": max(0, planned - len(run.trials)),
        "warnings": run.info.get("warnings", []),
    }


def _machine(info: Mapping[str, Any]) -> str:
    machine = info.get("machine") or {}
    cores = machine.get("cores")
    parts = [machine.get("cpu"), f"{cores} cores" if cores else None, machine.get("device")]
    return ", ".join(str(part) for part in parts if part)


def _script_data(rows: Sequence[Row], shots: list[dict[str, Any]], album: Album) -> dict[str, Any]:
    return {
        "pairs": shots,
        "sheets": [
            {"number": s.number, "columns": s.columns, "height": s.height, "width": s.width} for s in album.sheets
        ],
        "rows": [
            {
                "number": row.number,
                "defence": row.defence_name,
                "attack": row.attack,
                "who": "" if row.attacker == "undefended" else ATTACKERS[row.attacker][0],
                "seed": row.seed,
                "setting": row.setting.title(),
            }
            for row in rows
        ],
    }


def cards(judged: Sequence[Verdict], failed: Sequence[Trial], unscored: int = 0) -> list[dict[str, str]]:
    """Choose the key numbers: the leak without a defence, the best defence, its price, and how much was run.

    Rates of different settings do not compare, so all come from the setting that leaks most (without a defence, where
    that was run). Of defences with the same rate the cheapest is the best: fewest bytes, then the smallest distance.
    """
    found = []
    runs = sum(len(v.rows) for v in judged) + unscored
    bare = max((v for v in judged if v.undefended), key=lambda v: v.rate, default=None)
    worst = bare or max(judged, key=lambda v: v.rate, default=None)
    judged = [v for v in judged if worst is not None and v.setting == worst.setting]
    if bare is not None:
        found.append(_rate_card("Identifiable without a defence", bare, f"{bare.best.attack} is the strongest attack"))
    defended = [v for v in judged if not v.undefended]
    held = [v for v in defended if v.level in ("not broken", "leaks") and not v.doubts]
    known = [v for v in held if any(r.attacker == "adaptive" and not only_guesses(r) for r in v.judged)]
    if known:
        best = min(known, key=lambda v: (v.rate, v.price.order))
        card = _rate_card("Best defence against attackers who know it", best, best.best.defence_name)
        # The table below has them, and whoever reads it should not wonder.
        lower = [v.best.defence_name for v in defended if v.rate < best.rate]
        card["detail"] += f" · lower, but not proven: {listing(lower)}" if lower else ""
        found.append(card)
        found.append(_price_card(best))
    elif defended:
        best = min(defended, key=lambda v: (v.rate, v.price.order))
        found.append(_rate_card("Lowest rate, not proven", best, f"{best.best.defence_name}: see its verdict"))
        found.append(_price_card(best))
    detail = plural(len(failed), "failed attack run") + ", listed below" if failed else "none failed"
    found.append({"label": "Attacks run", "value": str(runs), "detail": detail, "level": ""})
    return found


def side_by_side(judged: Sequence[Verdict], shots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Choose, for every setting, the trials that show the same targets under every defence, strongest attacks only.

    A defence whose strongest attack met other target clients (on another seed, say) is left out.
    """
    pictured = {shot["row"]: shot["truth"] for shot in shots}
    found = []
    for setting in dict.fromkeys(verdict.setting for verdict in judged):
        best = [v.best for v in judged if v.setting == setting and v.best.number in pictured]
        same = [row.number for row in best if pictured[row.number] == pictured[best[0].number]]
        if len(same) > 1:
            found.append({"title": setting.title(), "rows": same})
    return found


def _rate_card(label: str, verdict: Verdict, detail: str) -> dict[str, str]:
    images = plural(verdict.images, "image")
    counted = f"{verdict.identifiable} of {images} recovered and identified, 95% CI {interval(*verdict.interval)}"
    return {
        "label": label,
        "value": percent(verdict.rate),
        "detail": " · ".join(filter(None, (detail, counted, verdict.leaked))),
        "level": verdict.level,
    }


def _price_card(verdict: Verdict) -> dict[str, str]:
    cost = verdict.price
    return {"label": "Its price: bytes of an update", "value": size(cost.sent), "detail": cost.detail(), "level": ""}
