"""Whose attack a result is, and how that is said in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gradveil.core.errors import GradveilError
from gradveil.defences import entries

Attacker = Literal["undefended", "naive", "adaptive", "informed"]
"""Whose attack a cell is. See `attacker`."""

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


def undefended(defence: str) -> bool:
    """Say whether a defence does nothing, however that was written.

    >>> undefended("none"), undefended(" None + none()"), undefended("dp"), undefended("an object's name")
    (True, True, False, False)
    """
    try:
        return not defence or all(entry.name == "none" for entry in entries(defence))
    except GradveilError:
        return False


def attacker(info: Mapping[str, Any]) -> Attacker:
    """Say whose attack a cell is, from its belief and from what it was handed.

    >>> attacker({"defence": "dgp", "belief": "full", "knowledge": {"targets": "known", "model.*": "sample"}})
    'adaptive'
    >>> attacker({"defence": "dropout", "belief": "full", "knowledge": {"model.*": "known"}})
    'informed'
    """
    if undefended(info["defence"]):
        return "undefended"
    if info["belief"] == "naive":
        return "naive"
    given = [name for name, how in info.get("knowledge", {}).items() if how == "known"]
    return "informed" if any(name.startswith(_DEFENCE_TENSORS) for name in given) else "adaptive"
