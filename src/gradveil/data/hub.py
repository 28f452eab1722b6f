"""Images from outside: Hugging Face names, local Parquet files and folders; decoded to pixels in [0, 1].

Every resize is torch's bilinear interpolation with antialiasing: the shorter side is brought to the size, then the
centre square is kept. Bilinear weights are convex, so nothing leaves [0, 1].

A source is opened as `Rows`: all labels at once (they are small), and a function that decodes only the images at given
positions. The first 128 test images of MNIST cost 128 decoded PNGs, not 10,000.
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

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: the weights every image tool uses for grey
_CHUNK = 4096  # images resized at once: bounds the memory, not the result


def decode(encoded: bytes, where: str) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Decode one image file to [H, W] (grey) or [H, W, 3] (colour), 8 bits, or float in [0, 1] where it holds more."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode in ("L", "1", "LA", "RGB"):
                return np.asarray(image.convert("L" if image.mode != "RGB" else "RGB"))
            if image.mode.startswith("I"):  # 16 bits a pixel, however Pillow widens them
                return np.asarray(image, dtype=np.float32) / np.float32(65535)
            if image.mode == "F":
                return np.asarray(image, dtype=np.float32)
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:  # its text names an object in memory
        what = "is not an image that can be read (of no format that Pillow knows)"
        raise fail(where, what, "store it as PNG, JPEG or TIFF, or take it out") from error
    except OSError as error:
        raise fail(where, f"is not an image that can be read ({error})", "repair it or take it out") from error


def marked(images: Iterable[NDArray[Any]], marks: list[int]) -> Iterator[NDArray[Any]]:
    """Pass decoded images on, and note a hash of each (64 bits of its BLAKE2b): the same image has the same one."""
    for image in images:
        told = f"{image.dtype.str}{image.shape}".encode() + image.tobytes()
        marks.append(int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big"))
        yield image


def resize(pixels: Tensor, size: int | None) -> Tensor:
    """Bring pixels [N, C, H, W] to size x size; None leaves them as they are."""
    height, width = pixels.shape[-2:]
    if size is None or (height, width) == (size, size):
        return pixels
    shorter = min(height, width)
    # Rounded down, the longer side could fall below `size`; rounded, it cannot.
    scaled = (round(height * size / shorter), round(width * size / shorter))
    parts = [
        interpolate(part, size=scaled, mode="bilinear", antialias=True, align_corners=False)
        for part in pixels.split(_CHUNK)
    ]
    top, left = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return torch.cat(parts)[..., top : top + size, left : left + size].clamp(0, 1).contiguous()


def recolour(pixels: Tensor, channels: int | None, where: str) -> Tensor:
    """Make grey of colour (luma 0.299 R + 0.587 G + 0.114 B) or three equal channels of grey; None changes nothing."""
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
    """Stack decoded images to float32 [N, C, S, S] in [0, 1], resizing images of different sizes one by one.

    Where grey and coloured images are mixed, all become coloured.
    """
    decoded = [image if image.ndim == 3 else image[..., None] for image in images]
    if not decoded:
        raise fail(where, "holds no images", "check the split, the folder, or the limit that was given")
    channels = max(image.shape[2] for image in decoded)
    shapes = {image.shape for image in decoded}
    if size is None and len({shape[:2] for shape in shapes}) > 1:
        raise fail(where, "holds images of different sizes", "give a size that all are brought to, say size=32")
    if len(shapes) == 1 and decoded[0].dtype == np.uint8:
        # One size and 8 bits, as in most sets: convert in bulk.
        whole = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)
        return torch.cat([resize(part.float() / 255, size) for part in whole.split(_CHUNK)])
    return torch.cat([resize(recolour(_unit(image), channels, where), size) for image in decoded])


def _unit(image: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


Images = Iterator[NDArray[Any]]
"""Decoded images [H, W, C] of bytes, one after the other."""
IMAGE_COLUMNS = ("image", "img", "pixel_values", "jpg", "png")
"""Column names that hold images, tried in this order where none is given."""
LABEL_COLUMNS = ("label", "fine_label", "labels", "target", "class")
"""Column names that hold labels, tried in this order."""
PRIVATE_SPLITS = ("test", "validation", "valid", "val")
"""Names of the split whose images are private, tried in this order."""
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
_NEED = "pip install 'gradveil[hub]'"


def no_columns(name: str) -> list[Any]:
    """Refuse to read a column where the source has none."""
    what = "is not there: only Parquet files and Hugging Face data have columns beside the label"
    raise fail(f"column '{name}'", what, "choose 'label', or such data")


class SourceSplit(NamedTuple):
    """One split of a source, not yet decoded."""

    labels: list[int | str]
    names: tuple[str, ...] | None
    """Class names where the source has them."""
    decode: Callable[[Sequence[int]], Images]
    """Decode the images at these positions (given in ascending order)."""
    where: str
    column: Callable[[str], list[Any]] = no_columns
    """The values of another column, one an example."""


def parquet(folder: Path, image: str | None = None, label: str | None = None) -> dict[str, SourceSplit]:
    """Open `train*.parquet` and `test*.parquet` of a folder (or below its `data/`), or a single Parquet file."""
    if folder.is_file():
        return {"train": _parquet_rows([folder], image, label)}
    if not folder.is_dir():
        raise fail(str(folder), "is not there", "check the path; --data-dir (or GRADVEIL_DATA) says where data lies")
    home = folder if any(folder.glob("*.parquet")) else folder / "data"
    found = {split: sorted(home.glob(f"{split}*.parquet")) for split in ("train", *PRIVATE_SPLITS)}
    opened = {split: _parquet_rows(files, image, label) for split, files in found.items() if files}
    if not opened:
        raise fail(str(folder), "has no train.parquet or test.parquet", "name the files train*.parquet, test*.parquet")
    return opened


def _parquet_rows(files: list[Path], image: str | None, label: str | None) -> SourceSplit:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise fail(str(files[0]), "Parquet needs the package pyarrow", _NEED) from error
    where = str(files[0])

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
        wanted, start = iter(indices), 0
        following = next(wanted, None)
        for table in tables:
            if following is None or following >= start + table.metadata.num_rows:
                start += table.metadata.num_rows
                continue
            for batch in table.iter_batches(batch_size=256, columns=[image]):
                while following is not None and following < start + len(batch):
                    yield _trial(batch.column(0)[following - start].as_py(), f"{where}, row {following}")
                    following = next(wanted, None)
                start += len(batch)
                if following is None:
                    return

    return SourceSplit(labels, _parquet_names(schema.metadata or {}, label), read, where, column)


def _parquet_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...] | None:
    """Class names, as the `datasets` library writes them into the schema."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def _columns(present: Sequence[str], image: str | None, label: str | None, where: str) -> tuple[str, str]:
    """Find the two columns among those present, or refuse with their names."""
    chosen = []
    for what, given, usual in (("image", image, IMAGE_COLUMNS), ("label", label, LABEL_COLUMNS)):
        candidates = (given,) if given else usual
        name = next((candidate for candidate in candidates if candidate in present), None)
        if name is None:
            remedy = f"set {what}_column to one of: {', '.join(present)}"
            raise fail(where, f"has no {what} column {' or '.join(candidates)}", remedy)
        chosen.append(name)
    return chosen[0], chosen[1]


