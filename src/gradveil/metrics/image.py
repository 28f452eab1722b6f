"""How alike two images are. Pixels in [0, 1], shape [..., C, H, W]; one score an image, shape [...].

An image that holds a value which is not finite gets the worst score of the metric (it shows nobody anything), never
NaN and never an error. Everything is computed in float64 where the device has it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from gradveil.core.errors import fail

MSE_FLOOR = 1e-10
"""An exact reconstruction has no finite PSNR. Below this MSE, PSNR is reported as 100 dB, far below 8-bit rounding."""
WINDOW = 11
"""Side of SSIM's window: smaller images have no SSIM."""
_SIGMA = 1.5
_CHUNK = 1 << 17
"""Pixels of products that pairs of images are worked through at once: they fit a cache."""
_C1, _C2 = 0.01**2, 0.03**2


def mse(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute the mean squared error over channels and pixels: 0 is exact, 1 the worst."""
    return _guard(lambda x, y: (x - y).square().mean((-3, -2, -1)), candidate, truth, worst=1.0)


def psnr(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio of range 1, 10 log10(1 / MSE), in dB: 0 is the worst, 100 the cap.

    >>> psnr(torch.zeros(1, 1, 4, 4), torch.full((1, 1, 4, 4), 0.1))
    tensor([20.0000], dtype=torch.float64)
    """
    return -10 * mse(candidate, truth).clamp(min=MSE_FLOOR).log10()


def ssim(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute the structural similarity index: 1 is exact, -1 the worst.

    Gaussian window of 11 pixels, sigma 1.5, range 1, K = (0.01, 0.03), population covariance, averaged over channels
    and over the positions where the window lies inside the image: scikit-image's reading (Z. Wang, A. Bovik,
    H. Sheikh, E. Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004, Eq. 13).
    """
    _large_enough(candidate)
    return _guard(_ssim, candidate, truth, worst=-1.0)


def ssim_pairs(candidates: Tensor, truths: Tensor) -> Tensor:
    """Compute the SSIM of every candidate [A, C, H, W] with every truth [B, C, H, W]: [A, B], in float32.

    Images are finite. Moments of single images are computed once, so that a pair costs one product and its average.
    Candidates [A, B, C, H, W] are compared each with the truth of its own place.
    """
    _large_enough(candidates)
    x, y = candidates.float(), truths.float()
    x = x if x.ndim == 5 else x[:, None]
    mean_y, square_y = _averaged(y), _averaged(y * y)
    rows, found = max(1, _CHUNK // max(1, y.numel())), list[Tensor]()
    for part in x.split(rows):
        mean_x, square_x = _averaged(part), _averaged(part * part)
        means, squares = mean_x * mean_y, mean_x.square() + mean_y.square()
        covariance, variances = _averaged(part * y) - means, square_x + square_y - squares
        similarity = (2 * means + _C1) * (2 * covariance + _C2) / ((squares + _C1) * (variances + _C2))
        found.append(similarity.mean((-3, -2, -1)))
    return torch.cat(found)


def ssim_torchmetrics(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute SSIM as torchmetrics reads it: the border is padded by reflection and averaged too. A legacy reading."""
    _large_enough(candidate)
    return _guard(_ssim_torchmetrics, candidate, truth, worst=-1.0)


def ssim_rescaled(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute SSIM after each image is rescaled to [0, 1] by its own minimum and maximum. A legacy reading.

    It forgives a wrong brightness and contrast, so it reads higher: not comparable with `ssim`.
    """
    _large_enough(candidate)
    return _guard(lambda x, y: _ssim(_stretch(x), _stretch(y)), candidate, truth, worst=-1.0)


def mse_adadefense(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute what AdaDefense's tables call "MSE": the root of the mean squared error of 8-bit values (0 to 255)."""
    return 255 * mse(candidate, truth).sqrt()


def psnr_adadefense(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute what AdaDefense's tables call "PSNR": 10 log10(255^2 / RMSE) with that RMSE, capped by the MSE floor."""
    rmse = mse_adadefense(candidate, truth).clamp(min=255 * math.sqrt(MSE_FLOOR))
    return 10 * (255**2 / rmse).log10()


def _guard(score: Callable[[Tensor, Tensor], Tensor], candidate: Tensor, truth: Tensor, worst: float) -> Tensor:
    """Score image by image in high precision; where either image is not finite, give the worst score."""
    if candidate.shape != truth.shape or candidate.ndim < 3:
        what = f"candidate is {tuple(candidate.shape)}, truth is {tuple(truth.shape)}"
        raise fail("metric", what, "give both as [..., C, H, W] of one shape")
    x, y = precise(candidate), precise(truth)
    usable, scores = finite(x) & finite(y), score(x, y)
    # A score can still overflow where finite values are absurdly large.
    return torch.where(usable & torch.isfinite(scores), scores, worst)


def precise(images: Tensor) -> Tensor:
    """Return the images in float64, or float32 on a device that has no float64 (MPS)."""
    return images.detach().to(torch.float32 if images.device.type == "mps" else torch.float64)


def finite(images: Tensor) -> Tensor:
    """Say which images hold finite values only: [..., C, H, W] -> bool [...]."""
    return torch.isfinite(images).all(-1).all(-1).all(-1)


def _large_enough(images: Tensor) -> None:
    if min(images.shape[-2:]) < WINDOW:
        what = f"SSIM needs images of at least {WINDOW}x{WINDOW} pixels, these are {tuple(images.shape[-2:])}"
        raise fail("metric", what, "load the data with a larger size, or leave SSIM out")


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    mean_x, mean_y, square_x, square_y, product = _smooth(torch.stack([x, y, x * x, y * y, x * y]))
    variance_x, variance_y = square_x - mean_x.square(), square_y - mean_y.square()
    covariance = product - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    contrast = (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    return (luminance * contrast).mean((-3, -2, -1))


def _smooth(images: Tensor) -> Tensor:
    """Average over a Gaussian window, where it fits: [..., H, W] -> [..., H - 10, W - 10]."""
    window = _window(images)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    smooth = conv2d(conv2d(flat, window.reshape(1, 1, -1, 1)), window.reshape(1, 1, 1, -1))
    return smooth.reshape(*images.shape[:-2], *smooth.shape[-2:])


def _averaged(images: Tensor) -> Tensor:
    """Compute `_smooth` as two products with banded matrices: faster for many small images."""
    rows, columns = (_band(images, side) for side in images.shape[-2:])
    return rows.T @ (images @ columns)


def _band(images: Tensor, side: int) -> Tensor:
    """Return the matrix [side, side - 10] whose columns hold the window at each of its places."""
    places = torch.arange(side, device=images.device)[:, None] - torch.arange(side - WINDOW + 1, device=images.device)
    return torch.where((places >= 0) & (places < WINDOW), _window(images)[places.clamp(0, WINDOW - 1)], 0)


def _window(images: Tensor) -> Tensor:
    offsets = torch.arange(WINDOW, dtype=images.dtype, device=images.device) - WINDOW // 2
    window = torch.exp(-0.5 * (offsets / _SIGMA).square())
    return window / window.sum()


def _ssim_torchmetrics(x: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import complains about packages that are not needed here
        from torchmetrics.functional.image import structural_similarity_index_measure

    flat_x, flat_y = (images.reshape(-1, *images.shape[-3:]) for images in (x, y))
    scores = structural_similarity_index_measure(flat_x, flat_y, data_range=1.0, reduction="none")
    assert isinstance(scores, Tensor)
    return scores.reshape(x.shape[:-3])


def _stretch(images: Tensor) -> Tensor:
    low, high = images.amin((-3, -2, -1), keepdim=True), images.amax((-3, -2, -1), keepdim=True)
    return (images - low) / (high - low).clamp(min=1e-12)
