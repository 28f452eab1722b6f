"""Whose attack a result is, and how that is said in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gradveil.attacks.presets import make_attack
from gradveil.core.errors import GradveilError
from gradveil.defences import entries

Attacker = Literal["undefended", "naive", "aware", "adaptive", "active", "informed"]
"""Whose attack a cell is. See `attacker`."""

ATTACKERS: dict[str, tuple[str, str]] = {
    "undefended": ("no defence", "there is no defence to know"),
    "naive": ("ignores the defence", "inverts the update as if nothing had been done to it"),
    "aware": (
        "knows the architecture",
        "inverts the update as if nothing had been done to it, but leaves out the layers that the noise of a "
        "bottleneck in the model reaches",
    ),
    "adaptive": (
        "knows the defence",
        "simulates the defence; its random values were not handed over, but sampled, optimised, inferred or left out",
    ),
    "active": (
        "changed the model",
        "sent a model that makes updates give examples away: a malicious server, where the others only watch; a client "
        "that looks at what it is sent can refuse it",
    ),
    "informed": (
        "was told the client's secrets",
        "was handed random values or statistics of the batch that only the client knows: an upper bound, not a verdict",
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

_OPEN = {"targets", "public", "bounds"}
"""What may be handed over without making the result an upper bound: it is part of the stated threat model."""


def undefended(defence: str) -> bool:
    """Say whether a defence does nothing, however that was written.

    >>> undefended("none"), undefended(" None + none()"), undefended("dp"), undefended("an object's name")
    (True, True, False, False)
    """
    try:
        return not defence or all(entry.name == "none" for entry in entries(defence))
    except GradveilError:
        return False


def secrets(info: Mapping[str, Any]) -> list[str]:
    """Name what was handed over although only the client knows it: random tensors, statistics of the batch.

    What an attack asks for counts only where a cell does not list what it was granted: nothing is granted of a client
    without randomness.

    >>> secrets({"grants": ["targets: the true labels", "statistics.bn.mean: its true value"]})
    ['statistics.bn.mean']
    """
    asked = [name for name, how in info.get("knowledge", {}).items() if how == "known"]
    given = [grant.partition(": ")[0] for grant in info["grants"]] if "grants" in info else asked
    return [name for name in given if name not in _OPEN]


def attacker(info: Mapping[str, Any]) -> Attacker:
    """Say whose attack a cell is, from its belief and from what it was handed.

    >>> attacker({"defence": "dgp", "belief": "full", "knowledge": {"targets": "known", "model.*": "sample"}})
    'adaptive'
    >>> attacker({"defence": "dropout", "belief": "full", "knowledge": {"model.*": "known"}})
    'informed'
    >>> attacker({"defence": "cvb", "belief": "naive", "attack": "pig"})
    'aware'
    >>> attacker({"defence": "none", "belief": "naive", "attack": "rob", "planted": "an imprint block"})
    'active'
    """
    if secrets(info):
        return "informed"
    if "planted" in info:
        return "active"
    if undefended(info["defence"]):
        # Of a recorded update the defence of a cell is what is believed.
        return "undefended" if undefended(info.get("recorded_defence") or "none") else "naive"
    if info["belief"] == "naive":
        return "aware" if _sidesteps(str(info.get("attack", "")), info["defence"]) else "naive"
    return "adaptive"


def _sidesteps(attack: str, defence: str) -> bool:
    """Whether an attack leaves out the layers behind a bottleneck, and the defence is or has one."""
    try:
        aims = [text for entry in entries(defence) for text in entry.adaptive]
    except GradveilError:
        return False
    return _ignores_noise(attack) and any(_ignores_noise(text) for text in aims)


def _ignores_noise(attack: str) -> bool:
    try:
        return getattr(make_attack(attack), "ignore", "nothing") == "stochastic"
    except GradveilError:
        return False
