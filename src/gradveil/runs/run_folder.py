"""The folder of a run: its own file, its lock, a fresh start, and what resuming it may change.

Audits and trainings differ in a `RunKind`: the name of the file that describes a run, what it holds, and the folders
beside it. All else is one: the folder is private and held by one process, and another run's folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradveil.core.errors import GradveilError, Problem, fail, refuse
from gradveil.core.private_files import LOCK, DamagedError, locked, make_private, read_json, write_json
from gradveil.core.settings import refuse_others

FORMAT = 3
"""Version of the files of audits and trainings; another is refused."""
TRIALS = "trials"
"""Folder of the results of a run."""
REPORT = "report.html"
"""The page of a run."""


class StoredPart(BaseModel):
    """The keys that a file must have, and their types; other keys may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=10**15)]


class StoredRun(StoredPart):
    """The keys that the files of audits and trainings share."""

    config: Any
    trials: Annotated[list[str], Field(min_length=1)]
    name: str = ""
    command: str = ""
    created: str = ""
    gradveil: str = ""
    growing: list[str] = []
    config_hash: str = ""
    weights: str | None = None
    images: dict[str, str | None] | None = None


class RunSettings(Protocol):
    """The settings of a run."""

    @property
    def name(self) -> str:
        """The run's name."""
        ...

    @property
    def growing(self) -> tuple[str, ...]:
        """The lists that may get longer while a run stays the same."""
        ...

    def resolved(self) -> dict[str, Any]:
        """Return every setting, defaults included, as plain values."""
        ...

    def digest(self) -> str:
        """Hash every setting that decides results."""
        ...


def digest(value: Any) -> str:
    """Hash plain values (SHA-256 of their canonical JSON)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def described(
    config: RunSettings,
    command: str,
    trials: Iterable[str],
    weights: str | None = None,
    images: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Return what the file of every run holds; other `weights` (a fingerprint) or `images` make it another run."""
    settings = config.digest()
    return {
        "format": FORMAT,
        "name": config.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "gradveil": version("gradveil"),
        "config": config.resolved(),
        "growing": config.growing,
        "config_hash": digest([settings, weights]) if weights else settings,
        "weights": weights,
        "images": dict(images) if images else None,
        "command": command,
        "trials": list(trials),
    }


@dataclass(frozen=True)
class RunKind:
    """What tells the folders of audits and of trainings apart."""

    file: str
    """Name of the file that describes a run."""
    noun: str
    form: TypeAdapter[Any]
    """The keys that the file must have."""
    restore: str
    """The remedy where the file is damaged."""
    free: Sequence[str]
    """Settings that a resumed run may change."""
    folders: tuple[str, ...] = (TRIALS,)
    """Folders that hold results, which a fresh start removes."""
    grows: tuple[str, ...] = ()
    """Keys of the file that a resumed run writes again, besides those of every run."""

    def found(self, folder: Path) -> bool:
        """Return whether a run of this kind lies in a folder."""
        return (folder / self.file).is_file()

    def read(self, folder: Path) -> dict[str, Any]:
        """Read and check the file that describes a run."""
        info = read_json(folder / self.file, self.restore)
        refuse_format(folder / self.file, info, FORMAT)
        return checked(self.form, folder / self.file, info, self.restore)

    def problems(
        self,
        folder: Path,
        info: Mapping[str, Any],
        others: Callable[[Mapping[str, Any]], Iterable[Problem]] = lambda there: (),
    ) -> list[Problem]:
        """Find out why a run can neither begin in a folder nor go on there; a damaged file is refused."""
        try:
            if self.found(folder):
                there = self.read(folder)
                refuse_others(folder, there, info, self.free)
                return [*others(there)]
            if folder.exists() and not folder.is_dir():
                raise fail(str(folder), "is a file", "choose another --out")
            _only_ours(folder, self.file, self.noun, {LOCK, REPORT, *self.folders})
        except DamagedError:
            raise
        except GradveilError as error:
            return list(error.problems)
        return []

    @contextmanager
    def opened(
        self,
        folder: Path,
        info: Mapping[str, Any],
        fresh: bool = False,
        others: Callable[[Mapping[str, Any]], Iterable[Problem]] = lambda there: (),
    ) -> Generator[None]:
        """Make or take up the folder of a run, for this process alone.

        Other settings are refused; `others` finds what else of the run that is there differs. The lists that `info`
        calls `growing` may hold more than before: the run then has more trials.
        """
        with held(folder, self.file, self.noun, self.folders, fresh):
            if self.found(folder):
                there = self.read(folder)
                refuse_others(folder, there, info, self.free)
                refuse([*others(there)])
                now = {**there, **{key: info[key] for key in ("config", "trials", "command", *self.grows)}}
                if any(now[key] != there[key] for key in ("config", "trials")):
                    write_json(folder / self.file, now)
            else:
                (folder / TRIALS).mkdir(mode=0o700, exist_ok=True)
                write_json(folder / self.file, info)
            yield


