"""A folder of data sets, in a place of its own."""

from pathlib import Path

import pytest

from tests.data.files import NAMES, images, write


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data folder with `cifar10/{train,test}.parquet` of 9 and 6 images."""
    write(tmp_path / "cifar10/train.parquet", images(9), [i % 3 for i in range(9)], names=NAMES)
    write(tmp_path / "cifar10/test.parquet", images(6, seed=1), [2 - i % 3 for i in range(6)], names=NAMES)
    return tmp_path
