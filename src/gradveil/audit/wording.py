"""What is wrong with a run file, in words: where, what, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gradveil.core.errors import Problem


def translate(error: ValidationError, raw: Mapping[str, Any], kind: type[BaseModel]) -> Iterator[Problem]:
    """Say each thing that is wrong in our words, with its place in the file and what to do."""
    single = isinstance(raw.get("client"), dict)
    for entry in error.errors(include_url=False):
        location = list(entry["loc"])
        if single and location[:2] == ["client", 0]:
            location = ["client", *location[2:]]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        fault, context = entry["type"], entry.get("ctx", {})
        if fault == "missing":
            yield Problem(where, "is missing", _example(where))
        elif fault == "extra_forbidden":
            allowed = list(_section(kind, entry["loc"][:-1]).model_fields)
            near = get_close_matches(str(location[-1]), allowed, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"allowed here: {', '.join(allowed)}"
            yield Problem(where, "is not a setting", hint)
        elif fault == "value_error":
            yield Problem(where or "run", str(context["error"]), "change one of the two")
        else:
            what = "is empty" if fault in ("too_short", "string_too_short") else f"is {_shown(entry['input'])}"
            why = _REASONS.get(where, "") if fault == "greater_than_equal" else ""
            yield Problem(where, what, _wanted(fault, context, entry["msg"]) + why)


def _section(kind: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """Find the table that a location of an error lies in."""
    found = kind
    for part in location:
        if isinstance(part, str) and part in found.model_fields:
            found = next(_models(found.model_fields[part].annotation), found)
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (list, Union, UnionType) or get_args(annotation):
        for inner in get_args(annotation):
            yield from _models(inner)


_EXAMPLES = {
    "data": 'name the data: [data] name = "faces"',
    "data.name": 'name the data: name = "faces"',
    "model": 'name the model: [model] name = "lenet-zhu"',
    "model.name": 'name the model: name = "lenet-zhu"',
    "attacks": 'list the attacks: attacks = ["ig"]',
    "client.local.lr": "give the step size: lr = 0.1",
    "train.local.lr": "give the step size: lr = 0.1",
    "local.lr": "give the step size: lr = 0.1",
    "rounds": "say how many: rounds = 20",
}


_REASONS = {"data.size": ": images are compared by SSIM, in windows of 11 pixels"}
"""Why a number may not be smaller, where nobody would guess it."""


def _example(where: str) -> str:
    return _EXAMPLES.get(where, "add it")


def _wanted(kind: str, context: Mapping[str, Any], message: str) -> str:
    told: dict[str, Callable[[], str]] = {
        "too_short": lambda: "give at least 1",
        "string_too_short": lambda: "give a name",
        "greater_than_equal": lambda: f"give at least {context['ge']:g}",
        "greater_than": lambda: f"give a number above {context['gt']:g}",
        "less_than_equal": lambda: f"give at most {context['le']:g}",
        "less_than": lambda: f"give a number below {context['lt']:g}",
        "literal_error": lambda: f"allowed: {context['expected']}",
        "string_pattern_mismatch": lambda: f"it has to match {context['pattern']}",
        "int_type": lambda: "give a whole number",
        "float_type": lambda: "give a number",
        "finite_number": lambda: "give a finite number",
        "bool_type": lambda: "give true or false",
        "string_type": lambda: "give a string in quotes",
        "list_type": lambda: "give a list: [...]",
        "dict_type": lambda: "give a table",
        "model_type": lambda: "give a table: [section] with its keys",
    }
    return told.get(kind, lambda: message)()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
