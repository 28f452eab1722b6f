"""Images from Hugging Face, local Parquet files and folders, decoded to pixels in [0, 1].

Images are resized by torch's bilinear interpolation with antialiasing: the shorter side gets the requested size, then
the centre square is kept. Bilinear weights are convex, so pixels stay in [0, 1].

A source is opened as `SourceSplit`s, which hold all labels, and a function that decodes the images at given indices.
The first 128 test images of MNIST cost 128 decoded PNGs, not 10,000.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from gradveil.core.errors import fail
from gradveil.core.extras import needs

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: the weights every image tool uses for grey
_CHUNK = 4096  # images resized at once: bounds the memory, not the result


def decode(encoded: bytes, where: str) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Decode one image file to [H, W] (grey) or [H, W, 3] (colour): 8 bits, or float in [0, 1] for deeper images."""
    with needs("hub", where):
        from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode in ("L", "1", "LA", "RGB"):
                return np.asarray(image.convert("L" if image.mode != "RGB" else "RGB"))
            if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow may widen to 32
                return np.asarray(image, dtype=np.float32) / np.float32(65535)
            if image.mode == "F":
                return np.asarray(image, dtype=np.float32)
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:  # its text names an object in memory
        problem = "is not an image that can be read (of no format that Pillow knows)"
        raise fail(where, problem, "store it as PNG, JPEG or TIFF, or remove it") from error
    except OSError as error:
        raise fail(where, f"is not an image that can be read ({error})", "repair or remove it") from error


def marked(images: Iterable[NDArray[Any]], marks: list[int]) -> Iterator[NDArray[Any]]:
    """Yield the images, and append a hash of each (64 bits of BLAKE2b) to `marks`."""
    for image in images:
        content = f"{image.dtype.str}{image.shape}".encode() + image.tobytes()
        marks.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
        yield image


def resize(pixels: Tensor, size: int | None) -> Tensor:
    """Resize pixels [N, C, H, W] to size x size; None leaves them as they are."""
    height, width = pixels.shape[-2:]
    if size is None or (height, width) == (size, size):
        return pixels
    shorter = min(height, width)
    # Round, as int() could make the longer side smaller than `size`.
    scaled = (round(height * size / shorter), round(width * size / shorter))
    parts = [
        interpolate(part, size=scaled, mode="bilinear", antialias=True, align_corners=False)
        for part in pixels.split(_CHUNK)
    ]
    top, left = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return torch.cat(parts)[..., top : top + size, left : left + size].clamp(0, 1).contiguous()


def recolour(pixels: Tensor, channels: int | None, where: str) -> Tensor:
    """Convert colour to grey (luma 0.299 R + 0.587 G + 0.114 B) or grey to three channels; None changes nothing."""
    present = pixels.shape[1]
    if channels is None or channels == present:
        return pixels
    if (present, channels) == (1, 3):
        return pixels.repeat(1, 3, 1, 1)
    if (present, channels) == (3, 1):
        weights = torch.tensor(_LUMA, dtype=pixels.dtype, device=pixels.device).reshape(1, 3, 1, 1)
        return (pixels * weights).sum(1, keepdim=True).clamp(0, 1)
    raise fail(where, f"cannot turn {present} channel(s) into {channels}", "choose channels 1 (grey) or 3 (colour)")


def stack(images: Iterable[NDArray[np.uint8] | NDArray[np.float32]], size: int | None, where: str) -> Tensor:
    """Stack decoded images to float32 [N, C, S, S] in [0, 1]. Grey images among colour images become colour."""
    decoded = [image if image.ndim == 3 else image[..., None] for image in images]
    if not decoded:
        raise fail(where, "holds no images", "check the split, the folder and the limit")
    channels = max(image.shape[2] for image in decoded)
    shapes = {image.shape for image in decoded}
    if size is None and len({shape[:2] for shape in shapes}) > 1:
        raise fail(where, "holds images of different sizes", "give a size for all, for example size=32")
    if len(shapes) == 1 and decoded[0].dtype == np.uint8:
        # The common case, one size and 8 bits: convert in bulk.
        whole = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)
        return torch.cat([resize(part.float() / 255, size) for part in whole.split(_CHUNK)])
    return torch.cat([resize(recolour(_unit(image), channels, where), size) for image in decoded])


