"""The threat model of a run in words: what the attacker sees, knows and may spend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradveil.audit.attack_selection import planted_for
from gradveil.audit.audit_config import AUTO
from gradveil.audit.budgets import AUTO_SECONDS, read_budget
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import duration, listing, plural

SERVER = "An honest-but-curious server keeps the global parameters and what it receives"
MALICIOUS = "A malicious server sends a model of its own making, and keeps it and what it receives"
"""Who attacks: how every threat model begins; the second where no attack keeps to the honest model."""
_ROUNDS = {"first": "the first one", "last": "the last one", "all": "all of them"}
_LATE = 1.5
"""Working time is foreseen from a few iterations: up to so many times a budget in seconds was meant to be kept."""
_MANY = 3
"""More secrets than these are counted instead of named."""


def threat_model(rows: Sequence[Row], config: Mapping[str, Any]) -> str:
    """Say in a few sentences what the attackers of a run saw, could spend and were given.

    `config` is the run's resolved configuration.
    """
    if not rows:
        return f"{SERVER}. No attack run has finished."
    clients = _distinct(row.setting.update for row in rows)
    told = [
        f"{MALICIOUS if all(row.planted for row in rows) else SERVER}: {listing(clients)}.",
        *_trained(rows),
        _watched(rows),
        *_spent(config.get("budget"), rows),
        *_given(rows),
        *_planted(rows),
    ]
    return " ".join(told)


def unknown_to_all(rows: Sequence[Row]) -> str:
    """Warn where nobody who attacked a defence knows it; empty where somebody does, or where there is no defence."""
    kinds = {row.attacker for row in rows if not row.undefended}
    if not kinds or "adaptive" in kinds:
        return ""
    what = "all of this defence" if "aware" in kinds else "this defence"
    return f"No attacker who knows {what} was run: add --attack adaptive."


def scope(rows: Sequence[Row], config: Mapping[str, Any]) -> str:
    """State what an audit covers, images, and what these trials left untried, each with the setting that tries it."""
    missing = [f"{name} ({setting})" for name, setting in untried(rows, config)]
    rest = f" Not tried: {listing(missing)}." if missing else ""
    covers = "Scope: reconstruction of images, no other data and no inference of membership or properties."
    return f"{covers}{rest}"


def untried(rows: Sequence[Row], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List what these trials left untried, each with the setting that tries it."""
    missing = list[tuple[str, str]]()
    if rows and not any(row.attacker in ("undefended", "adaptive") for row in rows):
        missing.append(("adaptive attacks", "attack adaptive"))
    if rows and not any("observed" in row.info for row in rows):
        sent = "attack malicious" if planted_for("none", rows[0].words.kind) else f"no attack on {rows[0].words.kind}"
        missing += [] if any(row.planted for row in rows) else [("a malicious server", sent)]
        missing += [] if any(row.setting.batch > 1 for row in rows) else [("batches", "client.batch")]
        missing += [] if any(row.local for row in rows) else [("local training", "client.local")]
        weights = (config.get("model") or {}).get("weights")
        known = weights or any(row.setting.trained for row in rows)
        missing += [] if known else [("trained weights", "model.weights, --train")]
        missing += _rounds_untried(rows)
    return missing


