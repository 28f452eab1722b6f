"""Whether an attack worked as an attack: "0% because broken" must not look like "0% because defended"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradveil.audit.rows import Row
from gradveil.core.words import number, percent

FELL = 0.9
"""An objective that ends above this share of its start did not fall."""
SOUND = 0.5
"""An attack that recovers fewer undefended images than this is no measure of a defence."""


def controls_of(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Find the attacks on the undefended update to hold a cell against: the same attack if it was run, else all.

    The same attack may have run with another belief, which makes no difference without a defence.
    """
    bare = [r for r in rows if r.attacker == "undefended" and r.setting == row.setting and r.seed == row.seed]
    exact = [r for r in bare if r.attack == row.attack]
    return exact or [r for r in bare if _preset(r) == _preset(row)] or bare


def _preset(row: Row) -> str:
    """Cut the attack's settings off its name."""
    return re.split(r"[^\w-]", row.attack, maxsplit=1)[0]


def complaints(row: Row, rows: Sequence[Row]) -> list[str]:
    """List the reasons to distrust a low success rate of this cell, in words; none for an attack in good health."""
    found = []
    start, end = row.health("objective_initial"), row.health("objective")
    if start is not None and end is not None and end > FELL * start:
        found.append(
            f"its objective did not fall ({number(start)} at the start, {number(end)} at the end), "
            "which strong noise can cause too"
        )
    if end is None and row.images:
        found.append("no restart ended with a finite objective")
    diverged = row.health("diverged")
    if diverged is not None and diverged >= 0.5:
        found.append(f"{percent(diverged)} of its runs diverged")
    if row.attacker != "undefended":
        controls = controls_of(row, rows)
        if not controls:
            found.append("the undefended update was not attacked in this run, so nothing shows that the attack works")
        elif (best := max(controls, key=lambda r: r.asr)).asr < SOUND:
            found.append(f"it recovers only {best.recovered} of {best.images} images without any defence")
    return found


def suspicious(row: Row, rows: Sequence[Row]) -> list[str]:
    """List the complaints that matter: those of a cell whose rate is low, and so could be low for a wrong reason."""
    return complaints(row, rows) if row.asr < SOUND else []


def guesses(row: Row) -> bool:
    """Say whether an attacker who knows the defence leaves to chance what it randomises inside the client's model.

    Masks and bottleneck samples can be searched for. An attacker who draws them afresh, or takes them to be off, does
    not do better than one who ignores the defence, whatever he believes.
    """
    if row.attacker != "adaptive":
        return False
    inside = bool({"model", "batch"} & (row.changes or frozenset()))
    knowledge = row.info.get("knowledge") or {}
    ways = {how for name, how in knowledge.items() if name.startswith(("model.", "batch.", "*"))}
    return inside and not ways & {"optimise", "infer"}


def descent(row: Row) -> str:
    """Say how far the objective fell from the random images that the attack started at."""
    start, end = row.health("objective_initial"), row.health("objective")
    if start is None and end is None:
        return ""
    return f"objective {number(start)} → {number(end)}"
