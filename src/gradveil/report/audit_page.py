"""The page of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.audit.attack_check import STATES, descent, examine
from gradveil.audit.attack_check import guesses as only_guesses
from gradveil.audit.attack_selection import ATTACKERS, POSITIONS
from gradveil.audit.defence_costs import Costs, costs_of
from gradveil.audit.findings import Findings, findings, headline, hits, strongest
from gradveil.audit.result_rows import BASELINES, Row, TrialSetting
from gradveil.audit.run_directory import Run, Trial
from gradveil.audit.threat_model import scope, threat_model
from gradveil.audit.verdict import Verdict
from gradveil.core.formatting import interval, listing, percent, plural, size
from gradveil.federated.training_groups import proven
from gradveil.report import method, pareto, plots, trial_table
from gradveil.report.page import PageSection, card, frame, render, section
from gradveil.report.pictures import Album, contact_sheet, data_uri, pairs, png
from gradveil.report.table import table_body

_FUNCTIONS = {
    "headline": headline,
    "strongest": strongest,
    "hits": hits,
    "interval": interval,
    "descent": descent,
    "examine": examine,
    "proven": proven,
}
_TERMS = {
    "positions": POSITIONS,
    "states": STATES,
    "baselines": BASELINES,
    "trained_on": trial_table.TRAINED_ON,
}


def audit_page(run: Run, costs: Costs | None = None) -> str:
    """Render an audit as HTML. Every text of the run is escaped. `costs` replaces what its own trainings say."""
    shown = context(run, costs)
    return render("audit.html.j2", sections(shown), shown)


def sections(shown: Mapping[str, Any]) -> list[PageSection]:
    """Choose the sections of the page: recorded updates without ground truth have no verdict."""
    rows, is_scored = shown["rows"], bool(shown["rows"]) or not shown["guesses"]
    every = (
        (shown["recorded"], section("observed", "Records", "Recorded updates")),
        (is_scored, section("verdicts", "Verdicts", "Verdicts")),
        (shown["fronts"], section("front", "Front", "Leak against cost")),
        (rows, section("tradeoffs", "Cost", "What privacy costs")),
        (shown["budget"], section("budget", "Budget", "Quality against budget")),
        (is_scored, section("images", "Images", "What the attacker sees")),
        (is_scored, section("table", "Table", "Every attack run")),
        (True, section("method", "Method", "Method", "audit_method")),
    )
    return [each for is_shown, each in every if is_shown]


def context(run: Run, costs: Costs | None = None) -> dict[str, Any]:
    """Return the values that the template shows."""
    failed = [trial for trial in run.trials if trial.broken]
    finished = [trial for trial in run.trials if trial.failed is None]
    empty = [trial for trial in run.trials if trial.failed is not None]
    costs = costs_of(run) if costs is None else costs
    result = findings([*finished, *empty], costs, str(run.info.get("command", "")))
    every = result.finished
    rows = [row for row in every if row.trial.unscored is None]
    unscored = [row for row in every if row.trial.unscored is not None]
    config = run.info.get("config") or {}
    album = Album()
    shots = pairs(rows, album)
    progress = plots.progress_charts(result.verdicts)
    fronts = pareto.charts(result.verdicts, empty, config, costs)
    return {
        **frame(run.info, "Gradient inversion audit", run.info.get("name") or "audit", config, _hardware(run.info)),
        **_title(run, result, config),
        **_TERMS,
        **_FUNCTIONS,
        "cards": cards(result.verdicts, failed, len(unscored)),
        "recorded": any("observed" in row.info for row in every),
        "guesses": guesses(unscored),
        "notes": notes(every),
        "thresholds": sorted({float(trial.info.get("threshold", 0.5)) for trial in finished}),
        "verdicts": result.verdicts,
        "gaps": result.gaps,
        "settings": _settings(result),
        "control": result.control,
        "rows": rows,
        **_table(rows),
        "statuses": method.statuses(every, len(failed)),
        "missing": method.missing([t.info for t in run.trials], [r for row in rows for r in row.trial.records]),
        "has_images": bool(shots),
        "sheets": album.sheets,
        "budget": progress,
        **pareto.section(fronts, rows),
        "failed": failed,
        "unfit": list(dict.fromkeys((t.info["defence"], t.info["attack"], t.failed) for t in empty if t.unfit)),
        **method.section(run.info, every, rows),
        "data": {
            **_script_data(rows, shots, album),
            "points": plots.points([row for row in rows if not row.is_control]),
            "curves": plots.curves(progress, rows),
            "fronts": plots.fronts(fronts, rows),
            "side_by_side": side_by_side(result.verdicts, shots),
        },
    }


def _title(run: Run, result: Findings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts above the key numbers."""
    planned = len(run.info.get("trials") or ())
    settings = _settings(result)
    several = f"{len(settings)} settings, judged separately; the key numbers are of the one that leaks most"
    return {
        "subtitle": several if len(settings) > 1 else "".join(setting.title() for setting in settings),
        "verdict": result.sentence,
        "recommendation": result.recommendation,
        "threat": threat_model(result.finished, config),
        "scope": scope([row for row in result.finished if not row.is_control], config),
        "planned": planned,
        "unfinished": max(0, planned - len(run.trials)),
        "warnings": run.info.get("warnings", []),
    }


