"""How the report says numbers and threat models in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Attacker = Literal["undefended", "naive", "adaptive", "informed"]
"""Whose attack a cell is. See `attacker`."""

UNDEFENDED = ("none", "")
"""Canonical texts of the defence that does nothing."""
DASH = "–"

ATTACKERS: dict[str, tuple[str, str]] = {
    "undefended": ("no defence", "there is no defence to know"),
    "naive": ("ignores the defence", "inverts the update as if nothing had been done to it"),
    "adaptive": (
        "knows the defence",
        "simulates the defence; its random values were not handed over, but sampled, optimised, inferred or left out",
    ),
    "informed": (
        "was given its randomness",
        "simulates the defence and was handed random values it would never see: an upper bound, not a verdict",
    ),
}
"""Short and long description of every kind of attacker."""

POSITIONS = {
    "known": "the true value was handed over by the audit",
    "optimise": "found together with the images",
    "sample": "drawn afresh from its public law",
    "infer": "read off what was sent",
    "neutral": "taken to be off",
}
"""What an attacker can do about a tensor that it does not see."""

_DEFENCE_TENSORS = ("model.", "batch.", "step.", "send.", "update.", "state.", "*")


def attacker(info: Mapping[str, Any]) -> Attacker:
    """Say whose attack a cell is, from its belief and from what it was handed.

    >>> attacker({"defence": "dgp", "belief": "full", "knowledge": {"targets": "known", "model.*": "sample"}})
    'adaptive'
    >>> attacker({"defence": "dropout", "belief": "full", "knowledge": {"model.*": "known"}})
    'informed'
    """
    if info["defence"] in UNDEFENDED:
        return "undefended"
    if info["belief"] == "naive":
        return "naive"
    given = [name for name, how in info.get("knowledge", {}).items() if how == "known"]
    return "informed" if any(name.startswith(_DEFENCE_TENSORS) for name in given) else "adaptive"


def percent(share: float | None) -> str:
    """Write a share as a percentage.

    >>> percent(31 / 32), percent(1.0), percent(None)
    ('96.9%', '100%', '–')
    """
    return DASH if share is None else f"{100 * share:.1f}".removesuffix(".0") + "%"


def interval(low: float | None, high: float | None) -> str:
    """Write a 95% interval.

    >>> interval(0.8426, 0.9944)
    '84.3–99.4%'
    """
    return DASH if low is None or high is None else f"{percent(low).rstrip('%')}–{percent(high)}"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits, never in a way that hides its size.

    >>> [number(v) for v in (0.12345, 12345.6, 1e-7, 0, None, True)]
    ['0.123', '12,346', '1e-07', '0', '–', 'yes']
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if abs(value) >= 10**digits or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(count: float | None) -> str:
    """Write a number of bytes with decimal prefixes.

    >>> size(950), size(63304), size(2.5e6)
    ('950 B', '63.3 kB', '2.5 MB')
    """
    if count is None:
        return DASH
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Write a time span.

    >>> duration(8.25), duration(75), duration(7260)
    ('8.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds is None:
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def listing(items: Iterable[str]) -> str:
    """Join a list as a sentence does.

    >>> listing(["a", "b", "c"]), listing(["a"])
    ('a, b and c', 'a')
    """
    *head, last = [*items] or [""]
    return f"{', '.join(head)} and {last}" if head else last


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "image"), plural(12, "image")
    ('1 image', '12 images')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def client_words(client: str, batch: int) -> str:
    """Say what a client computes its update from.

    >>> client_words("gradient", 1), client_words("local T=4", 8)
    ('one gradient of 1 image', 'local training (T=4) on 8 images')
    """
    if client == "gradient":
        return f"one gradient of {plural(batch, 'image')}"
    steps = client.removeprefix("local").strip()
    return f"local training ({steps}) on {plural(batch, 'image')}"
