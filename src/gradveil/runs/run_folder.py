"""The folder of a run: its file, its lock, a fresh start, and the settings that resuming it may change.

Audits and trainings differ in a `RunKind`: the name and keys of the file that describes a run, and the folders next to
it. Both are private, locked by one process, and refuse the folder of another run.
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
    """The keys that a file must have, and their types; other keys are not checked."""

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
        """Name of the run."""
        ...

    @property
    def growing(self) -> tuple[str, ...]:
        """The lists that may grow without making another run."""
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
    """Return the content of every run's file; other `weights` (a fingerprint) or `images` make it another run."""
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
    """The differences between the folders of audits and of trainings."""

    file: str
    """Name of the file that describes a run."""
    noun: str
    form: TypeAdapter[Any]
    """The keys that the file must have."""
    restore: str
    """The remedy if the file is damaged."""
    free: Sequence[str]
    """Settings that a resumed run may change."""
    folders: tuple[str, ...] = (TRIALS,)
    """Folders that hold results, which a fresh start removes."""
    grows: tuple[str, ...] = ()
    """Keys of the file that a resumed run writes again, in addition to those of every run."""

    def exists(self, folder: Path) -> bool:
        """Return whether a folder has a run of this kind."""
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
            if self.exists(folder):
                there = self.read(folder)
                refuse_others(folder, there, info, self.free)
                return [*others(there)]
            if folder.exists() and not folder.is_dir():
                raise fail(str(folder), "is a file", "choose another --out")
            _refuse_other_files(folder, self.file, self.noun, {LOCK, REPORT, *self.folders})
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
        others: Callable[[Mapping[str, Any]], Iterable[Problem]] = lambda stored: (),
    ) -> Generator[None]:
        """Create or resume the folder of a run, for this process alone.

        Other settings are refused; `others` returns further problems of the stored run. The lists that `info` names in
        `growing` may be longer than before: the run then has more trials.
        """
        with held(folder, self.file, self.noun, self.folders, fresh):
            if self.exists(folder):
                stored = self.read(folder)
                refuse_others(folder, stored, info, self.free)
                refuse([*others(stored)])
                updated = {**stored, **{key: info[key] for key in ("config", "trials", "command", *self.grows)}}
                if any(updated[key] != stored[key] for key in ("config", "trials")):
                    write_json(folder / self.file, updated)
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
    """Create or resume a folder for this process alone, and remove the temporary files of a killed process.

    A folder without `file` is refused, unless it holds no more than an early start of the same kind.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise fail(str(folder), "is a file", "choose another --out")
        existed = (folder / file).is_file()
        if not existed:
            _refuse_other_files(folder, file, noun, {LOCK, REPORT, *folders})
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


def _refuse_other_files(folder: Path, file: str, noun: str, expected: set[str]) -> None:
    names = {child.name for child in children(folder) if ".tmp-" not in child.name}
    orphans = [child for child in children(folder / TRIALS) if ".tmp-" not in child.name]
    if orphans:
        problem = f"is missing, and the settings of the {len(orphans)} trials there are unknown without it"
        raise fail(str(folder / file), problem, "put a copy of it back, or choose another --out")
    if names - expected:
        raise fail(str(folder), f"holds other files and is no {noun}", "choose another --out")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def children(folder: Path) -> list[Path]:
    """List the content of a folder, sorted; nothing if there is no folder."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def refuse_format(file: Path, info: Any, reads: int) -> None:
    """Refuse a file of another version."""
    if isinstance(info, dict) and isinstance(written := info.get("format"), int) and written != reads:
        remedy = "use the version that wrote it, or choose another folder"
        raise fail(str(file), f"has format {written}, this version reads {reads}", remedy)


def checked(form: TypeAdapter[Any], file: Path, value: Any, remedy: str) -> Any:
    """Return a value that has the keys and types of a form; otherwise raise a `DamagedError` with each mismatch."""
    try:
        form.validate_python(value)
        return value
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        text = "; ".join(_mismatch(entry["type"], entry["loc"], entry["input"], entry["msg"]) for entry in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DamagedError(Problem(str(file), f"{text}{more}", remedy)) from None


_WANTED = {"model_type": "an object", "dict_type": "an object", "list_type": "a list", "string_type": "a text"}
_WANTED |= {"int_type": "a whole number", "float_type": "a number"}


def _mismatch(kind: str, location: Sequence[str | int], value: Any, message: str) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if kind == "missing":
        return f"{path} is missing"
    if kind == "too_short":
        return f"{path} is empty".strip()
    if kind == "value_error":
        return f"{path}: {message.removeprefix('Value error, ')}".removeprefix(": ")
    text = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    wanted = f"not {_WANTED[kind]}" if kind in _WANTED else message
    return f"{path} is {text}, {wanted}".strip()


@contextmanager
def noting(problems: list[Problem], kinds: type[GradveilError] = GradveilError) -> Iterator[None]:
    """Collect the problems of errors raised inside, to report all at once."""
    try:
        yield
    except kinds as error:
        problems += error.problems
