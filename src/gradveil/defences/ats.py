"""ATS: train on images that were transformed by a policy of three operations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.laws import OneOf, Signs
from gradveil.core.noise import Noise, NoiseSpec
from gradveil.core.types import Batch, BatchTransform, Domain
from gradveil.defences import pixels
from gradveil.defences.batch import bounds

HYBRID = "3-1-7+43-18-18"
"""The two policies that the paper found, one of them for each image."""


class Kind(NamedTuple):
    """An operation: its strength at level 0 and at level 9, and whether its direction is drawn."""

    apply: pixels.Operation
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
    "shearX": Kind(pixels.shear_x, 0, 0.3, signed=True),
    "shearY": Kind(pixels.shear_y, 0, 0.3, signed=True),
    "translateX": Kind(pixels.translate_x, 0, 150 / 331, signed=True),
    "translateY": Kind(pixels.translate_y, 0, 150 / 331, signed=True),
    "rotate": Kind(pixels.rotate, 0, 30),
    "color": Kind(pixels.colour, 0, 0.5, signed=True),
    "contrast": Kind(pixels.contrast, 0, 0.5, signed=True),
    "sharpness": Kind(pixels.sharpness, 0, 0.5, signed=True),
    "brightness": Kind(pixels.brightness, 0, 0.5, signed=True),
    "posterize": Kind(pixels.posterize, 8, 4),
    "solarize": Kind(pixels.solarize, 256, 0),
    "autocontrast": Kind(pixels.autocontrast),
    "equalize": Kind(pixels.equalize),
    "invert": Kind(pixels.invert),
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

    kind: Kind
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
    local training every image is transformed anew in every epoch.

    An attacker may optimise the signs (in [-1, 1]: every strength between); choices are discrete.
    """

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
    """Say what is wrong with the text of a policy, if anything.

    >>> [str(problem) for problem in policy_problems("3-50")]
    ["ats.policy: names the transform 50 -> give numbers from 0 to 49, as in '3-1-7' or '3-1-7+43-18-18'"]
    """
    remedy = f"give numbers from 0 to {len(TRANSFORMS) - 1}, as in '3-1-7' or '{HYBRID}'"
    if not re.fullmatch(r"\d+(-\d+)*(\+\d+(-\d+)*)*", policy):
        return [Problem("ats.policy", f"is '{policy}'", remedy)]
    unknown = [n for n in re.split(r"[-+]", policy) if int(n) >= len(TRANSFORMS)]
    return [Problem("ats.policy", f"names the transform {n}", remedy) for n in unknown]
