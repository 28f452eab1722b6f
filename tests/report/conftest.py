"""A run with everything that a page shows, and trainings to sum up."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import CASES, played, write_run
from tests.report.trainings import DP, TOPK, trained


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    return played(target_clients=4, cases=CASES[:6])


@pytest.fixture
def run(tmp_path: Path, trials: list[dict[str, Any]]) -> Path:
    return write_run(tmp_path / "run", trials)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of one seed, and one of another seed that has a defence more and was trained for longer.

    Whoever changes them changes a copy.
    """
    folder = tmp_path_factory.mktemp("runs")
    one = trained(folder / "one", defences=["none", DP])
    return one, trained(folder / "two", defences=["none", DP, TOPK], seeds=[1], rounds=3)
