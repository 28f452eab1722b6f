"""Private files, written atomically, and tensor files with a digest.

It is computed with zeros in its own place, so it covers every byte: names, shapes and other metadata too. It finds
damage, not forgery.
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
"""File by which one process alone holds a folder."""
_ROOM = "make room or give the right to write, and run the same command again: finished trials stay"
_DIGITS = 100
"""Digits of a whole number in a file, at most: none that is written has more, and all fit into floats."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class DamagedError(GradveilError):
    """A file of a run directory is missing, cut off, or not what this program writes."""


def read_json(file: Path, remedy: str) -> Any:
    """Read a JSON file of a run directory; `remedy` says what to do where it is damaged."""
    try:
        value = json.loads(file.read_bytes(), parse_constant=_no_number, parse_int=_whole, parse_float=_fraction)
        json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be written on any page
        return value
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(Problem(str(file), "is missing", remedy)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(Problem(str(file), f"is not valid JSON: {error}", remedy)) from error


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _fraction(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def unreadable(file: Path, error: OSError) -> GradveilError:
    """Build the error for a file that is there and that the system does not let us read: it may well be whole."""
    return fail(str(file), f"cannot be read: {error.strerror or error}", "give the right to read it, or check the disk")


def plain(value: Any) -> Any:
    """Make a value fit for JSON: numbers that are not finite become None.

    >>> plain({"a": float("nan"), "b": (1, 2.0)})
    {'a': None, 'b': [1, 2.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all; it never holds NaN."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_private(file, text.encode())


def write_private(file: Path, content: bytes, remedy: str = _ROOM) -> None:
    """Write a file that appears whole or not at all, readable by its owner only; `remedy` is for one that cannot be."""
    temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    try:
        # A killed process of the same number may have left one, readable by whom it liked; a link would lead elsewhere.
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
    """Make the renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner only; `mkdir` asks the umask about these."""
    for one in reversed([folder, *(above for above in folder.parents if not above.exists())]):
        one.mkdir(mode=0o700, exist_ok=True)
        sync(one.parent)


@contextmanager
def locked(folder: Path, remedy: str = "wait for it, or choose another --out") -> Generator[None]:
    """Hold a folder for this process alone; refuse one that another process holds."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        what = f"cannot be written to: {error.strerror}"
        raise fail(str(folder), what, "give the right to write in it, or name another") from error
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
    """Write tensors with a digest of all that is written.

    >>> import torch
    >>> content = seal({"w": torch.ones(2)}, {"kind": "example"})
    >>> unseal(content, "file", "make it again")
    ({'w': tensor([1., 1.])}, {'kind': 'example'})
    """
    content = save(tensors, {**(metadata or {}), _NAME: _EMPTY.decode()})
    start = content.index(_FIELD) + len(_FIELD)
    return _with(content, start, _digest(content, start))


def unseal(content: bytes, where: str, remedy: str) -> tuple[Tensors, dict[str, str]]:
    """Read tensors and metadata; refuse a file without a digest, or of another one. `where` names it."""
    size = int.from_bytes(content[:8], "little")
    start = content.find(_FIELD, 8, 8 + size) + len(_FIELD)
    found = content[start : start + len(_EMPTY)]
    if start < len(_FIELD):
        what = "holds no digest: it is damaged, or an earlier version of Gradveil wrote it"
        raise DamagedError(Problem(where, what, remedy))
    if found != _digest(content, start):
        raise DamagedError(Problem(where, "is damaged: its digest is another one", remedy))
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


def _with(content: bytes, start: int, digest: bytes) -> bytes:
    return b"".join([content[:start], digest, content[start + len(digest) :]])
