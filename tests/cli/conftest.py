"""A run file that is done in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.small_run import RUN


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small run file, where the commands run."""
    (tmp_path / "small.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path
