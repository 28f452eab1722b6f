"""Lists in which callers mix texts and objects, such as defences and attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from gradveil.core.errors import GradveilError, Problem
from gradveil.core.types import BatchTransform, Transform


def named(where: str, given: Any, build: Callable[[str], Any], problems: list[Problem]) -> dict[str, Any]:
    """Build the entries that are texts, keep those that are objects; append problems of either to `problems`."""
    entries_by_label: dict[str, Any] = {}
    entries = cast("Sequence[Any]", given) if isinstance(given, list | tuple) else [given]
    for i, entry in enumerate(entries):
        name = getattr(entry, "name", None)
        has_name = callable(entry) and not isinstance(entry, type) and isinstance(name, str)
        if not isinstance(entry, str) and not has_name:
            remedy = f"give a list of texts as `gradveil list {where}` shows, or of objects with a name"
            if isinstance(entry, Transform | BatchTransform):
                slot = "batch=(mine,)" if isinstance(entry, BatchTransform) else "send=chain(mine=mine)"
                remedy = f"give a defence that holds it: Defence('mine', {slot})"
            elif isinstance(entry, type):
                remedy = f"make one of the class: {entry.__name__}(...)"
            problems.append(Problem(f"{where}[{i}]", f"is {entry!r}", remedy))
            continue
        label = entry if isinstance(entry, str) else str(name)
        try:
            built: Any = build(entry) if isinstance(entry, str) else entry
            first = next((other for other, entry in entries_by_label.items() if entry.name == built.name), None)
            if first is not None:
                problem = f"'{label}' is the same as '{first}'"
                problems.append(Problem(f"{where}[{i}]", problem, "remove one of them, or name each differently"))
            entries_by_label[label] = built
        except GradveilError as error:
            problems += [Problem(f"{where}[{i}]", f"{p.where}: {p.what}", p.remedy) for p in error.problems]
    if not entries:
        problems.append(Problem(where, "are empty", "give at least one"))
    return entries_by_label