def _hardware(info: Mapping[str, Any]) -> str:
    machine = info.get("machine") or {}
    cores = f"{machine['cores']} cores" if machine.get("cores") else None
    return ", ".join(str(part) for part in (machine.get("cpu"), cores, machine.get("device")) if part)


def _settings(result: Findings) -> list[TrialSetting]:
    return list(dict.fromkeys(entry.setting for entry in result.entries)) if result.verdicts else []


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table of all trials and its CSV."""
    columns = trial_table.columns(rows)
    csv = data_uri(trial_table.trials_as_csv(rows, columns).encode(), "text/csv;charset=utf-8")
    return {
        "table_label": "Scores, controls, costs and attack check of every attack run",
        "columns": columns,
        "body": table_body(trial_table.ranked(rows), columns),
        "sorted_by": "asr",
        "unbounded": trial_table.unbounded(rows),
        "exports": [("Download CSV", "", csv)],
    }


def guesses(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the reconstructions without a ground truth: pictures, labels, objectives."""
    return [
        {
            "defence": row.defence,
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "descent": descent(row),
            "target_clients": [
                {
                    "name": f"client {observed['client']}, round {observed['round']}",
                    "labels": record["predicted"],
                    "objectives": (record["initial"], record["objective"]),
                }
                for observed, record in zip(row.info["observed"], row.trial.records, strict=True)
            ],
            "picture": _picture(row),
        }
        for row in rows
    ]


def _picture(row: Row) -> str | None:
    images = row.trial.images()
    if images is None:
        return None
    flat = images["reconstruction"].flatten(0, 1)
    return data_uri(png(contact_sheet(flat if flat.shape[1] in (1, 3) else flat[:, :1])))


def notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the facts of the records that contradict a simulated client or that it assumes, each with that client."""
    return list(dict.fromkeys((row.defence, note) for row in rows for note in row.info.get("notes", ())))


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
                "attacker": "" if row.attacker == "undefended" else ATTACKERS[row.attacker][0],
                "seed": row.seed,
                "setting": row.setting.title(),
            }
            for row in rows
        ],
    }


def cards(judged: Sequence[Verdict], failed: Sequence[Trial], unscored: int = 0) -> list[dict[str, str]]:
    """Choose the key numbers: the leak without a defence, the best defence, its cost, and the number of attack runs.

    Rates of different settings do not compare, so all come from the setting that leaks most (without a defence, where
    that was run). Of defences with the same rate the cheapest is the best: fewest bytes, then the smallest distance.
    """
    result = []
    runs = sum(len(v.rows) for v in judged) + unscored
    undefended = max((v for v in judged if v.undefended), key=lambda v: v.rate, default=None)
    worst = undefended or max(judged, key=lambda v: v.rate, default=None)
    judged = [v for v in judged if worst is not None and v.setting == worst.setting]
    if undefended is not None:
        detail = f"{undefended.best.attack} is the strongest attack"
        result.append(_rate_card("Identifiable without a defence", undefended, detail))
    defended = [v for v in judged if not v.undefended]
    sound = [v for v in defended if v.level in ("not broken", "leaks") and not v.doubts]
    attacked = [v for v in sound if any(r.attacker == "adaptive" and not only_guesses(r) for r in v.judged)]
    if attacked:
        best = min(attacked, key=lambda v: (v.rate, v.price.order))
        best_card = _rate_card("Best defence against adaptive attacks", best, best.best.defence_name)
        # The table below shows lower rates, so the card names them.
        lower = [v.best.defence_name for v in defended if v.rate < best.rate]
        best_card["detail"] += f" · lower, but not proven: {listing(lower)}" if lower else ""
        result += [best_card, _cost_card(best)]
    elif defended:
        best = min(defended, key=lambda v: (v.rate, v.price.order))
        detail = f"{best.best.defence_name}: see its verdict"
        result += [_rate_card("Lowest rate, not proven", best, detail), _cost_card(best)]
    detail = plural(len(failed), "failed attack run") + ", listed below" if failed else "none failed"
    return [*result, card("Attacks run", str(runs), detail)]


def _rate_card(label: str, verdict: Verdict, detail: str) -> dict[str, str]:
    images = plural(verdict.images, "image")
    counted = f"{verdict.identifiable} of {images} recovered and identified, 95% CI {interval(*verdict.interval)}"
    details = " · ".join(filter(None, (detail, counted, verdict.leaked)))
    return card(label, percent(verdict.rate), details, verdict.level)


def _cost_card(verdict: Verdict) -> dict[str, str]:
    return card("Its cost: bytes of an update", size(verdict.price.sent), verdict.price.detail())


def side_by_side(judged: Sequence[Verdict], shots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Choose, for every setting, the trials that show the same targets under every defence, strongest attacks only.

    A defence whose strongest attack has other target clients (of another seed, for example) is left out.
    """
    truths = {shot["row"]: shot["truth"] for shot in shots}
    result = []
    for setting in dict.fromkeys(verdict.setting for verdict in judged):
        best = [v.best for v in judged if v.setting == setting and v.best.number in truths]
        same = [row.number for row in best if truths[row.number] == truths[best[0].number]]
        if len(same) > 1:
            result.append({"title": setting.title(), "rows": same})
    return result
