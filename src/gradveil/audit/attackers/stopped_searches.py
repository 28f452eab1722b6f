"""What a budget stopped, and what more of it would buy, in a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradveil.audit.audit_config import AUTO
from gradveil.audit.result_rows import Row, short_names
from gradveil.core.formatting import duration, listing, number, percent

_HOUR = 3600
_MANY = 10
"""Below so many times what a budget allowed, an hour on one target client is not worth a sentence."""
_SOON = 180
"""Where the rest of all iterations takes fewer seconds than this, nobody needs a budget of an hour."""


def stopped(rows: Sequence[Row], config: Mapping[str, Any]) -> Iterator[str]:
    """Report in a line which attacks a budget stopped, and how long the rest of their iterations would take."""
    shares: dict[str, list[float]] = {}
    names, rest = short_names(row.attack for row in rows), 0.0
    for row in rows:
        if row.budget_share is not None:
            shares.setdefault(names[row.attack], []).append(row.budget_share)
            rest += (row.info.get("seconds") or 0.0) * (1 / row.budget_share - 1)
    if shares:
        spans = (" to ".join(dict.fromkeys(map(percent, (min(some), max(some))))) for some in shares.values())
        each = listing(f"{name} at {span}" for name, span in zip(shares, spans, strict=True))
        own = "the iterations that their authors use" if config.get("budget") == AUTO else "their own iterations"
        yield (
            f"Budget: it stopped {each} of {own}; the rest would take about {duration(rest)} of computing "
            f"(budget=None, or --budget none).{_so_far(rows)}{_in_an_hour(rows) if rest >= _SOON else ''}"
        )


def _so_far(rows: Sequence[Row]) -> str:
    """Say what the searches that a budget stopped have found by then, of which the strongest did not find half."""
    stopped = [row for row in rows if row.budget_share is not None and not row.is_control]
    best = max(stopped, key=lambda row: (row.asr, row.headline or 0.0), default=None)
    if best is None or best.headline is None or 2 * best.recovered >= best.images:
        return ""
    name, score = short_names(row.attack for row in rows)[best.attack], number(best.headline, 2)
    return f" So far {name} recovers {best.recovered} of {best.images} (mean {best.words.metric} {score})."


def _in_an_hour(rows: Sequence[Row]) -> str:
    """Say what the slowest search that a budget stopped does in an hour on one target client, where that is more."""
    names = short_names(row.attack for row in rows)
    stopped = [row for row in rows if row.budget_share is not None]
    paces = [(row.info["seconds"] / spent, row) for row in stopped if (spent := row.info.get("target_iterations"))]
    if not paces:
        return ""
    pace, row = max(paces, key=lambda each: each[0])
    count, done = _HOUR / pace, row.info["target_iterations"] / len(row.trial.records)
    if count < _MANY * done:
        return ""
    many, few = (f"{float(f'{each:.2g}'):,.0f}" for each in (count, done))
    return (
        f" An hour on one target client does about {many} iterations of {names[row.attack]} instead of {few} "
        f"(target_clients=1, budget='1h'; or --target-clients 1 --budget 1h)."
    )
