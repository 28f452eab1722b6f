"""Operations on images [B, C, H, W] of pixels in [0, 1]: geometry, colour, and what acts on the 256 levels.

They follow Pillow's. Geometry interpolates linearly, so that it has a derivative; what acts on levels is exact for
images that have them, and differentiated as if it were smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.tree import straight_through

Operation = Callable[[Tensor, Tensor], Tensor]
"""(pixels [B, C, H, W], strength [B]) -> pixels"""
LEVELS = 255
"""The highest of the 256 levels: white."""
GREY = 128 / LEVELS
"""What a rotation leaves empty; what a shear or a translation does is black."""
_LUMA = (0.299, 0.587, 0.114)


def warp(u: Tensor, rows: Tensor, fill: float = 0.0) -> Tensor:
    """Take the pixel at (x, y) from (a x + b y + c, d x + e y + f), rows [B, 2, 3] = [[a, b, c], [d, e, f]].

    Coordinates are in pixels from the upper left corner, so that the centre of the first pixel is at (1/2, 1/2).
    """
    height, width = u.shape[-2:]
    y, x = torch.meshgrid(_centres(height, u), _centres(width, u), indexing="ij")
    at = torch.stack([x, y, torch.ones_like(x)], -1)
    size = torch.stack([u.new_tensor(width), u.new_tensor(height)])
    grid = 2 * torch.einsum("hwk,bjk->bhwj", at, rows) / size - 1
    return fill + F.grid_sample(u - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def shear_x(u: Tensor, strength: Tensor) -> Tensor:
    """Shift every row by `strength` times its distance from the top."""
    return warp(u, _rows(u, strength, b=1.0))


def shear_y(u: Tensor, strength: Tensor) -> Tensor:
    """Shift every column by `strength` times its distance from the left."""
    return warp(u, _rows(u, strength, d=1.0))


def translate_x(u: Tensor, strength: Tensor) -> Tensor:
    """Shift to the left by `strength` of the width."""
    return warp(u, _rows(u, strength, c=float(u.shape[-1])))


def translate_y(u: Tensor, strength: Tensor) -> Tensor:
    """Shift upwards by `strength` of the height."""
    return warp(u, _rows(u, strength, f=float(u.shape[-2])))


def rotate(u: Tensor, strength: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre by `strength` degrees."""
    middle = u.new_tensor([u.shape[-1] / 2, u.shape[-2] / 2])
    angle = strength * math.pi / 180
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return warp(u, torch.cat([turn, (middle - turn @ middle).unsqueeze(-1)], -1), GREY)


def colour(u: Tensor, strength: Tensor) -> Tensor:
    """Blend with the grey image: away from it by `strength`."""
    return _blend(_grey(u), u, strength)


def contrast(u: Tensor, strength: Tensor) -> Tensor:
    """Blend with the mean grey."""
    return _blend(_grey(u).mean((-1, -2), keepdim=True), u, strength)


def brightness(u: Tensor, strength: Tensor) -> Tensor:
    """Blend with black."""
    return _blend(torch.zeros_like(u), u, strength)


def sharpness(u: Tensor, strength: Tensor) -> Tensor:
    """Blend with the image smoothed by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13; its border stays."""
    kernel = u.new_ones(3, 3)
    kernel = (kernel + 4 * F.pad(u.new_ones(1, 1), (1, 1, 1, 1))) / 13
    channels = u.shape[1]
    inner = F.pad(F.conv2d(u, kernel.expand(channels, 1, 3, 3), groups=channels), (1, 1, 1, 1))
    border = F.pad(torch.zeros_like(u[..., 1:-1, 1:-1]), (1, 1, 1, 1), value=1.0)
    return _blend(torch.where(border > 0, u, inner), u, strength)


def invert(u: Tensor, strength: Tensor) -> Tensor:
    """Exchange black and white; it has no strength."""
    return 1 - u


def posterize(u: Tensor, strength: Tensor) -> Tensor:
    """Keep the upper bits of each level: as many as `strength`, rounded."""
    step = torch.exp2(8 - strength.round()).view(-1, 1, 1, 1)
    return straight_through((_levels(u) / step).floor() * step / LEVELS, u)


def solarize(u: Tensor, strength: Tensor) -> Tensor:
    """Invert the levels from `strength` on."""
    return torch.where(_levels(u) < strength.view(-1, 1, 1, 1), u, 1 - u)


def autocontrast(u: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel's levels from 0 to 255; a channel of one level stays. It has no strength."""
    level = _levels(u)
    low, high = level.amin((-1, -2), keepdim=True), level.amax((-1, -2), keepdim=True)
    flat = high <= low
    # In double precision, as Pillow computes it: a level may fall short of a whole number and be cut off.
    spread = torch.where(flat, torch.ones_like(high), high - low).double()
    scale = torch.full_like(spread, LEVELS) / spread
    exact = (level.double() * scale - low.double() * scale).floor().clamp(0, LEVELS).to(u.dtype)
    stretched = straight_through(exact / LEVELS, (u - low / LEVELS) * scale.to(u.dtype))
    return torch.where(flat, u, stretched)


def equalize(u: Tensor, strength: Tensor) -> Tensor:
    """Spread each channel's levels evenly over its pixels; differentiated as the identity. It has no strength."""
    level = _levels(u).detach().flatten(2).contiguous()
    ordered = level.sort(-1).values
    before = torch.searchsorted(ordered, level)  # pixels of a lower level
    last = (level == ordered[..., -1:]).sum(-1, keepdim=True)
    step = (level.shape[-1] - last) // LEVELS
    spread = ((step // 2 + before) // step.clamp_min(1)).clamp(max=LEVELS)
    exact = torch.where(step > 0, spread.to(u.dtype), level) / LEVELS
    return straight_through(exact.view_as(u), u)


def _centres(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device) + 0.5


def _rows(u: Tensor, strength: Tensor, b: float = 0.0, c: float = 0.0, d: float = 0.0, f: float = 0.0) -> Tensor:
    """Return the identity plus `strength` [B] times these entries: [B, 2, 3]."""
    identity = u.new_tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    return identity + strength.view(-1, 1, 1) * u.new_tensor([[0.0, b, c], [d, 0.0, f]])


def _grey(u: Tensor) -> Tensor:
    """Return the luma of three channels, the mean of any other number."""
    if u.shape[1] != len(_LUMA):
        return u.mean(1, keepdim=True)
    return (u * u.new_tensor(_LUMA).view(-1, 1, 1)).sum(1, keepdim=True)


def _blend(other: Tensor, u: Tensor, strength: Tensor) -> Tensor:
    return (other + (1 + strength.view(-1, 1, 1, 1)) * (u - other)).clamp(0, 1)


def _levels(u: Tensor) -> Tensor:
    return (u * LEVELS).round()
