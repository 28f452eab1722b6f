"""What a worker wrote is read back, or fails its cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from gradveil.audit.cell import Recovered
from gradveil.audit.pool import _collect

WHOLE = {"share-1.json": json.dumps({"facts": {"seconds": 1.0}, "statuses": ["budget"]}).encode()}
WHOLE |= {"share-1.safetensors": save({"inputs": torch.ones(1, 1, 1, 2, 2)})}


def test_a_share_comes_back(tmp_path: Path) -> None:
    for name, content in WHOLE.items():
        (tmp_path / name).write_bytes(content)
    found = _collect(tmp_path, 1)
    assert isinstance(found, Recovered)
    assert (found.facts, found.statuses, found.tensors["inputs"].sum().item()) == ({"seconds": 1.0}, ("budget",), 4)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff"])
def test_a_share_that_is_damaged_or_gone_is_a_failure(tmp_path: Path, name: str, content: bytes | None) -> None:
    for other, whole in WHOLE.items():
        (tmp_path / other).write_bytes(whole)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    found = _collect(tmp_path, 1)
    assert isinstance(found, str)
    assert found.startswith("what the worker wrote cannot be read: ")
