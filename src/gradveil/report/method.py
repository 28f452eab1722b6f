"""What was run and what the attackers knew: the method section of a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from gradveil.audit.attack_selection import ATTACKERS, POSITIONS
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import listing, number, plural


def contents(info: Mapping[str, Any]) -> dict[str, str]:
    """Say what weights and images of files a run is of, by what they are: names say nothing of them."""
    model, images = info["config"].get("model") or {}, info.get("images") or {}
    marks = [str(mark)[:12] for mark in images.values() if mark]
    found = {"images": "/".join(marks)} if marks else {}
    if model.get("weights") is not None:
        # An earlier version wrote them into the hash of all settings only.
        found["initial weights"] = str(info.get("weights") or info.get("config_hash"))[:12]
    return found


def told_apart(titles: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the settings that differ to titles that are the same.

    >>> told_apart(["a", "b"], [{"lr": 1}, {"lr": 2}]), told_apart(["a", "a"], [{"local": {"lr": 1}}, {"local": {}}])
    (['a', 'b'], ['a (local.lr = 1)', 'a (local.lr = null)'])
    """
    if len(set(titles)) == len(titles):
        return [*titles]
    flat = [dict(_flat(one)) for one in settings]
    keys = dict.fromkeys(key for one in flat for key in one)
    differ = [key for key in keys if len({json.dumps(one.get(key)) for one in flat}) > 1]
    said = [", ".join(f"{key} = {json.dumps(one.get(key))}" for key in differ) for one in flat]
    return [f"{title} ({more})" if more else title for title, more in zip(titles, said, strict=True)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(cast("Mapping[str, Any]", inner), f"{prefix}{key}.")
        else:
            yield prefix + key, inner


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
        facts = {
            "attack": row.attack,
            "attacker": ATTACKERS[row.attacker][0],
            "grants": [grant for grant in row.info.get("grants", ()) if grant.partition(": ")[0] not in row.secrets],
            "secrets": list(row.secrets),
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
    """Count how the runs of all target clients ended, and the attack runs that failed as a whole."""
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
