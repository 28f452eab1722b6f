"""ATS: train on images transformed by a policy of three operations.

They follow Pillow's. Geometry interpolates linearly, so that it has a derivative; what acts on levels is exact for
images that have them, and differentiated as if it were smooth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.distributions import OneOf, Signs
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Noise, NoiseSpec
from gradveil.core.settings import TextValue
from gradveil.core.tree import straight_through
from gradveil.core.types import Batch, BatchTransform, Domain
from gradveil.defences.batch_defences import bounds
from gradveil.defences.entry import DefenceEntry

Operation = Callable[[Tensor, Tensor], Tensor]
"""(pixels [B, C, H, W], strength [B]) -> pixels"""
LEVELS = 255
"""The highest of the 256 levels: white."""
GREY = 128 / LEVELS
"""Colour of the area that a rotation leaves empty; after a shear or a translation it is black."""
_LUMA = (0.299, 0.587, 0.114)


def warp(u: Tensor, rows: Tensor, fill: float = 0.0) -> Tensor:
    """Take the pixel at (x, y) from (a x + b y + c, d x + e y + f), rows [B, 2, 3] = [[a, b, c], [d, e, f]].

    Coordinates are in pixels from the upper left corner, so that the centre of the first pixel is at (1/2, 1/2).
    """
    height, width = u.shape[-2:]
    y, x = torch.meshgrid(_centres(height, u), _centres(width, u), indexing="ij")
    at = torch.stack([x, y, torch.ones_like(x)], -1)
    size = torch.stack([u.new_tensor(width), u.new_tensor(height)])
    # Without align_corners, -1 and 1 are the outer edges of the image: pixel coordinate x is at 2 x / size - 1.
    # Outside, grid_sample gives 0, which the subtraction makes the fill.
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
    # The offset maps the centre to itself.
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
    # As Pillow has it: the pixels of the highest level do not count, and with a step of 0 nothing changes.
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


HYBRID = "3-1-7+43-18-18"
"""The two policies that the paper found, one of them for each image."""


class OperationRange(NamedTuple):
    """An operation: its strength at level 0 and at level 9, and whether its direction is drawn."""

    apply: Operation
    weakest: float = 0.0
    strongest: float = 0.0
    signed: bool = False

    def at(self, level: int) -> float:
        """Return the strength of a level: levels are evenly spaced."""
        return self.weakest + (self.strongest - self.weakest) * level / 9

    @property
    def levelled(self) -> bool:
        """Whether its strength depends on the level."""
        return self.weakest != self.strongest


KINDS = {
    "shearX": OperationRange(shear_x, 0, 0.3, signed=True),
    "shearY": OperationRange(shear_y, 0, 0.3, signed=True),
    "translateX": OperationRange(translate_x, 0, 150 / 331, signed=True),
    "translateY": OperationRange(translate_y, 0, 150 / 331, signed=True),
    "rotate": OperationRange(rotate, 0, 30),
    "color": OperationRange(colour, 0, 0.5, signed=True),
    "contrast": OperationRange(contrast, 0, 0.5, signed=True),
    "sharpness": OperationRange(sharpness, 0, 0.5, signed=True),
    "brightness": OperationRange(brightness, 0, 0.5, signed=True),
    "posterize": OperationRange(posterize, 8, 4),
    "solarize": OperationRange(solarize, 256, 0),
    "autocontrast": OperationRange(autocontrast),
    "equalize": OperationRange(equalize),
    "invert": OperationRange(invert),
}
"""The operations of AutoAugment (Cubuk et al. 2019), in the ranges that ATS gives them."""

_NUMBERED = """
    invert7 contrast6 rotate2 translateX9 sharpness1 sharpness3 shearY2 translateY2 autocontrast5 equalize2
    shearY5 posterize5 color3 brightness5 sharpness9 brightness9 equalize5 equalize1 contrast7 sharpness5
    color5 translateX5 equalize7 autocontrast8 translateY3 sharpness6 brightness6 color8 solarize0 invert0
    equalize0 autocontrast0 equalize8 equalize4 color5 equalize5 autocontrast4 solarize4 brightness3 color0
    solarize1 autocontrast0 translateY3 translateY3 autocontrast1 solarize1 equalize5 invert0 translateY3 autocontrast1
