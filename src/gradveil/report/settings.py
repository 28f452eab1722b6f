"""In what settings differ: runs are put together where they are alike, and told apart where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast


def contents(info: Mapping[str, Any]) -> dict[str, str]:
    """Say what weights and images of files a run is of, by what they are: names say nothing of them."""
    model, images = info["config"].get("model") or {}, info.get("images") or {}
    marks = [str(mark)[:12] for mark in images.values() if mark]
    found = {"images": "/".join(marks)} if marks else {}
    if model.get("weights") is not None:
        # An earlier version wrote them into the hash of all settings only.
        found["initial weights"] = str(info.get("weights") or info.get("config_hash"))[:12]
    return found


def told_apart(titles: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the settings that differ to titles that are the same.

    >>> told_apart(["a", "b"], [{"lr": 1}, {"lr": 2}]), told_apart(["a", "a"], [{"local": {"lr": 1}}, {"local": {}}])
    (['a', 'b'], ['a (local.lr = 1)', 'a (local.lr = null)'])
    """
    if len(set(titles)) == len(titles):
        return [*titles]
    flat = [dict(_flat(one)) for one in settings]
    keys = dict.fromkeys(key for one in flat for key in one)
    differ = [key for key in keys if len({json.dumps(one.get(key)) for one in flat}) > 1]
    said = [", ".join(f"{key} = {json.dumps(one.get(key))}" for key in differ) for one in flat]
    return [f"{title} ({more})" if more else title for title, more in zip(titles, said, strict=True)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(cast("Mapping[str, Any]", inner), f"{prefix}{key}.")
        else:
            yield prefix + key, inner
