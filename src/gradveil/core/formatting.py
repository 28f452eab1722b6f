"""Numbers as text, the same in the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

DASH = "–"
"""Text for a missing number."""


def percent(share: float | None) -> str:
    """Write a share as a percentage; only exact 0 and 1 become 0% and 100%.

    >>> percent(31 / 32), percent(1.0), percent(0.9999), percent(1e-6), percent(None)
    ('96.9%', '100%', '>99.9%', '<0.1%', '–')
    """
    if share is None or not math.isfinite(share):
        return DASH
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def interval(low: float | None, high: float | None) -> str:
    """Write an interval of shares.

    >>> interval(0.8426, 0.9944)
    '84.3–99.4%'
    """
    return DASH if low is None or high is None else f"{percent(low).rstrip('%')}–{percent(high)}"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, or all digits of a larger integer part.

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


def rounded_up(value: float, digits: int = 3) -> float:
    """Round a positive number up to `digits` significant digits, so that what is at most it stays at most the result.

    >>> rounded_up(0.0601201), rounded_up(9.23617), rounded_up(0.0), rounded_up(0.5)
    (0.0602, 9.24, 0.0, 0.5)
    """
    if value <= 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(value))
    # 1.1 * 100 is a little more than 110 in floating point: without the inner rounding it would become 1.11.
    return math.ceil(round(value * 10.0**places, 6)) / 10.0**places


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

    >>> duration(8.25), duration(42.3), duration(75), duration(7260)
    ('8.2 s', '42 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def listing(items: Iterable[str]) -> str:
    """Join items with commas and "and".

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


def suggestion(name: str, known: Iterable[str], command: str) -> str:
    """Suggest at most three names like an unknown one, and the command that lists all.

    >>> suggestion("cdai", ["cdia", "ig"], "gradveil list attacks")
    "did you mean 'cdia'? All are listed by `gradveil list attacks`"
    """
    near = [f"'{each}'" for each in get_close_matches(name, list(known), n=3)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}All are listed by `{command}`"
