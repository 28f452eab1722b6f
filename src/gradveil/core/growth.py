"""What became of a run's settings since its directory was made: which are others, and what a list has no more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gradveil.core.errors import Problem, refuse


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Name the settings that are not the same, each with what it is there and now.

    >>> list(differences({"data": {"size": 32}}, {"data": {"size": 16}}))
    ['data.size (32 there, 16 now)']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        before, now = cast(dict[str, Any], old), cast(dict[str, Any], new)
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield f"{where} ({json.dumps(old)} there, {json.dumps(new)} now)"


def left_out(old: Mapping[str, Any], new: Mapping[str, Any], growing: Iterable[str]) -> Iterator[str]:
    """Name what lists that may only grow had and have no more; a switch may only be turned on.

    >>> list(left_out({"seeds": [0, 1], "central": True}, {"seeds": [2, 0], "central": False}, ["seeds", "central"]))
    ['seeds (without 1)', 'central (true there, false now)']
    """
    for name in growing:
        before, now = old.get(name), new[name]
        if not isinstance(before, list):
            yield from differences(before, now, name) if before is not False else ()
        elif gone := [str(value) for value in cast(list[Any], before) if value not in now]:
            yield f"{name} (without {', '.join(gone)})"


_FILES = {
    "weights": "what model.weights or the records hold",
    "images": "the images or labels that data.name stands for",
}


def _contents(there: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Iterator[str]:
    """Say that files hold something else under the name they had, where it is known what they held."""
    old, new = there.get(name), now.get(name)
    if None not in (old, new) and old != new:
        yield _FILES[name]


def refuse_others(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise if the run in a folder, as its file says, is another one than comes now, or has more in a `growing` list.

    Settings that are `free` may be anything.
    """
    growing: Sequence[str] = now["growing"]
    own = {*growing, *free}
    old, new = ({key: value for key, value in said["config"].items() if key not in own} for said in (there, now))
    same = there.get("config_hash") == now["config_hash"]
    found = [] if same else [*differences(old, new), *_contents(there, now, "weights")] or ["config_hash"]
    found += _contents(there, now, "images")
    found += left_out(there["config"], now["config"], growing)
    remedy = (
        f"give all it has, and more {', '.join(growing)} if you like, start again with --fresh (removes the old "
        "results), or choose another --out"
    )
    refuse([Problem(f"{folder}, {what}", "differs from the run that is there", remedy) for what in found])