"""


class Numbered(NamedTuple):
    """One of the 50 transforms: an operation at a level."""

    kind: OperationRange
    level: int

    def __call__(self, u: Tensor, sign: Tensor | None) -> Tensor:
        """Transform pixels [B, C, H, W], each image in its direction [B]."""
        strength = u.new_full((u.shape[0],), self.kind.at(self.level))
        return self.kind.apply(u, strength if sign is None else strength * sign)


def _numbered(text: str) -> Numbered:
    return Numbered(KINDS[text[:-1]], int(text[-1]))


TRANSFORMS = tuple(map(_numbered, _NUMBERED.split()))
"""The 50 transforms by the numbers that the authors give them."""


@dataclass(frozen=True)
class Ats(BatchTransform):
    """Transform every image by a policy, three or so of the 50 numbered transforms in a row (Gao et al. 2021).

    `policy="3-1-7"` names one; `"3-1-7+43-18-18"` is the hybrid, which draws one of them for each image (`choice`, one
    of so many). The direction of shears, translations and blends is drawn for each image (`sign`). Probabilities of
    AutoAugment are ignored, as the authors do: everything is applied. Geometry interpolates linearly, whereas theirs
    takes the nearest pixel (translations, rotations) or a cubic; crops and flips before it are left to the data. In
    local training every image is transformed again in every epoch.

    An attacker may optimise the signs (in [-1, 1]: every strength between); choices are discrete.
    """

    needs: ClassVar[str] = "pictures"

    policy: str = HYBRID

    def __post_init__(self) -> None:
        """Refuse a policy that cannot be read."""
        refuse(policy_problems(self.policy))

    @property
    def policies(self) -> list[tuple[Numbered, ...]]:
        """The transforms of each policy, in order."""
        return [tuple(TRANSFORMS[int(n)] for n in one.split("-")) for one in self.policy.split("+")]

    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare what is drawn for each image: directions, and which of several policies."""
        count, dtype = batch.inputs.shape[0], batch.inputs.dtype
        signed = sum(each.kind.signed for one in self.policies for each in one)
        drawn: dict[str, Noise] = {}
        if signed:
            drawn["sign"] = Noise((count, signed), Signs(), neutral=0.0, dtype=dtype, lower=-1.0, upper=1.0)
        if len(self.policies) > 1:
            first = torch.eye(len(self.policies))[0]
            shape = (count, len(self.policies))
            drawn["choice"] = Noise(shape, OneOf(), neutral=first, dtype=dtype, discrete=True)
        return NoiseSpec(drawn)

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Transform the pixels; the labels stay."""
        lower, upper = bounds(batch, domain, "ats")
        u = (batch.inputs - lower) / (upper - lower)
        signs = iter(noise["sign"].unbind(1)) if "sign" in noise else iter(())
        made: list[Tensor] = []
        for policy in self.policies:
            image = u
            for each in policy:
                image = each(image, next(signs) if each.kind.signed else None)
            made.append(image)
        if len(made) > 1:
            weights = noise["choice"].unbind(1)
            made = [sum(w.view(-1, 1, 1, 1) * image for w, image in zip(weights, made, strict=True))]  # pyright: ignore
        return Batch(lower + (upper - lower) * made[0], batch.targets)


def spelled(policy: str) -> str:
    """Name the transforms of a policy, with their levels where these matter.

    >>> spelled("3-1-49"), spelled("3+28")
    ('translateX 9, contrast 6, autocontrast', 'one for each image: translateX 9; solarize 0')
    """
    names = {kind: name for name, kind in KINDS.items()}
    found = [
        ", ".join(f"{names[each.kind]} {each.level}" if each.kind.levelled else names[each.kind] for each in one)
        for one in Ats(policy).policies
    ]
    return found[0] if len(found) == 1 else f"one for each image: {'; '.join(found)}"


def policy_problems(policy: str) -> list[Problem]:
    """Return the problems of the text of a policy.

    >>> [str(problem) for problem in policy_problems("3-50")]
    ["ats.policy: names the transform 50 -> give numbers from 0 to 49, as in '3-1-7' or '3-1-7+43-18-18'"]
    """
    remedy = f"give numbers from 0 to {len(TRANSFORMS) - 1}, as in '3-1-7' or '{HYBRID}'"
    if not re.fullmatch(r"\d+(-\d+)*(\+\d+(-\d+)*)*", policy):
        return [Problem("ats.policy", f"is '{policy}'", remedy)]
    unknown = [n for n in re.split(r"[-+]", policy) if int(n) >= len(TRANSFORMS)]
    return [Problem("ats.policy", f"names the transform {n}", remedy) for n in unknown]


POLICY = TextValue(f'policies of numbered transforms in quotes, as "3-1-7" or "{HYBRID}"')


def _ats(policy: Annotated[str | None, POLICY, "Which of the 50 transforms, in which order."] = HYBRID) -> Ats:
    return Ats(policy or HYBRID)


ATS = (
    DefenceEntry(
        name="ats",
        factory=_ats,
        description="ATS: train on images transformed by a policy (shifts, colours, levels), or one of several",
        changes=("batch",),
        cost="some passes over the images, one for each transform; all bytes",
        citation="Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search",
        traits=("mixes", "transforms inputs"),
    ),
)
