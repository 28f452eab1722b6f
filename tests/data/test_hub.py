"""Parquet, folders and Hugging Face names, with small files made here."""

import io
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import DATA_DIR, Dataset, hub, load
from gradveil.data.hub import recolour, resize
from tests.data.files import NAMES, encode, images, write


def test_pixels_labels_and_published_constants(home: Path) -> None:
    public, private = load("cifar10", data_dir=home, size=None)
    expected = torch.from_numpy(np.stack(images(6, seed=1))).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(private.views, expected, atol=1e-6, rtol=0)
    assert private.targets.tolist() == [2, 1, 0, 2, 1, 0]
    assert len(public) == 9
    assert private.classes == tuple(NAMES)
    assert private.mean == (0.4914, 0.4822, 0.4465)


def test_images_of_one_client_are_random_training_images_and_private(home: Path) -> None:
    pictures = images(600, seed=5)  # more than are read at once
    write(home / "cifar10/train.parquet", pictures, [i % 3 for i in range(600)], names=NAMES)
    training = {encode(picture): i for i, picture in enumerate(pictures)}

    def places(part: Dataset) -> list[int]:
        views = (part.views * 255).round().byte().permute(0, 2, 3, 1).numpy()
        return [training[encode(view)] for view in views]

    public, private = load("cifar10", data_dir=home, size=None, client_seed=3)
    own = places(private)
    assert own != sorted(own)
    assert sorted([*own, *places(public)]) == [*range(600)]
    assert len(own) == 60
    again = load("cifar10", data_dir=home, size=None, client_seed=3, limit_private=2)
    assert places(again.private) == own[:2]
    assert places(load("cifar10", data_dir=home, size=None, client_seed=4).private) != own


def test_identity_depends_on_file_contents(home: Path, tmp_path: Path) -> None:
    splits = load("cifar10", data_dir=home)
    held = splits.identities()
    assert None not in held.values()
    assert len({*held.values()}) == 2
    # How they are read afterwards changes nothing of what they are; another folder of the same images neither.
    write(tmp_path / "copy/test.parquet", images(6, seed=1), [2 - i % 3 for i in range(6)], names=NAMES)
    write(tmp_path / "copy/train.parquet", images(9), [i % 3 for i in range(9)], names=NAMES)
    assert load(f"parquet:{tmp_path / 'copy'}", size=16, channels=1, normalise="none").identities() == held
    private = splits.private
    assert (
        private.identity(4)
        == private.subset(range(4)).identity()
        == load("cifar10", data_dir=home, limit_private=4).private.identity()
    )
    assert private.identity(4) != private.identity(5)
    assert load("digits").private.identity() is None


@pytest.mark.parametrize("change", ["pixel", "label", "order"])
def test_changed_files_change_the_identity(home: Path, change: str) -> None:
    before = load("cifar10", data_dir=home).identities()
    pictures, labels = images(6, seed=1), [2 - i % 3 for i in range(6)]
    if change == "pixel":
        pictures[5][0, 0, 0] ^= 1
    elif change == "label":
        labels[5] = 1
    else:
        pictures[:2] = pictures[1::-1]
    write(home / "cifar10/test.parquet", pictures, labels, names=NAMES)
    after = load("cifar10", data_dir=home).identities()
    assert after["private"] != before["private"]
    assert after["public"] == before["public"]


def test_environment_variable_sets_the_data_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_DIR, str(home))
    assert len(load("cifar10").private) == 6
    assert len(load("parquet:cifar10").private) == 6


