"""Tensor files with a digest: safetensors whose metadata hold the SHA-256 of the whole file.

It is computed with zeros in its own place, so it covers every byte: names, shapes and other metadata too. It finds
damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save

from gradveil.core.errors import Problem
from gradveil.core.files import DamagedError
from gradveil.core.tree import Tensors

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
