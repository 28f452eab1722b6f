"""Titles of runs whose settings differ, for tables over several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast


def file_digests(info: Mapping[str, Any]) -> dict[str, str]:
    """Return short digests of the weight and image files of a run: files of one name may differ."""
    model, images = info["config"].get("model") or {}, info.get("images") or {}
    digests = [str(digest)[:12] for digest in images.values() if digest]
    result = {"images": "/".join(digests)} if digests else {}
    if model.get("weights") is not None:
        # An earlier version hashed the weights together with all settings only.
        result["initial weights"] = str(info.get("weights") or info.get("config_hash"))[:12]
    return result


def distinct_titles(titles: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the settings that differ to equal titles.

    >>> distinct_titles(["a", "b"], [{"lr": 1}, {"lr": 2}])
    ['a', 'b']
    >>> distinct_titles(["a", "a"], [{"local": {"lr": 1}}, {"local": {}}])
    ['a (local.lr = 1)', 'a (local.lr = null)']
    """
    if len(set(titles)) == len(titles):
        return [*titles]
    flat = [dict(_flat(each)) for each in settings]
    keys = dict.fromkeys(key for each in flat for key in each)
    differ = [key for key in keys if len({json.dumps(each.get(key)) for each in flat}) > 1]
    details = [", ".join(f"{key} = {json.dumps(each.get(key))}" for key in differ) for each in flat]
    return [f"{title} ({more})" if more else title for title, more in zip(titles, details, strict=True)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(cast("Mapping[str, Any]", inner), f"{prefix}{key}.")
        else:
            yield prefix + key, inner