def _rounds_untried(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Name what no attack made of several rounds: watching them is not using them."""
    if not any(row.setting.round for row in rows):
        return [("several rounds", "rounds")]
    if any(len(row.rounds_used or ()) > 1 for row in rows):
        return []
    return [("more than one of the rounds watched", "attack 'portfolio' or averaging")]


def _trained(rows: Sequence[Row]) -> Iterator[str]:
    """Say whose clients are attacked where there was a training, and when."""
    stages = sorted({row.setting.trained for row in rows if row.setting.trained is not None})
    if stages:
        when = listing(f"after {plural(stage, 'round')}" if stage else "before it" for stage in stages)
        yield f"They are clients of a training, attacked {when}, with all that they keep and images they train on."


def _watched(rows: Sequence[Row]) -> str:
    """Say how many rounds were watched, and which of them each attack looks at."""
    counts = sorted({row.setting.round + 1 for row in rows})
    if counts == [1]:
        return "It watches one round."
    attacks = _presets(rows)
    used = {row.attack: which for row in rows if (which := _looks_at(row))}
    watches = f"It watches {listing(map(str, counts))} rounds"
    if len(set(used.values())) == 1 and len(used) == len(attacks):
        return f"{watches}, and every attack uses {_ROUNDS[next(iter(used.values()))]}."
    by_use = {which: [attack for attack in used if used[attack] == which] for which in _distinct(used.values())}
    said = [f"{_ROUNDS[which]} by {listing(_called(some, attacks))}" for which, some in by_use.items()]
    return f"{watches}, used as follows: {'; '.join(said)}." if said else f"{watches}."


def _looks_at(row: Row) -> str | None:
    """Say which rounds an attack used; None where that is not known."""
    used, watched = row.rounds_used, row.setting.round + 1
    if used is None:
        return None
    return "all" if len(used) == watched else "first" if used[0] == 0 else "last"


def _spent(budget: str | None, rows: Sequence[Row]) -> Iterator[str]:
    """Say what attackers may spend, and where they spent more: one iteration, or one epoch, is always made."""
    if budget is None:
        return
    if budget == AUTO:
        yield f"Attacks that set no iterations of their own share {_amount(AUTO_SECONDS, True)}."
        return
    limit = read_budget(budget)
    timed = limit.unit == "seconds"
    spent: dict[tuple[Any, ...], float] = {}
    for row in rows:
        whose = row.setting, row.defence, row.info.get("seed")
        spent[whose] = spent.get(whose, 0.0) + ((row.info.get("seconds") or 0.0) if timed else _iterations(row))
    most = max(spent.values(), default=0.0)
    yield f"All attacks on one defence that search or learn share {_amount(limit.amount, timed)}."
    if most > limit.amount * (_LATE if timed else 1):
        took = f"on one defence they took {_amount(most, timed)}"
        yield f"One iteration of each restart, or one epoch, is made in any case: {took}."


def _iterations(row: Row) -> float:
    """Count the target-iterations of a search, or the updates that a learner simulated."""
    return row.info["target_iterations"] + row.info["simulated"]


def _amount(amount: float, timed: bool) -> str:
    return f"{duration(amount)} of working time" if timed else f"{amount:,.0f} target-iterations"


def _given(rows: Sequence[Row]) -> Iterator[str]:
    """Say what was handed over, and to whom where not to all; secrets of the client come last, as upper bounds."""
    attacks = _presets(rows)
    open_to: dict[tuple[bool, str], list[str]] = {}
    hidden: dict[str, list[str]] = {}
    for row in rows:
        for grant in row.info.get("grants", ()):
            name, _, what = grant.partition(": ")
            if name not in row.secrets:
                open_to.setdefault((name == "public", what or grant), []).append(row.attack)
            elif name not in hidden.setdefault(row.attack, []):
                hidden[row.attack].append(name)
    handed = [f"{what}{_to(some, attacks)}" for (public, what), some in open_to.items() if not public]
    if handed:
        yield f"Handed over besides: {listing(handed)}."
    elif not open_to and not hidden:
        yield "Nothing else is given."
    for (public, what), some in open_to.items():
        if public:
            yield f"Public data for {listing(_called(_distinct(some), attacks))}: {what}."
    for attack, names in hidden.items():
        values = f"{len(names)} random tensors or statistics" if len(names) > _MANY else listing(names)
        yield f"Only as an upper bound, {listing(_called([attack], attacks))} was told the true values of {values}."


def _planted(rows: Sequence[Row]) -> Iterator[str]:
    """Say which attacks are a malicious server's, and what a client's guard says of the models that it sends."""
    found: dict[tuple[str, bool], list[str]] = {}
    who = "It" if all(row.planted for row in rows) else "Not a curious but a malicious server"
    for row in rows:
        if row.planted:
            found.setdefault((row.info["planted"], bool(row.info.get("guard"))), []).append(row.attack)
    for (what, caught), some in found.items():
        guard = "a client's guard tells it" if caught else "a client's guard does not tell it"
        called = listing(_called(_distinct(some), _presets(rows)))
        yield f"{who} sends a model with {what} ({called}); {guard}."


def _to(some: Sequence[str], attacks: Mapping[str, str]) -> str:
    return "" if set(some) == set(attacks) else f" (to {listing(_called(_distinct(some), attacks))})"


def _presets(rows: Sequence[Row]) -> dict[str, str]:
    """Map the attacks of a run, as texts, to the names of their presets."""
    return {row.attack: row.preset for row in rows}


def _called(some: Sequence[str], presets: Mapping[str, str]) -> list[str]:
    """Call attacks by the names of their presets where these tell them from all others, else by their whole texts."""
    others = {preset for attack, preset in presets.items() if attack not in some}
    return _distinct(attack if presets[attack] in others else presets[attack] for attack in some)


def _distinct(values: Any) -> list[str]:
    return list(dict.fromkeys(values))
