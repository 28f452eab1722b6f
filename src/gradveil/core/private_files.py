"""Private files, written atomically, and tensor files with a digest.

The digest covers every byte, including names, shapes and metadata: it is computed with zeros in its own place. It
detects damage, not forgery.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load, save

from gradveil.core.errors import GradveilError, Problem, fail
from gradveil.core.tree import Tensors

LOCK = ".lock"
"""File that locks a folder for one process."""
_ROOM = "free disk space or grant write permission, and run the same command again: finished trials stay"
_DIGITS = 100
"""Most digits of a whole number in a file: Gradveil writes none with more, and all of these fit into floats."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class DamagedError(GradveilError):
    """A file of a run directory is missing, truncated, or not in the format that Gradveil writes."""


def read_json(file: Path, remedy: str) -> Any:
    """Read a JSON file of a run directory; `remedy` is the fix for a damaged one."""
    try:
        value = json.loads(file.read_bytes(), parse_constant=_no_number, parse_int=_whole, parse_float=_fraction)
        json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates, which no report can contain
        return value
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(Problem(str(file), "is missing", remedy)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(Problem(str(file), f"is not valid JSON: {error}", remedy)) from error


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _fraction(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def unreadable(file: Path, error: OSError) -> GradveilError:
    """Return the error for an existing file that cannot be opened; it is not necessarily damaged."""
    return fail(str(file), f"cannot be read: {error.strerror or error}", "grant read permission, or check the disk")


def plain(value: Any) -> Any:
    """Convert a value for JSON: numbers that are not finite become None.

    >>> plain({"a": float("nan"), "b": (1, 2.0)})
    {'a': None, 'b': [1, 2.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity become null."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_private(file, text.encode())


def write_private(file: Path, content: bytes, remedy: str = _ROOM) -> None:
    """Write a file atomically, readable by its owner only; `remedy` is the fix if writing fails."""
    temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    try:
        # A killed process with the same id may have left a readable file, or somebody a link to another place.
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, _NEW, 0o600), "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise fail(str(file), f"cannot be written: {error.strerror}", remedy) from error


def sync(folder: Path) -> None:
    """Flush the renames in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents for their owner only; `mkdir(parents=True)` would ignore the mode."""
    for path in reversed([folder, *(parent for parent in folder.parents if not parent.exists())]):
        path.mkdir(mode=0o700, exist_ok=True)
        sync(path.parent)


@contextmanager
def locked(folder: Path, remedy: str = "wait for it, or choose another --out") -> Generator[None]:
    """Lock a folder for this process; raise if another process holds it."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        problem = f"cannot be written to: {error.strerror}"
        raise fail(str(folder), problem, "grant write permission, or choose another folder") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise fail(str(folder), "is in use by another process", remedy) from error
        yield
    finally:
        os.close(handle)


_NAME = "sha256"
_FIELD = f'"{_NAME}":"'.encode()
_EMPTY = b"0" * 64


def seal(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialise tensors and metadata with a digest of all bytes.

    >>> import torch
    >>> content = seal({"w": torch.ones(2)}, {"kind": "example"})
    >>> unseal(content, "file", "make it again")
    ({'w': tensor([1., 1.])}, {'kind': 'example'})
    """
    content = save(tensors, {**(metadata or {}), _NAME: _EMPTY.decode()})
    start = content.index(_FIELD) + len(_FIELD)
    return b"".join([content[:start], _digest(content, start), content[start + len(_EMPTY) :]])


def unseal(content: bytes, where: str, remedy: str) -> tuple[Tensors, dict[str, str]]:
    """Read tensors and metadata; raise if the digest is missing or wrong. `where` names the file in messages."""
    size = int.from_bytes(content[:8], "little")
    start = content.find(_FIELD, 8, 8 + size) + len(_FIELD)
    if start < len(_FIELD):
        problem = "holds no digest: it is damaged, or an earlier version of Gradveil wrote it"
        raise DamagedError(Problem(where, problem, remedy))
    if content[start : start + len(_EMPTY)] != _digest(content, start):
        raise DamagedError(Problem(where, "is damaged: its digest does not match", remedy))
    try:
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        return load(content), {name: text for name, text in metadata.items() if name != _NAME}
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(Problem(where, f"is damaged: {error}", remedy)) from error


def _digest(content: bytes, start: int) -> bytes:
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(_EMPTY)
    digest.update(view[start + len(_EMPTY) :])
    return digest.hexdigest().encode()
