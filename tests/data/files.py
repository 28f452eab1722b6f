"""Small files of images, as Hugging Face and people have them."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = ["cat", "dog", "owl"]


def images(count: int, channels: int = 3, side: int = 8, seed: int = 0) -> list[np.ndarray]:
    shape = (count, side, side) if channels == 1 else (count, side, side, channels)
    return list(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def encode(image: np.ndarray, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, form)
    return buffer.getvalue()


def write(
    path: Path, pictures: list[np.ndarray], labels: list, columns=("image", "label"), names=None, encoded=None
) -> None:
    """Write a Parquet file as the hub stores images, two rows a row group."""
    trials = [{"bytes": encode(picture), "path": None} for picture in pictures] if encoded is None else encoded
    table = pa.table({columns[0]: trials, "extra": list(range(len(labels))), columns[1]: labels})
    if names:
        features = {columns[1]: {"names": names, "_type": "ClassLabel"}, columns[0]: {"_type": "Image"}}
        features["extra"] = {"dtype": "int64", "_type": "Value"}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
