"""Images: pixels in [0, 1] that a model takes normalised, compared by SSIM and the mean squared error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.space import ExampleWords, Space
from gradveil.metrics import identification, match_batch, mse, psnr, ssim, ssim_pairs
from gradveil.metrics.image_similarity import SMALLEST, WINDOW, finite, window_side

CONTRASTS = (1.0, 1.3, 1.7)
"""Contrast factors of the mean image as a baseline: SSIM rewards the contrast of a single image."""
_PART = 256


@dataclass(frozen=True)
class ImageSpace(Space):
    """Images of one shape; inputs are (pixel - mean) / std, views are the pixels.

    A single number of `mean` and `std` applies to every channel.

    >>> space = ImageSpace((1, 28, 28), mean=(0.5,), std=(0.5,))
    >>> [bound.item() for bound in space.bounds(torch.zeros(()))]
    [-1.0, 1.0]
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    words: ClassVar[ExampleWords] = ExampleWords()
    threshold: ClassVar[float] = 0.5
    exactly: ClassVar[float] = 0.9
    offers: ClassVar[frozenset[str]] = frozenset({"numbers", "pictures"})

    def __post_init__(self) -> None:
        """Raise with every problem of shape, mean and std."""
        problems: list[Problem] = []
        if len(self.shape) != 3 or min(self.shape) < 1:
            problems.append(Problem("space.shape", f"is {self.shape}", "give (channels, height, width)"))
        elif any(len(values) not in (1, self.shape[0]) for values in (self.mean, self.std)):
            what = f"mean {self.mean} and std {self.std} do not fit {self.shape[0]} channel(s)"
            problems.append(Problem("space", what, "give one number, or one for each channel"))
        if min(self.std) <= 0:
            problems.append(Problem("space.std", f"is {self.std}", "give numbers above 0"))
        refuse(problems)

    @classmethod
    def between(cls, black: float | Tensor, white: float | Tensor, shape: tuple[int, ...]) -> ImageSpace:
        """Return the space of images with inputs from black to white: one number, or one per channel."""
        low, high = (torch.as_tensor(value).detach().cpu().double().flatten() for value in (black, white))
        if not bool((low < high).all()):
            raise fail("space.bounds", f"{black} is not below {white}", "give the range of valid inputs")
        # (0 - mean) / std = low and (1 - mean) / std = high.
        return cls(shape, tuple((-low / (high - low)).tolist()), tuple((1 / (high - low)).tolist()))

    def model_facts(self) -> Mapping[str, Any]:
        """Return the number of channels, and the side."""
        return {"channels": self.shape[0], "size": self.shape[-1]}

    def problems(self, inputs: Tensor) -> Iterator[Problem]:
        """Find pixels that are not finite, or outside [0, 1]."""
        black, white = self.bounds(inputs)
        lowest, highest = torch.aminmax((inputs - black) / (white - black))
        if not torch.isfinite(lowest + highest):
            row = int((~torch.isfinite(inputs)).flatten(1).any(1).nonzero()[0])
            yield Problem("inputs", f"image {row} holds NaN or infinite pixels", "repair or remove it")
        elif lowest < -1e-3 or highest > 1 + 1e-3:
            what = f"pixels range from {lowest:.3g} to {highest:.3g}, outside [0, 1]"
            remedy = "give pixels in [0, 1] before normalisation, and the mean and std they were normalised with"
            yield Problem("inputs", what, remedy)

    def unscored(self) -> Iterator[Problem]:
        """Find images that are too small for SSIM."""
        if min(self.shape[-2:]) < SMALLEST:
            what = f"images are {' x '.join(str(side) for side in self.shape[-2:])} pixels, and SSIM needs {SMALLEST}"
            yield Problem("data.size", what, f"resize them to at least {SMALLEST} pixels")

    def of_trial(
        self, candidates: Tensor, truths: Tensor, private: bool, certainty: Tensor | None = None
    ) -> Mapping[str, Any]:
        """Return the side of SSIM's window where images are too small for the usual one."""
        side = window_side(*self.shape[-2:])
        return {} if side == WINDOW else {"ssim_window": side}

    def repaired(self, views: Tensor) -> Tensor:
        """Make pixels that are not finite grey."""
        return views.nan_to_num(0.5).clamp(0, 1)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of black (0) and white (1), each [C, 1, 1]."""
        # Half precision has too few digits for the quotients.
        mean, std = self._statistics(torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32)))
        return ((0 - mean) / std).to(like), ((1 - mean) / std).to(like)

    def encode(self, views: Tensor) -> Tensor:
        """Normalise pixels."""
        mean, std = self._statistics(views)
        return (views - mean) / std

    def view(self, inputs: Tensor) -> Tensor:
        """Turn inputs into pixels, clamped to [0, 1]; NaN stays NaN."""
        mean, std = self._statistics(inputs)
        return (inputs * std + mean).clamp(0, 1)

    def match(self, candidates: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
        """Match by least total mean squared error."""
        return match_batch(candidates, truths)

    def scores(self, candidates: Tensor, truths: Tensor) -> Mapping[str, Tensor]:
        """Compute MSE and PSNR, and SSIM if the images are large enough for its window."""
        scores = {"mse": mse(candidates, truths), "psnr": psnr(candidates, truths)}
        return scores | ({"ssim": ssim(candidates, truths)} if min(self.shape[1:]) >= SMALLEST else {})

    def similarity(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute SSIM; a candidate that is not finite gets -1."""
        usable = finite(candidates).view(len(candidates), -1)
        return torch.where(usable, ssim_pairs(candidates.nan_to_num(0, 0, 0), truths), -1.0)

    def nearest(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        """Return the index of the nearest image in L2."""
        flat = candidates.nan_to_num(0, 0, 0).float().flatten(1)
        nearest = torch.cat([torch.cdist(part, gallery.flatten(1)).argmin(1) for part in flat.split(_PART)])
        return torch.where(finite(candidates), nearest, -1)

    def neighbours(self, candidates: Tensor, gallery: Tensor, count: int) -> Tensor:
        """Return the indices of the nearest images in L2."""
        flat, others = candidates.double().flatten(1), gallery.double().flatten(1)
        found = [torch.cdist(part, others).topk(count, largest=False).indices for part in flat.split(_PART)]
        return torch.cat(found) if found else torch.zeros(0, count, dtype=torch.long)

    def identified(self, candidates: Tensor, places: Tensor, gallery: Tensor) -> Tensor:
        """Return whether no other image is nearer in L2; an exact copy of the ground truth counts as it."""
        return identification(candidates, places, gallery).bool()

    def average(self, views: Tensor) -> Tensor:
        """Return the mean image."""
        return views.mean(0)

    def guesses(self, views: Tensor, tested: int) -> Tensor:
        """Return the mean of all other images, unchanged and with raised contrast."""
        count = len(views)
        others = (views.mean(0) * count - views[:tested]) / max(1, count - 1)
        level = others.mean((-3, -2, -1), keepdim=True)
        return torch.stack([(level + contrast * (others - level)).clamp(0, 1) for contrast in CONTRASTS])

    def central(self, views: Tensor) -> Tensor:
        """Return the indices of the images, those nearest to their mean first."""
        return (views - views.mean(0)).square().flatten(1).sum(1).argsort()

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(values, dtype=like.dtype, device=like.device) for values in (self.mean, self.std))
        shape = (self.shape[0], 1, 1)
        return mean.reshape(-1, 1, 1).expand(shape), std.reshape(-1, 1, 1).expand(shape)
