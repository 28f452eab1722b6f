"""`adaptive` and `malicious` in the place of an attack: for every defence the attackers that aim at it.

The table of defences names them, entry by entry: those who only look (`adaptive`), and those who change the model that
is sent (`malicious`). A composition is attacked by all that aim at one of its parts: each of them simulates the whole
client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gradveil.attacks.knowledge import Known
from gradveil.attacks.presets import make_attack
from gradveil.core.errors import GradveilError
from gradveil.defences import entries
from gradveil.defences.entry import PLANTED

WORDS = ADAPTIVE, MALICIOUS = "adaptive", "malicious"
"""The words of a run file for all attackers that aim at each defence: servers that are curious, or malicious."""
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
        return _of_each(defence, aimed_at, _ANY_DEFENCE)
    named = [text for part in parts for text in part.adaptive]
    if any(part.changes for part in parts) and not any(_knows(text) for text in named):
        named += _ANY_DEFENCE
    return list(dict.fromkeys(named))


def planted_for(defence: str) -> list[str]:
    """List what a malicious server sends clients with a defence, as attacks in texts.

    >>> planted_for("dropout")[0], len(planted_for("dgp")) - len(planted_for("dropout"))
    ('rob(bins=512)', 2)
    """
    try:
        parts = entries(defence)
    except GradveilError:
        return _of_each(defence, planted_for, PLANTED)
    return list(dict.fromkeys(text for part in parts for text in part.malicious)) or list(PLANTED)


def _of_each(defence: str, aimed: Callable[[str], list[str]], otherwise: Iterable[str]) -> list[str]:
    """List who aims at each part of a defence that the table does not know as a whole."""
    several = defence.split(" + ")
    each = [aimed(part) for part in several] if len(several) > 1 else [list(otherwise)]
    return list(dict.fromkeys(text for texts in each for text in texts))


_AIMED: Mapping[str, Callable[[str], list[str]]] = {ADAPTIVE: aimed_at, MALICIOUS: planted_for}


def _knows(text: str) -> bool:
    """Whether an attacker simulates the defence, and is told none of the client's secrets."""
    attack = make_attack(text)
    told = [name for name, how in attack.knowledge.items() if isinstance(how, Known) and name != "public"]
    return attack.belief == "full" and not told


def attacks_against(attacks: Iterable[str], defence: str, *, public: bool = True) -> Iterator[str]:
    """Put the attackers of this defence in the place of `adaptive` and `malicious`; each attacker once.

    Without public data those that learn from such data are left out.
    """
    told = [text for text in attacks if not stands_for_many(text)]
    known = {make_name(text) for text in told}
    for text in attacks:
        if not stands_for_many(text):
            yield text
            continue
        for aimed in _AIMED[_word(text)](defence):
            if make_name(aimed) not in known and (public or not _needs_public(aimed)):
                known.add(make_name(aimed))
                yield aimed


def is_adaptive(text: str) -> bool:
    """Whether a text stands for the attackers of each defence who change nothing."""
    return _word(text) == ADAPTIVE


def stands_for_many(text: str) -> bool:
    """Whether a text stands for attackers of each defence: `adaptive`, `malicious`."""
    return _word(text) in _AIMED


def _word(text: str) -> str:
    return text.strip().lower()


def make_name(text: str) -> str:
    """Return an attack's canonical text; of an object's name, the name itself."""
    try:
        return str(make_attack(text).name)
    except GradveilError:
        return text


def _needs_public(text: str) -> bool:
    return isinstance(make_attack(text).knowledge.get("public"), Known)
