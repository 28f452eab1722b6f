"""The golden runs give the numbers that are committed; a tolerance is for other processors and versions of torch.

`python -m tests.golden.commands tests/golden/numbers.json` records them again, for a change that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.commands import COMMANDS, numbers

RECORDED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("numbers.json").read_text())
RELATIVE, ABSOLUTE = 0.03, 0.01
"""Processors without vector instructions move no number of these runs by more than 1.5%."""


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield the places where two nested values differ by more than the tolerance."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from differences(one.get(key), other.get(key), f"{place}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}/{index}")
    elif isinstance(one, float) and isinstance(other, float):
        if other != pytest.approx(one, rel=RELATIVE, abs=ABSOLUTE):
            yield f"{place}: {one} and {other}"
    elif isinstance(one, int) and isinstance(other, int):
        if abs(one - other) > RELATIVE * abs(one):
            yield f"{place}: {one} and {other}"
    elif one != other:
        yield f"{place}: {one} and {other}"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "record"])
def test_golden_run_gives_its_numbers(name: str, tmp_path: Path) -> None:
    wanted = ("record", name) if name == "recorded" else (name,)
    found = numbers(tmp_path, wanted)
    assert list(differences({each: RECORDED[each] for each in wanted}, found)) == []


def test_a_difference_beyond_the_tolerance_is_found() -> None:
    assert list(differences({"a": [1.0, None]}, {"a": [1.02, None]})) == []
    assert list(differences({"a": [1.0, None]}, {"a": [1.2, 3]})) == ["/a/0: 1.0 and 1.2", "/a/1: None and 3"]
    assert list(differences({"status": "done"}, {})) == ["/status: done and None"]
