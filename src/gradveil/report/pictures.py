"""Images as PNG data URIs: contact sheets, and pairs of ground truth and reconstruction."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.result_rows import Row

COLUMNS = 8
"""Tiles per row of a contact sheet."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(image: Tensor) -> bytes:
    """Encode one image, [C, H, W] in [0, 1] with 1 or 3 channels, as an 8-bit PNG (ISO/IEC 15948); NaN is black."""
    channels, height, width = image.shape
    eight = (image.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    lines = eight.permute(1, 2, 0).reshape(height, -1).cpu().numpy()
    # In a PNG, every line starts with its filter; 0 means unfiltered.
    raw = b"".join(b"\0" + line.tobytes() for line in lines)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """Write bytes as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def contact_sheet(images: Tensor, columns: int = COLUMNS) -> Tensor:
    """Lay tiles out in rows: [N, C, H, W] -> [C, rows H, columns W]; the rest of the last row is black.

    >>> contact_sheet(torch.ones(5, 1, 2, 3), columns=4).shape
    torch.Size([1, 4, 12])
    """
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    padded = torch.zeros(rows * columns, channels, height, width)
    padded[:count] = images
    grid = padded.reshape(rows, columns, channels, height, width)
    return grid.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


@dataclass(frozen=True)
class ContactSheet:
    """One contact sheet in the page."""

    number: int
    uri: str
    columns: int
    height: int
    width: int
    caption: str


@dataclass
class Album:
    """All contact sheets of a report; equal ones with the same caption are kept once."""

    sheets: list[ContactSheet] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)

    def add(self, images: Tensor, caption: str) -> int:
        """Add a batch of images [V, B, C, H, W] and return the number of its sheet."""
        flat = images.detach().float().flatten(0, 1)
        if flat.shape[1] not in (1, 3):
            flat = flat[:, :1]
        encoded = png(contact_sheet(flat))
        digest = hashlib.sha256(caption.encode() + encoded).hexdigest()
        if digest not in self._seen:
            number = self._seen[digest] = len(self.sheets)
            columns = min(COLUMNS, len(flat))
            self.sheets.append(
                ContactSheet(number, data_uri(encoded), columns, flat.shape[-2], flat.shape[-1], caption)
            )
        return self._seen[digest]


def pairs(rows: Sequence[Row], album: Album) -> list[dict[str, Any]]:
    """List every ground truth with its reconstruction, the worst leak first, and add the pictures to the album."""
    result: list[dict[str, Any]] = []
    for row in rows:
        images = row.trial.images() or {}
        if "truth" not in images or "reconstruction" not in images:
            continue
        run = f"{row.defence_name}, {row.attack}, seed {row.seed}"
        truth = album.add(images["truth"], f"ground truth: {row.info['data']}")
        reconstruction = album.add(images["reconstruction"], f"reconstruction: {run}")
        trained = (
            album.add(images["truth_transformed"], f"trained on: {run}") if "truth_transformed" in images else None
        )
        batch = int(images["truth"].shape[1])
        for position, record in enumerate(row.trial.records):
            entries = record["per_image"]
            for j, entry in enumerate(entries):
                result.append(
                    {
                        "row": row.number,
                        "truth": truth,
                        "reconstruction": reconstruction,
                        "trained": trained,
                        "tile": position * batch + j,
                        "target_client": f"{record['target_client']}.{j}"
                        if len(entries) > 1
                        else str(record["target_client"]),
                        "ssim": entry.get("ssim"),
                        "psnr": entry.get("psnr"),
                        "recovered": row.successes[int(record["target_client"]), j],
                        "status": record["status"],
                    }
                )
    return sorted(result, key=lambda pair: -(pair["ssim"] if pair["ssim"] is not None else -2.0))
