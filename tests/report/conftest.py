"""A run with everything that a page shows."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import CASES, played, write_run


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return played(victims=4, cases=CASES[:6])


@pytest.fixture
def run(tmp_path: Path, cells: list[dict[str, Any]]) -> Path:
    return write_run(tmp_path / "run", cells)
