"""Files that cannot be written are a message, and leave nothing half-written."""

import os
import stat
from pathlib import Path

import pytest

from gradveil.core import private_files
from gradveil.core.errors import GradveilError


def test_full_disk_raises_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trial.json"
    private_files.write_private(file, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_files.os, "fsync", full)
    with pytest.raises(GradveilError, match="cannot be written: No space left on device"):
        private_files.write_private(file, b"new")
    assert file.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["trial.json"]


def test_read_only_folder_raises(tmp_path: Path) -> None:
    with (
        pytest.raises(GradveilError, match="cannot be written to: No such file"),
        private_files.locked(tmp_path / "gone"),
    ):
        pass


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The name that the unfinished file will have."""
    return tmp_path / f"trial.json.tmp-{os.getpid()}"


def test_write_never_follows_a_link_at_the_temporary_file(tmp_path: Path, planted: Path) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    planted.symlink_to(tmp_path / "precious")
    private_files.write_private(tmp_path / "trial.json", b"secret")
    assert (tmp_path / "precious").read_bytes() == b"kept"
    assert (tmp_path / "trial.json").read_bytes() == b"secret"
    assert not (tmp_path / "trial.json").is_symlink()


def test_link_created_during_write_raises(tmp_path: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    remove = Path.unlink

    def outrun(path: Path, missing_ok: bool = False) -> None:
        remove(path, missing_ok)
        path.symlink_to(tmp_path / "precious")

    monkeypatch.setattr(Path, "unlink", outrun)
    with pytest.raises(GradveilError, match="cannot be written: File exists"):
        private_files.write_private(tmp_path / "trial.json", b"secret")
    assert (tmp_path / "precious").read_bytes() == b"kept"
    assert not (tmp_path / "trial.json").exists()


def test_file_is_private_from_its_first_byte(tmp_path: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.write_bytes(b"left by a killed process")
    planted.chmod(0o666)
    modes: list[int] = []
    monkeypatch.setattr(private_files.os, "fsync", lambda handle: modes.append(stat.S_IMODE(os.fstat(handle).st_mode)))
    before = os.umask(0)
    try:
        private_files.write_private(tmp_path / "trial.json", b"secret")
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE((tmp_path / "trial.json").stat().st_mode) == 0o600