def numbered(base: Path, problems: Callable[[Path], Sequence[Problem]]) -> tuple[Path, Sequence[Problem]]:
    """Choose the folder of a run that names none: `base`, or `base-2`, `base-3`, ... where other runs are.

    The first folder in which the run can go on, or else the first that is free. Returns the problems of `base` too.
    """
    pattern = re.compile(rf"{re.escape(base.name)}-([2-9]|[1-9]\d+)")
    numbers = [int(match[1]) for child in children(base.parent) if (match := pattern.fullmatch(child.name))]
    taken = problems(base)
    if not taken:
        return base, taken

    def place(number: int) -> Path:
        return base.with_name(f"{base.name}-{number}")

    going_on = (place(number) for number in sorted(numbers) if not problems(place(number)))
    free = next(number for number in count(2) if number not in numbers)
    return next(going_on, place(free)), taken


@contextmanager
def held(folder: Path, file: str, noun: str, folders: Sequence[str], fresh: bool) -> Generator[None]:
    """Make or take up a folder for this process alone, and remove what a killed process left in it.

    A folder without `file` that holds anything but an early start of the same kind is refused.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise fail(str(folder), "is a file", "choose another --out")
        existed = (folder / file).is_file()
        if not existed:
            _only_ours(folder, file, noun, {LOCK, REPORT, *folders})
        make_private(folder)
        folder.chmod(0o700)
    except OSError as error:
        raise fail(str(folder), f"cannot be made or read: {error.strerror}", "choose another --out") from error
    with locked(folder):
        if fresh and existed:
            for name in folders:
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / file).unlink()
            (folder / REPORT).unlink(missing_ok=True)
        for child in [*children(folder), *children(folder / TRIALS)]:
            if ".tmp-" in child.name:
                remove(child)
        yield


def _only_ours(folder: Path, file: str, noun: str, ours: set[str]) -> None:
    names = {child.name for child in children(folder) if ".tmp-" not in child.name}
    orphans = [child for child in children(folder / TRIALS) if ".tmp-" not in child.name]
    if orphans:
        what = f"is missing, and nothing else says with which settings the {len(orphans)} trials there were made"
        raise fail(str(folder / file), what, "put a copy of it back, or choose another --out")
    if names - ours:
        raise fail(str(folder), f"holds other files and is no {noun}", "choose another --out")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def children(folder: Path) -> list[Path]:
    """List what is in a folder, sorted; nothing where there is none."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def refuse_format(file: Path, info: Any, reads: int) -> None:
    """Refuse a file of another version."""
    if isinstance(info, dict) and isinstance(written := info.get("format"), int) and written != reads:
        remedy = "use the version that wrote it, or choose another folder"
        raise fail(str(file), f"has format {written}, this version reads {reads}", remedy)


def checked(form: TypeAdapter[Any], file: Path, value: Any, remedy: str) -> Any:
    """Return a value that has the keys and types of a form; otherwise raise a `DamagedError` with what is wrong."""
    try:
        form.validate_python(value)
        return value
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        words = "; ".join(_words(entry["type"], entry["loc"], entry["input"], entry["msg"]) for entry in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DamagedError(Problem(str(file), f"{words}{more}", remedy)) from None


_WANTED = {"model_type": "an object", "dict_type": "an object", "list_type": "a list", "string_type": "a text"}
_WANTED |= {"int_type": "a whole number", "float_type": "a number"}


def _words(kind: str, location: Sequence[str | int], value: Any, message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if kind == "missing":
        return f"{where} is missing"
    if kind == "too_short":
        return f"{where} is empty".strip()
    if kind == "value_error":
        return f"{where}: {message.removeprefix('Value error, ')}".removeprefix(": ")
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    wanted = f"not {_WANTED[kind]}" if kind in _WANTED else message
    return f"{where} is {shown}, {wanted}".strip()


@contextmanager
def noting(problems: list[Problem], kinds: type[GradveilError] = GradveilError) -> Iterator[None]:
    """Collect the problems of what is read, so that all are reported at once."""
    try:
        yield
    except kinds as error:
        problems += error.problems