def test_limit_decodes_only_its_images(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counted(encoded: bytes, where: str) -> np.ndarray:
        decoded.append(where)
        return decode(encoded, where)

    decode = hub.decode
    monkeypatch.setattr(hub, "decode", counted)
    few = load("cifar10", data_dir=home, limit_public=1, limit_private=3)
    assert len(decoded) == 4
    everything = load("cifar10", data_dir=home)
    assert torch.equal(few.private.inputs, everything.private.inputs[:3])


def test_shards_other_columns_and_string_labels(tmp_path: Path) -> None:
    for shard in range(2):
        path = tmp_path / f"data/train-0000{shard}-of-00002.parquet"
        write(path, images(3, 1, seed=shard), ["owl", "cat", "dog"], columns=("img", "fine_label"))
    write(tmp_path / "data/validation.parquet", images(2, 1, seed=5), ["dog", "cat"], columns=("img", "fine_label"))
    public, private = load(f"parquet:{tmp_path}", size=None, normalise="none")
    assert public.classes == ("cat", "dog", "owl")
    assert public.targets.tolist() == [2, 0, 1, 2, 0, 1]
    assert private.targets.tolist() == [1, 0]
    expected = np.stack(images(3, 1) + images(3, 1, seed=1))
    torch.testing.assert_close(public.inputs[:, 0], torch.from_numpy(expected) / 255)


def test_custom_column_names(tmp_path: Path) -> None:
    write(tmp_path / "test.parquet", images(4), [0, 1, 0, 1], columns=("scan", "finding"))
    with pytest.raises(GradveilError, match="set image_column to one of: scan, extra, finding"):
        load(f"parquet:{tmp_path}")
    with pytest.raises(GradveilError, match="set label_column"):
        load(f"parquet:{tmp_path}", image_column="scan")
    assert len(load(f"parquet:{tmp_path}", image_column="scan", label_column="finding").private) == 1


def test_a_single_split_is_divided_without_overlap(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", images(9), list(range(9)))
    public, private = load(f"parquet:{tmp_path / 'all.parquet'}", size=None, normalise="none", limit_public=5)
    assert public.targets.tolist() == [0, 1, 2, 4, 5]
    assert private.targets.tolist() == [3, 7]
    expected = torch.from_numpy(np.stack([images(9)[3], images(9)[7]])).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(private.inputs, expected)


def test_a_single_split_in_shards_is_divided(tmp_path: Path) -> None:
    for shard in range(3):
        write(tmp_path / f"train-{shard}.parquet", images(3, seed=shard), [3 * shard, 3 * shard + 1, 3 * shard + 2])
    private = load(f"parquet:{tmp_path}", size=None, normalise="none").private
    assert private.targets.tolist() == [3, 7]
    expected = torch.from_numpy(np.stack([images(3, seed=1)[0], images(3, seed=2)[1]])).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(private.inputs, expected)


def test_folders_keep_classes_balanced_and_mix_sizes_and_colours(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for place, name in enumerate(NAMES):
            for index in range(count):
                home = tmp_path / split / name
                home.mkdir(parents=True, exist_ok=True)
                picture = images(1, 1 if place == 0 else 3, side=20 + 4 * index, seed=place)[0]
                Image.fromarray(picture[:, : 18 + index]).save(home / f"{index}.png")
    (tmp_path / "test" / "cat" / "notes.txt").write_text("not an image")
    public, private = load(f"folder:{tmp_path}", size=16, limit_public=4)
    assert public.targets.tolist() == [0, 1, 2, 0]
    assert public.inputs.shape == (4, 3, 16, 16)
    assert private.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert private.classes == tuple(NAMES)
    with pytest.raises(GradveilError, match="different sizes"):
        load(f"folder:{tmp_path}", size=None)


def test_a_folder_of_classes_alone_is_divided(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        for index, picture in enumerate(images(4)):
            Image.fromarray(picture).save(tmp_path / name / f"{index}.png")
    public, private = load(f"folder:{tmp_path}")
    assert (len(public), len(private)) == (9, 3)


def test_hugging_face_names(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    public, private = load(f"hf:{home / 'cifar10'}", size=None, normalise="none", limit_private=4)
    local = load("cifar10", data_dir=home, size=None, normalise="none")
    assert torch.equal(public.inputs, local.public.inputs)
    assert torch.equal(private.inputs, local.private.inputs[:4])
    assert private.classes == tuple(NAMES)


def test_other_image_modes(tmp_path: Path) -> None:
    deep = np.array([[0, 65535], [32768, 1000]], dtype=np.uint16)
    real = np.array([[0.0, 1.0], [0.25, np.nan]], dtype=np.float32)
    palette = io.BytesIO()
    Image.fromarray(images(1, side=2)[0]).quantize(4).save(palette, "PNG")
    write(tmp_path / "train.parquet", [], [0], encoded=[encode(deep)])
    write(tmp_path / "test.parquet", [], [0], encoded=[palette.getvalue()])
    public, private = load(f"parquet:{tmp_path}", size=None, normalise="none", channels=1)
    torch.testing.assert_close(public.inputs[0, 0], torch.from_numpy(deep.astype(np.float32) / 65535))
    assert private.channels == 1
    write(tmp_path / "test.parquet", [], [0], encoded=[encode(real, "TIFF")])
    with pytest.raises(GradveilError, match="NaN or infinite pixels"):
        load(f"parquet:{tmp_path}", size=None, normalise="none")


def test_resize_keeps_the_centre() -> None:
    ramp = torch.linspace(0, 1, 64).expand(1, 1, 32, 64).contiguous()
    small = resize(ramp, 8)
    assert small.shape == (1, 1, 8, 8)
    torch.testing.assert_close(small[0, 0, 0], ramp[0, 0, 0, 16:48].reshape(8, 4).mean(1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [8, 11, 32])
def test_resize_equals_pillow(size: int) -> None:
    picture = images(1, 1, side=28)[0]
    reference = Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR)
    resized = resize(torch.from_numpy(picture)[None, None] / 255, size)[0, 0]
    torch.testing.assert_close(resized, torch.from_numpy(np.array(reference)) / 255, atol=1.01 / 255, rtol=0)


def test_recolour_uses_luma_and_rejects_other_channels() -> None:
    colour = torch.tensor([1.0, 0.5, 0.25]).reshape(1, 3, 1, 1)
    assert recolour(colour, 1, "x").item() == pytest.approx(0.299 + 0.2935 + 0.0285)
    assert torch.equal(recolour(colour[:, :1], 3, "x"), torch.ones(1, 3, 1, 1))
    with pytest.raises(GradveilError, match=r"cannot turn 2 channel\(s\) into 3"):
        recolour(torch.zeros(1, 2, 1, 1), 3, "x")


def test_single_split_has_private_images_of_every_class():
    rows = hub.SourceSplit([0, 1] * 8 + [2, 2], None, lambda places: [np.zeros((2, 2), np.uint8)] * len(places), "here")
    public, private = hub.two_splits({"train": rows})
    assert sorted(private.labels) == [0, 0, 1, 1, 2]
    assert sorted(public.labels) == [0] * 6 + [1] * 6 + [2]
