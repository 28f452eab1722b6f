"""The number of rows per batch."""

import platform
import sys

import pytest

from gradveil.attacks.inversion.solve import rows_at_once
from gradveil.core.freed_memory import keep_freed_memory


@pytest.mark.parametrize(
    ("size", "rows", "expected"),
    [(2**20, 10, 10), (2**20, 65, 33), (2**20, 128, 64), (2**28, 9, 2), (2**40, 5, 1), (0, 3, 3), (2**20, 1, 1)],
)
def test_rows_fit_the_budget_in_equal_batches(size: int, rows: int, expected: int) -> None:
    assert rows_at_once(size, rows, "cpu") == expected


def test_freed_memory_is_kept_with_glibc() -> None:
    assert keep_freed_memory() == (sys.platform == "linux" and platform.libc_ver()[0] == "glibc")
