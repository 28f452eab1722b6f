"""JSON files with odd values, as an attacker may write them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

GONE = object()
"""Marks a value to remove."""
ODD = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**400,
    10**90,
    1e308,
    -1e308,
    "",
    "x",
    "1",
    "\ud800",
    "<b>",
)
LISTS = ([], {}, [[]], [None], {"a": {"b": [1]}}, [1, 2, 3], [float("nan")], ["x"], "x" * 5000)


def crafted(folder: Path, many: int, seed: int = 0) -> Iterator[tuple[Path, tuple[str | int, ...], Any]]:
    """Put odd values into the JSON files of a folder, one at a time, and restore the files."""
    draw = np.random.default_rng(seed)
    whole = {file: file.read_text() for file in sorted(folder.rglob("*.json"))}
    places = [(file, path) for file, text in whole.items() for path in _paths(json.loads(text))]
    for _ in range(many):
        file, path = places[int(draw.integers(len(places)))]
        value = (*ODD, *LISTS, GONE)[int(draw.integers(len(ODD) + len(LISTS) + bool(path)))]
        file.write_text(json.dumps(_changed(json.loads(whole[file]), path, value)))
        yield file, path, value
        file.write_text(whole[file])


def _paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*at, key))


def _changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    whole = copy.deepcopy(value)
    held = whole
    for key in path[:-1]:
        held = held[key]
    if new is GONE:
        held.pop(path[-1])
    else:
        held[path[-1]] = new
    return whole
