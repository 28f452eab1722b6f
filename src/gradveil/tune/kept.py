"""What a search has scored, on disk: one file that is whole or not there, and says what the scores depend on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradveil.audit.run import machine
from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.files import LOCK, DamagedError, locked, make_private, read_json, write_json
from gradveil.core.growth import differences
from gradveil.defences.search import Judged
from gradveil.tune.policies import Again

FORMAT = 1
"""Version of the file; another is refused."""
FILE = "search.json"
"""The file's name in the folder of a search."""
CHUNK = 2.0
"""Seconds of work after which the scores are written: what a kill can cost, beside the policy in hand."""
_AGAIN = "put a copy of it back, or search anew with --fresh"


class _Scores(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    privacy: float | None
    utility: float | None


class _Again(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    privacy: Annotated[list[float | None], Field(min_length=2)]
    utility: float | None


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    search: Literal["ats"]
    settings: dict[str, Any]
    scores: dict[str, _Scores]
    again: dict[str, _Again]
    gradveil: str
    created: str
    command: str
    machine: dict[str, Any]


@dataclass
class Kept:
    """The scores of a search so far."""

    folder: Path
    head: Mapping[str, Any]
    """All that the file says beside the scores."""
    scores: dict[str, Judged] = field(default_factory=dict[str, Judged])
    again: dict[str, Again] = field(default_factory=dict[str, Again])
    written: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        """Write if so much was scored since the last time that losing it would hurt."""
        if time.monotonic() - self.written >= CHUNK:
            self.write()

    def write(self) -> None:
        """Write the file; one without a single score is left out."""
        if not self.scores:
            return
        scores = {name: {"privacy": one.privacy, "utility": one.utility} for name, one in self.scores.items()}
        write_json(self.folder / FILE, {**self.head, "scores": scores, "again": _plain(self.again)})
        self.written = time.monotonic()


@contextlib.contextmanager
def opened(folder: Path, settings: Mapping[str, Any], command: str, fresh: bool = False) -> Iterator[Kept]:
    """Take up what a folder holds, for this process alone; whatever happens, what was scored is written at the end.

    Refused are a folder of something else, and scores that were made with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise fail(str(folder), "is a file", "choose another --out")
    file = folder / FILE
    strange = [child.name for child in folder.iterdir()] if folder.is_dir() and not file.is_file() else []
    if any(name != LOCK and not name.startswith(f"{FILE}.tmp-") for name in strange):
        raise fail(str(folder), "holds other files and is no search", "choose another --out")
    try:
        make_private(folder)
    except OSError as error:
        raise fail(str(folder), f"cannot be made: {error.strerror}", "choose another --out") from error
    with locked(folder):
        for left in folder.glob(f"{FILE}.tmp-*"):  # by a process that was killed
            left.unlink()
        if fresh:
            file.unlink(missing_ok=True)
        kept = read_kept(folder) if file.is_file() else Kept(folder, _head(settings, command))
        _same(folder, kept.head["settings"], settings)
        try:
            yield kept
        finally:
            kept.write()


def read_kept(folder: Path) -> Kept:
    """Read the file of a search; one that this version did not write is refused, with what is wrong."""
    file = folder / FILE
    raw = read_json(file, _AGAIN)
    if isinstance(raw, dict) and isinstance(said := raw.get("format"), int) and said != FORMAT:
        remedy = "use the version that wrote it, or choose another --out"
        raise fail(str(file), f"has format {said}, this version reads {FORMAT}", remedy)
    try:
        found = _File.model_validate(raw)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_url=False))
        raise DamagedError(Problem(str(file), "; ".join(list(wrong)[:3]), _AGAIN)) from error
    head = {key: value for key, value in raw.items() if key not in ("scores", "again")}
    scores = {
        name: Judged(name, _number(one.privacy, math.nan), _number(one.utility, -math.inf))
        for name, one in found.scores.items()
    }
    again = {
        name: Again([_number(each, math.nan) for each in one.privacy], _number(one.utility, -math.inf))
        for name, one in found.again.items()
    }
    return Kept(folder, head, scores, again)


def _number(value: float | None, otherwise: float) -> float:
    """Read a number; JSON has none that is not finite."""
    return otherwise if value is None else value


def _plain(again: Mapping[str, Again]) -> dict[str, Any]:
    return {name: {"privacy": one.privacy, "utility": one.utility} for name, one in again.items()}


def _head(settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "search": "ats",
        "settings": dict(settings),
        "gradveil": version("gradveil"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": dict(machine(settings["device"])),
    }


def _same(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    remedy = "go on with the old settings, start again with --fresh (removes the old scores), or choose another --out"
    found = [
        Problem(f"{folder}, {what}", "differs from the search that is there", remedy)
        for what in differences(dict(there), dict(now))
    ]
    if found:
        raise GradveilError(found)
