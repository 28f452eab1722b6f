"""What can be named in a run file, as plain rows: name, words, citation, and what each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from gradveil.attacks.inversion import Inversion
from gradveil.attacks.presets import ATTACKS
from gradveil.attacks.settings import KNOWN_BY_WORD, AttackEntry, known_as
from gradveil.audit.granted import told
from gradveil.audit.reader import bundled
from gradveil.core.arguments import Argument, Entry
from gradveil.core.errors import GradveilError, fail
from gradveil.data import DATASETS
from gradveil.defences import DEFENCES
from gradveil.defences.papers import PAPERS
from gradveil.nn.models import MODELS

Row = dict[str, Any]
"""What `gradveil list` shows of one entry, by column."""

TOPICS = {"feedback": "Error feedback: what a compressor leaves out in this round is added in the next."}
"""Arguments that people look for by what they do."""


def _attacks() -> list[Row]:
    made = {name: entry.make() for name, entry in ATTACKS.items()}
    return [
        {**_row(name, entry, _own(entry)), "belief": made[name].belief, "knowledge": told(made[name])}
        for name, entry in ATTACKS.items()
    ]


def _own(entry: AttackEntry) -> Iterator[Argument]:
    """Give every setting the value that the preset has for it; leave out what its optimiser does not have."""
    attack = entry.make()
    descent = getattr(attack, "descent", None)
    for argument in entry.arguments:
        parts = (attack, descent, getattr(descent, "stepper", None), getattr(attack, "images", None))
        places = [place for place in parts if place is not None]
        values = [getattr(place, argument.name) for place in places if hasattr(place, argument.name)]
        if argument.default is not None:
            yield argument
        elif values:
            yield replace(argument, default=values[0])
        elif argument.name in KNOWN_BY_WORD and isinstance(attack, Inversion):
            yield replace(argument, default=known_as(attack, argument.name))


def _defences() -> list[Row]:
    return [
        {
            **_row(name, entry, entry.arguments),
            "changes": list(entry.changes),
            "cost": entry.cost,
            "guarantee": entry.guarantee,
            "adaptive": list(entry.adaptive),
            "malicious": list(entry.malicious),
        }
        for name, entry in DEFENCES.items()
    ]


def _row(name: str, entry: Entry, arguments: Any) -> Row:
    taken = tuple(arguments)
    return {
        "name": name,
        "description": entry.description,
        "citation": entry.citation,
        "usage": replace(entry, arguments=taken).signature(),
        "arguments": [argument.plain() for argument in taken],
    }


def _models() -> list[Row]:
    sizes = ("channels", "size", "classes")
    return [
        {
            "name": name,
            "description": entry.description,
            "citation": entry.citation,
            "options": {key: value for key, value in entry.defaults.items() if key not in sizes},
        }
        for name, entry in MODELS.items()
    ]


def _data() -> list[Row]:
    return [{"name": n, "description": e.description, "citation": e.source} for n, e in DATASETS.items()]


def _runs() -> list[Row]:
    # The first line of a bundled run file says what it shows.
    texts = {name: text.splitlines()[0].lstrip("# ") for name, text in bundled().items()}
    return [{"name": name, "description": text, "citation": ""} for name, text in texts.items()]


def _papers() -> list[Row]:
    return [
        {
            "name": name,
            "description": paper.title,
            "citation": paper.citation,
            "tables": {table: list(texts) for table, texts in paper.tables.items()},
        }
        for name, paper in PAPERS.items()
    ]


KINDS: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "attacks": ("an attack", _attacks),
    "defences": ("a defence", _defences),
    "models": ("a model", _models),
    "data": ("data", _data),
    "runs": ("a bundled run", _runs),
    "papers": ("a paper", _papers),
}
"""What can be listed: what one of them is called, and how the rows are made."""


def everything() -> dict[str, list[Row]]:
    """Return the rows of every kind."""
    return {kind: make() for kind, (_, make) in KINDS.items()}


def called(name: str, listed: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Find what has this name, whatever its kind: `faces` is data and a run."""
    return _chosen(listed, lambda row: row["name"] == name)


def taking(argument: str, listed: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Find what takes an argument of this name."""
    return _chosen(listed, lambda row: any(each["name"] == argument for each in row.get("arguments", ())))


def unknown(name: str, listed: Mapping[str, list[Row]]) -> GradveilError:
    """Say that nothing has this name, and what comes near; `listed` may be one kind alone."""
    (kind, *others) = listed
    rows = [row for kind in listed.values() for row in kind]
    arguments = [argument["name"] for row in rows for argument in row.get("arguments", ())]
    known = list(dict.fromkeys([*(KINDS if others else ()), *(row["name"] for row in rows), *arguments]))
    near = [f"'{each}'" for each in get_close_matches(name, known, n=3)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if not others:
        return fail(f"list {kind} {name}", f"is none of the {kind}", f"{hint}`gradveil list {kind}` shows them")
    remedy = f"{hint}list {', '.join(KINDS)}, a name of any of these, or an argument; `gradveil list` shows them"
    return fail(f"list {name}", "is the name of nothing here", remedy)


def _chosen(listed: Mapping[str, list[Row]], wanted: Callable[[Row], bool]) -> dict[str, list[Row]]:
    found = {kind: [row for row in rows if wanted(row)] for kind, rows in listed.items()}
    return {kind: rows for kind, rows in found.items() if rows}
