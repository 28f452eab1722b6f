"""Data that are not there, or damaged, or no images: each is told with its file and the way on."""

import sys
from pathlib import Path

import datasets
import pytest

from gradveil.core.errors import GradveilError
from gradveil.data import DATA_DIR, load
from tests.data.files import NAMES, encode, images, write


def test_broken_image_raises_only_within_the_limit(tmp_path: Path) -> None:
    trials = [{"bytes": encode(picture), "path": None} for picture in images(3)] + [{"bytes": b"broken", "path": None}]
    write(tmp_path / "test.parquet", [], [0, 1, 0, 1], encoded=trials)
    write(tmp_path / "train.parquet", images(2), [0, 1])
    where = f"parquet:{tmp_path}"
    assert len(load(where, limit_private=3).private) == 3
    with pytest.raises(GradveilError, match="row 3: is not an image"):
        load(where)


def test_unknown_hub_name_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(GradveilError, match="hf:nobody/nothing: cannot be loaded"):
        load("hf:nobody/nothing")


def test_missing_packages_name_the_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GradveilError, match=r"needs the package 'datasets'.*gradveil\[hub\]"):
        load("hf:ylecun/mnist")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(GradveilError, match=r"needs the package 'pyarrow'.*gradveil\[hub\]"):
        load("cifar10", data_dir=home)


def test_missing_files_name_path_and_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_DIR, raising=False)
    with pytest.raises(GradveilError, match=f"--data-dir .or {DATA_DIR}. to the folder that holds mnist/train.parquet"):
        load("mnist")
    with pytest.raises(GradveilError, match=f"{tmp_path / 'mnist'} is not there"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(GradveilError, match=r"has no train.parquet or test.parquet"):
        load("mnist", data_dir=tmp_path)
    for name in ("folder:nowhere", "parquet:nowhere"):
        with pytest.raises(GradveilError, match=f"{tmp_path / 'nowhere'}: is not there"):
            load(name, data_dir=tmp_path)
    with pytest.raises(GradveilError, match=r"holds no images.*train/CLASS"):
        load(f"folder:{tmp_path}")


def test_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(GradveilError, match=r"train.parquet: cannot be read as Parquet"):
        load(f"parquet:{tmp_path}")
    write(tmp_path / "train.parquet", [], [], encoded=[])
    with pytest.raises(GradveilError, match="holds no images"):
        load(f"parquet:{tmp_path}")


@pytest.mark.parametrize(("labels", "message"), [
    ([0, 1, 2, 3], "label 3 of image 3 is outside 0 to 2"),
    ([0, 1, -1, 2], "label -1 of image 2"),
    ([0, 1, None, 2], "row 2 has no label"),
    (["cat", "dog", "cow", "owl"], "'cow'"),
    ([0.5, 1.0, 2.0, 0.0], "neither whole numbers nor names"),
])  # fmt: skip
def test_bad_labels_raise(tmp_path: Path, labels: list, message: str) -> None:
    write(tmp_path / "train.parquet", images(4), labels, names=NAMES)
    write(tmp_path / "test.parquet", images(4), labels, names=NAMES)
    with pytest.raises(GradveilError, match=message):
        load(f"parquet:{tmp_path}")


def test_values_that_are_not_images_raise(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", [], [0, 1], encoded=[1.0, 2.0])
    with pytest.raises(GradveilError, match="holds no encoded image"):
        load(f"parquet:{tmp_path}", limit_public=1)


def test_splits_of_different_shapes_raise(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", images(2), [0, 1])
    write(tmp_path / "test.parquet", images(2, 1), [0, 1])
    with pytest.raises(GradveilError, match="give size and channels"):
        load(f"parquet:{tmp_path}")
    assert load(f"parquet:{tmp_path}", channels=3).private.channels == 3


def test_unreadable_image_is_named_without_memory_address(tmp_path: Path) -> None:
    (tmp_path / "test/a").mkdir(parents=True)
    (tmp_path / "test/a/0.png").write_bytes(b"no image")
    with pytest.raises(GradveilError, match=r"0\.png: is not an image .*\(of no format that Pillow knows\)"):
        load(f"folder:{tmp_path}")
