"""Images in the rows of a layer's gradient: which rows hold one image, and which hold a mixture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.core.space import Space

_CLEAR = 6.0
"""Smallest ratio of a bin's gradient to the noise in empty bins."""
_EXACT = 1e-9
"""Share of the largest gradient below which a bin is empty, without noise."""
_SAME = 1e-3
"""Relative distance up to which two rows' images are the same example."""
_LISTED = 4
"""Examined images per example."""
_INSIDE = 0.99
"""Share of an image's pixels that must lie in [0, 1], unlike those of a mixture."""


def assembled(
    read: Callable[[int], tuple[Tensor, int]], finite: Tensor, count: int, space: Space
) -> tuple[Tensor, Tensor]:
    """Return inputs [V, count, ...] and the share of missing images [V], from what is read of each target client.

    `read` returns images [n <= count, N] with pixels in [0, 1] and the number of clear ones. They are repeated up to
    the count. Target clients without a finite update, or without an image, have grey ones.
    """
    like = torch.zeros((), dtype=torch.double, device=finite.device)
    lower, upper = space.bounds(like)
    inputs = ((lower + upper) / 2).expand(len(finite), count, *space.shape).clone()
    missing = torch.ones(len(finite)).to(like)
    for place in finite.nonzero().flatten().tolist():
        images, clear = read(place)
        if len(images):
            pixels = images[torch.arange(count, device=images.device) % len(images)].clamp(0, 1)
            inputs[place] = lower + (upper - lower) * pixels.unflatten(1, space.shape)
        missing[place] = 1 - min(clear, count) / count
    return inputs, missing


def differences(rows: Tensor) -> Tensor:
    """Subtract from each row [K, ...] the next one; the last stays.

    >>> differences(torch.tensor([3.0, 2.0, 2.0]))
    tensor([1., 0., 2.])
    """
    return torch.cat([rows[:-1] - rows[1:], rows[-1:]])


def filled_bins(errors: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the places of the bins with the largest errors [K], and how many of them are clear of noise.

    At most `count` bins are full. The noise is the median of all bins, or the largest of few empty ones.
    """
    size = errors.abs()
    empty = min((len(size) - 1) // 2, len(size) - count - 1)
    noise = float(size.sort().values[empty]) if empty >= 0 else 0.0
    baseline = max(_CLEAR * noise, _EXACT * float(size.max()))
    best = size.argsort(descending=True, stable=True)[:count]
    clear = int((size[best] > baseline).sum())
    # If some bins are clear, the others contain only noise.
    return best[: clear or int((size[best] > 0).sum())], clear


def alone_images(images: Tensor, strength: Tensor, count: int, same: float = _SAME) -> tuple[Tensor, int]:
    """Choose images [n <= count, N] of rows that one example passes, and count those that several rows show.

    Images of several rows that are no mixtures passed these rows alone. Each row's image has a strength [K]; images
    closer than `same`, relative to their size, are one example.
    """
    if not len(images):
        return images, 0
    size = images.norm(dim=1)
    near = torch.cdist(images, images) <= same * torch.minimum(size.unsqueeze(0), size.unsqueeze(1))
    free = torch.ones(len(images), dtype=torch.bool, device=images.device)
    distinct: list[int] = []
    rows: list[int] = []
    while len(distinct) < _LISTED * count and bool(free.any()):
        alike = (near & free).sum(1) * free
        most = alike.max()
        place = int(torch.where(alike == most, strength, -1.0).argmax())
        distinct.append(place)
        rows.append(int(most))
        free = free & ~near[place]
        free[place] = False
    whole = (images[distinct] - 0.5).abs().le(0.5 + same).double().mean(1) > _INSIDE
    alone = whole & ~_mixtures(images[distinct], whole)
    # Sorting is stable: among the images alone, those of the most rows come first.
    order = (~alone).long().argsort(stable=True)[:count].tolist()
    clear = sum(rows[place] > 1 and bool(alone[place]) for place in order)
    return images[[distinct[place] for place in order]], clear


def _mixtures(images: Tensor, ends: Tensor) -> Tensor:
    """Mark mixtures: images that lie between two of the marked ones."""
    products = images @ images.T
    marks: list[Tensor] = []
    for place in range(len(images)):
        # Inner products of the differences to two other images: opposite directions if the image lies between them.
        inner = products - products[place] - products[:, place : place + 1] + products[place, place]
        size = inner.diagonal().clamp_min(0).sqrt() * ends
        lengths = size.unsqueeze(1) * size
        marks.append(((inner <= -(1 - _SAME) * lengths) & (lengths > 0)).any())
    return torch.stack(marks)
