"""What was run and what the attackers were given: the part of a report that makes its numbers mean something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.audit.attacker import ATTACKERS, POSITIONS, secrets
from gradveil.audit.rows import Row
from gradveil.core.words import listing, number, plural


def distinct(values: Sequence[str]) -> list[str]:
    """Drop repetitions, keep the order."""
    return list(dict.fromkeys(values))


def descriptions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List what each defence and each attack does, in a line."""
    found = {row.defence_name: row.info.get("defence_title") for row in rows if not row.undefended}
    found |= {row.attack: row.info.get("attack_title") for row in rows}
    return [(name, str(text)) for name, text in found.items() if text and text != name]


def knowledge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """List what the attackers were granted and what they do about each tensor; equal ones share an entry."""
    shared: dict[str, dict[str, Any]] = {}
    order = list(ATTACKERS)
    for row in sorted(rows, key=lambda row: order.index(row.attacker)):
        hidden = secrets(row.info)
        facts = {
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "grants": [grant for grant in row.info.get("grants", ()) if grant.partition(": ")[0] not in hidden],
            "secrets": hidden,
            "positions": [
                {"name": name, "how": how, "meaning": POSITIONS.get(how, "")}
                for name, how in (row.info.get("knowledge") or {}).items()
            ],
        }
        entry = shared.setdefault(repr(facts), {**facts, "defences": []})
        if row.defence_name not in entry["defences"]:
            entry["defences"].append(row.defence_name)
    return list(shared.values())


def guarantees(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List what is proven of the defences: of whom, and what."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if not row.undefended and row.info.get("guarantee"):
            trained = row.info.get("training") or {}
            planned = bool(row.info.get("epsilon")) or not trained.get("epsilon")
            promise = str(row.info["guarantee"] if planned else trained["guarantee"])
            found.setdefault("no formal guarantee" if promise == "none" else promise, []).append(row.defence_name)
    return [(listing(distinct(names)), promise) for promise, names in found.items()]


def bounds(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List how large the mean squared error of every attacker must be, or why no bound is known."""
    found: dict[str, list[str]] = {}
    for row in rows:
        bound, why = row.info.get("bound"), row.info.get("unbounded")
        if bound and not row.undefended:
            said = f"no attacker can have a lower mean squared error than {number(bound['mse'])} in expectation"
            said += " from the model that the malicious server sends" if row.planted else ""
            found.setdefault(f"{said}; the mean image has {number(bound['prior'])}", []).append(row.defence_name)
        elif why and not row.undefended:
            found.setdefault(f"no bound is known: {why}", []).append(row.defence_name)
    return [(listing(distinct(names)), said) for said, names in found.items()]


def suspicions(rows: Sequence[Row]) -> list[str]:
    """List the warnings about differential privacy, each with its defence."""
    return distinct([f"{row.defence_name}: {told}" for row in rows for told in row.info.get("suspicions", ())])


def citations(rows: Sequence[Row]) -> list[str]:
    """List the papers behind what ran."""
    return distinct([str(paper) for row in rows for paper in row.info.get("citations", ())])


def statuses(rows: Sequence[Row], failed: int) -> str:
    """Count how the runs of all victims ended, and the attack runs that failed as a whole."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.statuses)
    parts = [f"{count:,} {status}" for status, count in total.most_common()]
    ended = f"{plural(sum(total.values()), 'victim run')}: {listing(parts)}" if parts else "no victim was attacked"
    return ended + (f"; {plural(failed, 'whole attack run')} failed" if failed else "")


def missing(infos: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Find the metrics that could not be computed, with the reason the run recorded."""
    found: dict[str, str] = {}
    for source in (*infos, *records):
        reasons = source.get("missing")
        if isinstance(reasons, Mapping):
            found |= {str(name): str(reason) for name, reason in reasons.items()}
        if isinstance(source.get("lpips"), str):
            found["lpips"] = str(source["lpips"])
    return sorted(found.items())


def facts(info: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List versions, machine, seeds and what was changed in the model so that it could be audited."""
    machine = info.get("machine") or {}
    packages = info.get("packages") or {}
    seeds = sorted({row.seed for row in rows})
    changes = distinct([str(change) for row in rows for change in row.info.get("prepared", ())])
    found = [
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
    return [(name, str(value)) for name, value in found if value not in (None, "")]
