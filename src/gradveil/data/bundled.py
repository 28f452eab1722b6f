"""Images that are part of the wheels of scikit-learn and scikit-image (extra `demo`): nothing is downloaded.

Each function returns a `Raw` with images in their original size. The order is fixed, so "the first 32 private images"
are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.core.extras import needs


class Raw(NamedTuple):
    """Two splits before resizing and normalisation: pixels in [0, 1] and class numbers."""

    public: Tensor
    public_labels: Tensor
    private: Tensor
    private_labels: Tensor


_DIGITS_PUBLIC = 1197
_FACE_PERIOD = 4  # three faces, then one background
_CROP = 80
_FLAT = 0.05
_PSEUDO_CLASSES = 10


def digits() -> Raw:
    """1797 handwritten digits, 8x8: the first 1197 are public, the last 600 (by other writers) are private."""
    with needs("demo", "digits"):
        from sklearn.datasets import load_digits

    features, numbers = _read(load_digits, return_X_y=True)
    # The levels of grey are 0 to 16.
    pixels = torch.as_tensor(features, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(numbers, dtype=torch.int64)
    cut = _DIGITS_PUBLIC
    return Raw(pixels[:cut], labels[:cut], pixels[cut:], labels[cut:])


def faces() -> Raw:
    """100 faces and 100 backgrounds, 25x25 and grey: half of each are public, half private.

    Private faces come first, so target clients hold faces; the private backgrounds behind them only test a model. In
    the public split three faces and a background take turns until no faces are left. Backgrounds are sorted by falling
    contrast: the last ones are plain black, and an attack that does nothing would "recover" them.
    """
    with needs("demo", "faces"):
        from skimage.data import lfw_subset

    pixels = torch.from_numpy(_read(lfw_subset)).float()[:, None]
    face, other = pixels[:100], pixels[100:]
    other = other[other.flatten(1).std(1).argsort(descending=True, stable=True)]
    splits = []
    for start in (0, 1):
        images = torch.cat([face[start::2], other[start::2]])
        labels = torch.cat([torch.zeros(50), torch.ones(50)]).long()
        order = torch.tensor(range(100) if start else _taking_turns(50))
        splits += [images[order], labels[order]]
    return Raw(*splits)


@cache
def _read(reader: Callable[..., Any], **how: Any) -> Any:
    """Read a small file once; nobody changes what it holds."""
    return reader(**how)


def _taking_turns(each: int) -> list[int]:
    """Order `each` faces (numbered from 0) and as many others (numbered from `each`) by the face period."""
    face, other = iter(range(each)), iter(range(each, 2 * each))
    order: list[int] = []
    for position in range(2 * each):
        first, second = (other, face) if position % _FACE_PERIOD == _FACE_PERIOD - 1 else (face, other)
        chosen = next(first, None)
        order.append(next(second) if chosen is None else chosen)
    return order


def patches() -> Raw:
    """80x80 crops of colour photographs; public and private crops come from different photographs.

    The crops of a photograph do not overlap. They are sorted by falling contrast; those with a standard deviation below
    0.05 (plain sky) are dropped. Photographs take turns. The labels mean nothing: they number the crops modulo 10.
    """
    with needs("demo", "patches"):
        from skimage import data
        from sklearn.datasets import load_sample_image

    public = (data.coffee(), load_sample_image("flower.jpg"), data.rocket(), data.retina(), data.immunohistochemistry())
    private = (data.astronaut(), data.chelsea(), load_sample_image("china.jpg"), data.stereo_motorcycle()[0])
    splits = []
    for photographs in (public, private):
        pixels = _take_turns([_crops(photograph) for photograph in photographs])
        splits += [pixels, torch.arange(len(pixels)) % _PSEUDO_CLASSES]
    return Raw(*splits)


def _crops(photograph: NDArray[np.uint8]) -> Tensor:
    pixels = torch.from_numpy(np.array(photograph)).permute(2, 0, 1).float() / 255
    tiles = pixels.unfold(1, _CROP, _CROP).unfold(2, _CROP, _CROP)
    # [3, rows, columns, 80, 80]: the tiles to the front, the channels behind them.
    tiles = tiles.permute(1, 2, 0, 3, 4).reshape(-1, 3, _CROP, _CROP)
    contrast = tiles.flatten(1).std(1)
    order = contrast.argsort(descending=True, stable=True)
    return tiles[order[contrast[order] >= _FLAT]]


def _take_turns(groups: list[Tensor]) -> Tensor:
    longest = max(len(group) for group in groups)
    return torch.stack([group[turn] for turn in range(longest) for group in groups if turn < len(group)])