def _present(name: str, columns: Sequence[str], where: str) -> str:
    if name not in columns:
        raise fail(f"column '{name}'", f"is not in {where}", f"choose among: {', '.join(columns)}")
    return name


def _trial(value: Any, where: str) -> NDArray[Any]:
    """Decode a trial: encoded bytes, or the {bytes, path} of the `datasets` library."""
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes") or (Path(path).read_bytes() if path and Path(path).is_file() else None)
    if isinstance(value, bytes):
        return decode(value, where)
    raise fail(where, "holds no encoded image", "store PNG or JPEG bytes, or name another image_column")


def folder(path: Path) -> dict[str, SourceSplit]:
    """Open `train/CLASS/*.png` and `test/CLASS/*.png`, or `CLASS/*.png` alone. Classes take turns in the order."""
    if not path.is_dir():
        raise fail(str(path), "is not there", "check the path; --data-dir (or GRADVEIL_DATA) says where data lies")
    splits = {split: path / split for split in ("train", *PRIVATE_SPLITS) if (path / split).is_dir()}
    opened = {split: _folder_rows(home) for split, home in (splits or {"train": path}).items()}
    return opened


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
    try:
        import datasets
    except ImportError as error:
        raise fail(f"hf:{name}", "needs the package datasets", _NEED) from error
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
            yield _trial(table[int(index)][image], f"{where}, row {index}")

    def column(name: str) -> list[Any]:
        return list(table[_present(name, table.column_names, where)])

    return SourceSplit(list(table[label]), names, read, where, column)


def two_splits(opened: dict[str, SourceSplit]) -> tuple[SourceSplit, SourceSplit]:
    """Choose the public split and the private split; of a single one, every fourth example of each class is private.

    A class of two or three examples gives its last one. Where all classes are that small, classes are left aside.
    """
    public = opened.get("train")
    private = next((opened[split] for split in PRIVATE_SPLITS if split in opened), None)
    if public is not None and private is not None:
        return public, private
    only = public or private or next(iter(opened.values()))
    places: dict[Any, list[int]] = {}
    for position, label in enumerate(only.labels):
        places.setdefault(label, []).append(position)
    if max(map(len, places.values()), default=0) < 4:
        places = {None: list(range(len(only.labels)))}
    chosen = np.zeros(len(only.labels), dtype=bool)
    for own in places.values():
        chosen[own[3::4] or own[1:][-1:]] = True
    return _pick(only, np.flatnonzero(~chosen)), _pick(only, np.flatnonzero(chosen))


def _pick(rows: SourceSplit, positions: NDArray[Any]) -> SourceSplit:
    chosen = positions.tolist()
    return rows._replace(
        labels=_at(rows.labels, chosen),
        decode=lambda indices: rows.decode([chosen[index] for index in indices]),
        column=lambda name: _at(rows.column(name), chosen),
    )


def _at(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


def number(public: SourceSplit, private: SourceSplit) -> tuple[tuple[str, ...], list[int], list[int]]:
    """Give the labels of both splits the same numbers; return class names, public labels, target client labels."""
    both = (*public.labels, *private.labels)
    names = public.names or private.names
    for rows in (public, private):
        if None in rows.labels:
            row = rows.labels.index(None)  # type: ignore[arg-type]
            raise fail(rows.where, f"row {row} has no label", "name another label_column, or a split that is labelled")
    if all(isinstance(value, str) for value in both):
        names = names or tuple(sorted({str(value) for value in both}))
        place = {name: position for position, name in enumerate(names)}
        unknown = sorted({str(value) for value in both} - set(place))
        if unknown:
            raise fail(private.where, f"class {unknown[0]!r} is in only one split", f"known: {', '.join(names)}")
        return names, [place[str(value)] for value in public.labels], [place[str(value)] for value in private.labels]
    if not all(isinstance(value, int) for value in both):
        raise fail(public.where, "labels are neither whole numbers nor names", "name another label_column")
    highest = max((int(value) for value in both), default=-1)
    names = names or tuple(str(value) for value in range(highest + 1))
    return names, [int(value) for value in public.labels], [int(value) for value in private.labels]
