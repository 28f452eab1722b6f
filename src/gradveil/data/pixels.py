"""Decoded images of any size, to one tensor of pixels in [0, 1].

Every resize is torch's bilinear interpolation with antialiasing: the shorter side is brought to the size, then the
centre square is kept. Bilinear weights are convex, so nothing leaves [0, 1].
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any

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
