"""`adaptive` in the place of an attack: for every defence the attackers that aim at it.

The table of defences names them, entry by entry. A composition is attacked by all that aim at one of its parts: each of
them simulates the whole client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradveil.attacks.knowledge import Known
from gradveil.attacks.presets import make_attack
from gradveil.core.errors import GradveilError
from gradveil.defences import entries

ADAPTIVE = "adaptive"
"""The word of a run file for all attackers that aim at each defence."""
_ANY_DEFENCE = ("cdia(rounds=all)",)
"""Against a defence that is in no table (an object from Python), or of which the table names nobody who knows it: infer
and optimise whatever can be."""


def aimed_at(defence: str) -> list[str]:
    """List the attackers that aim at a defence, as texts.

    >>> aimed_at("dropout"), aimed_at("dropout + what an object is called")
    (['cdia(rounds=all)', 'learned', 'dia'], ['cdia(rounds=all)', 'learned', 'dia'])
    """
    try:
        parts = entries(defence)
    except GradveilError:
        several = defence.split(" + ")
        each = [aimed_at(part) for part in several] if len(several) > 1 else [list(_ANY_DEFENCE)]
        return list(dict.fromkeys(text for texts in each for text in texts))
    named = [text for part in parts for text in part.adaptive]
    if any(part.changes for part in parts) and not any(_knows(text) for text in named):
        named += _ANY_DEFENCE
    return list(dict.fromkeys(named))


def _knows(text: str) -> bool:
    """Whether an attacker simulates the defence, and is told none of the client's secrets."""
    attack = make_attack(text)
    told = [name for name, how in attack.knowledge.items() if isinstance(how, Known) and name != "public"]
    return attack.belief == "full" and not told


def attacks_against(attacks: Iterable[str], defence: str, *, public: bool = True) -> Iterator[str]:
    """Put the attackers of this defence in the place of `adaptive`; each attacker once.

    Without public data those that learn from such data are left out.
    """
    told = [text for text in attacks if not is_adaptive(text)]
    known = {make_name(text) for text in told}
    for text in attacks:
        if not is_adaptive(text):
            yield text
            continue
        for aimed in aimed_at(defence):
            if make_name(aimed) not in known and (public or not _needs_public(aimed)):
                known.add(make_name(aimed))
                yield aimed


def is_adaptive(text: str) -> bool:
    """Whether a text stands for the attackers of each defence."""
    return text.strip().lower() == ADAPTIVE


def make_name(text: str) -> str:
    """Return an attack's canonical text; of an object's name, the name itself."""
    try:
        return str(make_attack(text).name)
    except GradveilError:
        return text


def _needs_public(text: str) -> bool:
    return isinstance(make_attack(text).knowledge.get("public"), Known)
