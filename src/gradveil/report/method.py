"""The method section of an audit's page: attacks, side information, guarantees and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.audit.attack_selection import ATTACKERS, POSITIONS
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import listing, number, plural


def section(info: Mapping[str, Any], rows: Sequence[Row], scored: Sequence[Row]) -> dict[str, Any]:
    """Return what the section of the page shows."""
    return {
        "limited": (info.get("config") or {}).get("budget") is not None,
        "knowledge": knowledge(rows),
        "positions": positions(rows),
        "descriptions": descriptions(rows),
        "guarantees": guarantees(rows),
        "bounds": bounds(scored),
        "suspicions": suspicions(rows),
        "citations": citations(rows),
        "facts": facts(info, rows),
    }


def distinct(values: Sequence[str]) -> list[str]:
    """Drop repetitions, keep the order."""
    return list(dict.fromkeys(values))


def descriptions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List every defence and attack with a one-line description."""
    titles = {row.defence_name: row.info.get("defence_title") for row in rows if not row.undefended}
    titles |= {row.attack: row.info.get("attack_title") for row in rows}
    return [(name, str(text)) for name, text in titles.items() if text and text != name]


def knowledge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """List the side information of the attackers and their treatment of each tensor; equal ones share an entry."""
    shared: dict[str, dict[str, Any]] = {}
    order = list(ATTACKERS)
    for row in sorted(rows, key=lambda row: order.index(row.attacker)):
        entry = {
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "grants": [grant for grant in row.info.get("grants", ()) if grant.partition(": ")[0] not in row.secrets],
            "secrets": list(row.secrets),
            "positions": [
                {"name": name, "how": how, "meaning": POSITIONS.get(how, "")}
                for name, how in (row.info.get("knowledge") or {}).items()
            ],
        }
        same = shared.setdefault(repr(entry), {**entry, "defences": []})
        if row.defence_name not in same["defences"]:
            same["defences"].append(row.defence_name)
    return list(shared.values())


def positions(rows: Sequence[Row]) -> dict[str, str]:
    """Define the treatments of hidden values that occur."""
    used = {how for row in rows for how in (row.info.get("knowledge") or {}).values()}
    return {how: meaning for how, meaning in POSITIONS.items() if how in used}


def guarantees(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the formal guarantees, each with its defences."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row.undefended and row.info.get("guarantee"):
            training = row.info.get("training") or {}
            is_planned = bool(row.info.get("epsilon")) or not training.get("epsilon")
            guarantee = str(row.info["guarantee"] if is_planned else training["guarantee"])
            names.setdefault("no formal guarantee" if guarantee == "none" else guarantee, []).append(row.defence_name)
    return [(listing(distinct(each)), guarantee) for guarantee, each in names.items()]


def bounds(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the lower bound of every attacker's mean squared error, or the reason why none is known."""
    names: dict[str, list[str]] = {}
    for row in rows:
        bound, reason = row.info.get("bound"), row.info.get("unbounded")
        if not row.words.has_prior:
            continue
        if bound and not row.undefended:
            text = f"no attacker can have a lower mean squared error than {number(bound['mse'])} in expectation"
            text += " from the model that the malicious server sends" if row.planted else ""
            names.setdefault(f"{text}; the mean image has {number(bound['prior'])}", []).append(row.defence_name)
        elif reason and not row.undefended:
            names.setdefault(f"no bound is known: {reason}", []).append(row.defence_name)
    return [(listing(distinct(each)), text) for text, each in names.items()]


def suspicions(rows: Sequence[Row]) -> list[str]:
    """List the warnings about differential privacy, each with its defence."""
    return distinct([f"{row.defence_name}: {warning}" for row in rows for warning in row.info.get("suspicions", ())])


def citations(rows: Sequence[Row]) -> list[str]:
    """List the papers behind the defences and attacks."""
    return distinct([str(paper) for row in rows for paper in row.info.get("citations", ())])


def statuses(rows: Sequence[Row], failed: int) -> str:
    """Count the statuses of all target client runs, and the attack runs that failed as a whole."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.statuses)
    parts = [f"{count:,} {status}" for status, count in total.most_common()]
    ended = (
        f"{plural(sum(total.values()), 'target client run')}: {listing(parts)}"
        if parts
        else "no target client was attacked"
    )
    return ended + (f"; {plural(failed, 'whole attack run')} failed" if failed else "")


def missing(infos: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the metrics that could not be computed, with the recorded reason."""
    result: dict[str, str] = {}
    for source in (*infos, *records):
        reasons = source.get("missing")
        if isinstance(reasons, Mapping):
            result |= {str(name): str(reason) for name, reason in reasons.items()}
        if isinstance(source.get("lpips"), str):
            result["lpips"] = str(source["lpips"])
    return sorted(result.items())


def facts(info: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List versions, machine, seeds and the changes that prepared the model for the audit."""
    machine = info.get("machine") or {}
    packages = info.get("packages") or {}
    seeds = sorted({row.seed for row in rows})
    changes = distinct([str(change) for row in rows for change in row.info.get("prepared", ())])
    values = [
        ("Gradveil", info.get("gradveil")),
        ("Packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("Python", machine.get("python")),
        ("Platform", machine.get("platform")),
        ("Processor", machine.get("cpu")),
        ("Cores", machine.get("cores")),
        ("Device", machine.get("device")),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Changed in the model", "; ".join(changes)),
        ("Configuration", info.get("config_hash")),
        ("Created", info.get("created")),
    ]
    return [(name, str(value)) for name, value in values if value not in (None, "")]