def _unit(image: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


Images = Iterator[NDArray[Any]]
"""Decoded images [H, W] or [H, W, C]."""
IMAGE_COLUMNS = ("image", "img", "pixel_values", "jpg", "png")
"""Default names of the image column, tried in this order."""
LABEL_COLUMNS = ("label", "fine_label", "labels", "target", "class")
"""Default names of the label column, tried in this order."""
PRIVATE_SPLITS = ("test", "validation", "valid", "val")
"""Names of the private split, tried in this order."""
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
_CHECK_PATH = "check the path, and the data folder that --data-dir or GRADVEIL_DATA names"


def no_columns(name: str) -> list[Any]:
    """Raise: the source has no columns."""
    problem = "is not there: only Parquet files and Hugging Face data have columns other than the label"
    raise fail(f"column '{name}'", problem, "choose 'label', or such data")


class SourceSplit(NamedTuple):
    """One split of a source, not yet decoded."""

    labels: list[int | str]
    names: tuple[str, ...] | None
    """Class names, if the source has them."""
    decode: Callable[[Sequence[int]], Images]
    """Decode the images at these indices, which must ascend."""
    where: str
    column: Callable[[str], list[Any]] = no_columns
    """Read another column, one value per example."""


def parquet(folder: Path, image: str | None = None, label: str | None = None) -> dict[str, SourceSplit]:
    """Open `train*.parquet` and `test*.parquet` of a folder (or of its `data/`), or a single Parquet file."""
    if folder.is_file():
        return {"train": _parquet_rows([folder], image, label)}
    if not folder.is_dir():
        raise fail(str(folder), "is not there", _CHECK_PATH)
    home = folder if any(folder.glob("*.parquet")) else folder / "data"
    paths = {split: sorted(home.glob(f"{split}*.parquet")) for split in ("train", *PRIVATE_SPLITS)}
    opened = {split: _parquet_rows(files, image, label) for split, files in paths.items() if files}
    if not opened:
        raise fail(str(folder), "has no train.parquet or test.parquet", "name the files train*.parquet, test*.parquet")
    return opened


def _parquet_rows(files: list[Path], image: str | None, label: str | None) -> SourceSplit:
    where = str(files[0])
    with needs("hub", where):
        import pyarrow as pa
        import pyarrow.parquet as pq

    def values(tables: Sequence[Any], name: str) -> list[Any]:
        return [value for table in tables for value in table.read([name])[name].to_pylist()]

    try:
        tables = [pq.ParquetFile(path) for path in files]
        schema = tables[0].schema_arrow
        image, label = _columns(schema.names, image, label, where)
        labels = values(tables, label)
    except (pa.ArrowException, OSError) as error:
        raise fail(where, f"cannot be read as Parquet ({error})", "check that the file is complete") from error

    def column(name: str) -> list[Any]:
        return values(tables, _present(name, schema.names, where))

    def read(indices: Sequence[int]) -> Images:
        ascending = sorted(set(indices))
        if list(indices) != ascending:  # the files are read from their start to their end
            found = dict(zip(ascending, read(ascending), strict=True))
            yield from (found[index] for index in indices)
            return
        wanted, start = iter(ascending), 0
        following = next(wanted, None)
        for table in tables:
            if following is None or following >= start + table.metadata.num_rows:
                start += table.metadata.num_rows
                continue
            for batch in table.iter_batches(batch_size=256, columns=[image]):
                while following is not None and following < start + len(batch):
                    yield _decoded(batch.column(0)[following - start].as_py(), f"{where}, row {following}")
                    following = next(wanted, None)
                start += len(batch)
                if following is None:
                    return

    return SourceSplit(labels, _parquet_names(schema.metadata or {}, label), read, where, column)


def _parquet_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...] | None:
    """Return the class names that the `datasets` library wrote into the schema."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def _columns(present: Sequence[str], image: str | None, label: str | None, where: str) -> tuple[str, str]:
    """Return the names of the image and label columns; raise if one is not present."""
    chosen = []
    for role, requested, defaults in (("image", image, IMAGE_COLUMNS), ("label", label, LABEL_COLUMNS)):
        candidates = (requested,) if requested else defaults
        name = next((candidate for candidate in candidates if candidate in present), None)
        if name is None:
            remedy = f"set {role}_column to one of: {', '.join(present)}"
            raise fail(where, f"has no {role} column {' or '.join(candidates)}", remedy)
        chosen.append(name)
    return chosen[0], chosen[1]


def _present(name: str, columns: Sequence[str], where: str) -> str:
    if name not in columns:
        raise fail(f"column '{name}'", f"is not in {where}", f"choose among: {', '.join(columns)}")
    return name


def _decoded(value: Any, where: str) -> NDArray[Any]:
    """Decode a value of the image column: encoded bytes, or the {bytes, path} of the `datasets` library."""
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes") or (Path(path).read_bytes() if path and Path(path).is_file() else None)
    if isinstance(value, bytes):
        return decode(value, where)
    raise fail(where, "holds no encoded image", "store PNG or JPEG bytes, or name another image_column")


def folder(path: Path) -> dict[str, SourceSplit]:
    """Open `train/CLASS/*.png` and `test/CLASS/*.png`, or `CLASS/*.png` alone. Images alternate between classes."""
    if not path.is_dir():
        raise fail(str(path), "is not there", _CHECK_PATH)
    splits = {split: path / split for split in ("train", *PRIVATE_SPLITS) if (path / split).is_dir()}
    return {split: _folder_rows(home) for split, home in (splits or {"train": path}).items()}


def _folder_rows(home: Path) -> SourceSplit:
    names = tuple(sorted(child.name for child in home.iterdir() if child.is_dir() and not child.name.startswith(".")))
    files = [
        sorted(file for file in (home / name).rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        for name in names
    ]
    # The n-th image of every class before the (n + 1)-th of any: a limit then keeps the classes balanced.
    order = sorted((turn, label) for label, of_class in enumerate(files) for turn in range(len(of_class)))
    if not order:
        raise fail(str(home), "holds no images", "lay them out as train/CLASS/*.png and test/CLASS/*.png")

    def read(indices: Sequence[int]) -> Images:
        for index in indices:
            turn, label = order[index]
            path = files[label][turn]
            yield decode(path.read_bytes(), str(path))

    return SourceSplit([names[label] for _, label in order], names, read, str(home))


def hugging_face(name: str, image: str | None = None, label: str | None = None) -> dict[str, SourceSplit]:
    """Open a data set of the Hugging Face hub, `owner/name` or `owner/name:configuration`, with all its splits."""
    with needs("hub", f"hf:{name}"):
        import datasets
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except (OSError, ValueError, RuntimeError) as error:  # unknown name, no network, unknown configuration, bad files
        reason = " ".join(str(error).split())
        remedy = "check the name (hf:owner/name or hf:owner/name:configuration) and the network, or use local files"
        raise fail(f"hf:{name}", f"cannot be loaded ({reason})", remedy) from error
    return {str(split): _hub_rows(table, f"hf:{name}, {split}", image, label) for split, table in loaded.items()}


def _hub_rows(table: Any, where: str, image: str | None, label: str | None) -> SourceSplit:
    import datasets

    image, label = _columns(table.column_names, image, label, where)
    feature = table.features[label]
    names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    if isinstance(table.features[image], datasets.Image):
        table = table.cast_column(image, datasets.Image(decode=False))

    def read(indices: Sequence[int]) -> Images:
        for index in indices:
            yield _decoded(table[int(index)][image], f"{where}, row {index}")

    def column(name: str) -> list[Any]:
        return list(table[_present(name, table.column_names, where)])

    return SourceSplit(list(table[label]), names, read, where, column)


def two_splits(opened: dict[str, SourceSplit]) -> tuple[SourceSplit, SourceSplit]:
    """Return the public and the private split; of a single split, every fourth example of each class is private.

    The last example of a class with two or three is private. If all classes are smaller than four, classes are ignored.
    """
    public = opened.get("train")
    private = next((opened[split] for split in PRIVATE_SPLITS if split in opened), None)
    if public is not None and private is not None:
        return public, private
    only = public or private or next(iter(opened.values()))
    by_class: dict[Any, list[int]] = {}
    for index, label in enumerate(only.labels):
        by_class.setdefault(label, []).append(index)
    if max(map(len, by_class.values()), default=0) < 4:
        by_class = {None: list(range(len(only.labels)))}
    is_private = np.zeros(len(only.labels), dtype=bool)
    for indices in by_class.values():
        is_private[indices[3::4] or indices[1:][-1:]] = True
    return pick(only, np.flatnonzero(~is_private)), pick(only, np.flatnonzero(is_private))


def pick(rows: SourceSplit, indices: NDArray[Any]) -> SourceSplit:
    """Return some rows of a split, in this order."""
    chosen = indices.tolist()

    def of_chosen(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in chosen]

    return rows._replace(
        labels=of_chosen(rows.labels),
        decode=lambda wanted: rows.decode([chosen[index] for index in wanted]),
        column=lambda name: of_chosen(rows.column(name)),
    )


def number(public: SourceSplit, private: SourceSplit) -> tuple[tuple[str, ...], list[int], list[int]]:
    """Assign class numbers to the labels of both splits; return class names, public labels, private labels."""
    both = (*public.labels, *private.labels)
    names = public.names or private.names
    for rows in (public, private):
        if None in rows.labels:
            row = rows.labels.index(None)  # type: ignore[arg-type]
            raise fail(rows.where, f"row {row} has no label", "name another label_column, or a labelled split")
    if all(isinstance(value, str) for value in both):
        names = names or tuple(sorted({str(value) for value in both}))
        index = {name: i for i, name in enumerate(names)}
        unknown = sorted({str(value) for value in both} - set(index))
        if unknown:
            raise fail(private.where, f"class {unknown[0]!r} is in only one split", f"known: {', '.join(names)}")
        return names, [index[str(value)] for value in public.labels], [index[str(value)] for value in private.labels]
    if not all(isinstance(value, int) for value in both):
        raise fail(public.where, "labels are neither whole numbers nor names", "name another label_column")
    highest = max((int(value) for value in both), default=-1)
    names = names or tuple(str(value) for value in range(highest + 1))
    return names, [int(value) for value in public.labels], [int(value) for value in private.labels]
