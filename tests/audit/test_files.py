"""Files that cannot be written are a message, and leave nothing half-written."""

from pathlib import Path

import pytest

from gradveil.audit import files
from gradveil.core.errors import GradveilError


def test_a_full_disk_is_a_message_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cell.json"
    files.write_private(file, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(GradveilError, match="cannot be written: No space left on device"):
        files.write_private(file, b"new")
    assert file.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["cell.json"]
