"""Similarity of two images: pixels in [0, 1], shape [..., C, H, W]; one score per image.

An image with values that are not finite gets the worst score of the metric, never NaN and never an error. Everything is
computed in float64 if the device supports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d

from gradveil.core.errors import fail
from gradveil.core.extras import install, needs

MSE_FLOOR = 1e-10
"""Smallest MSE for PSNR, far below 8-bit rounding: exact reconstructions get 100 dB instead of infinity."""
WINDOW = 11
"""Side of SSIM's window; on smaller images, it is `window_side`."""
SMALLEST = 7
"""Side of the smallest images with an SSIM: as few pixels as the uniform window of other variants has."""
_SIGMA = 1.5
_UNIFORM = 7
_CHUNK = 1 << 17
"""Pixels of the products of image pairs that are computed at once: they fit the cache."""
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
    and over the positions where the window lies inside the image: scikit-image's variant (Z. Wang, A. Bovik,
    H. Sheikh, E. Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004, Eq. 13).
    The window of images below 11 pixels is smaller: see `window_side`.
    """
    _large_enough(candidate)
    return _guard(_ssim, candidate, truth, worst=-1.0)


def ssim_pairs(candidates: Tensor, truths: Tensor) -> Tensor:
    """Compute the SSIM of every candidate [A, C, H, W] with every truth [B, C, H, W]: [A, B], in float32.

    Images must be finite. Moments of single images are computed once; a pair costs one product and its average. Of
    candidates [A, B, C, H, W], candidate [a, b] is compared with truth b.
    """
    _large_enough(candidates)
    x, y = candidates.float(), truths.float()
    # [A, 1 or B, C, H, W]: products with the truths [B, C, H, W] have one image for each pair.
    x = x if x.ndim == 5 else x[:, None]
    window = _window(y)
    bands = [_band(window, side) for side in y.shape[-2:]]
    mean_y, square_y = _averaged(y, *bands), _averaged(y * y, *bands)
    rows, scores = max(1, _CHUNK // max(1, y.numel())), list[Tensor]()
    for part in x.split(rows):
        mean_x, square_x = _averaged(part, *bands), _averaged(part * part, *bands)
        means, squares = mean_x * mean_y, mean_x.square() + mean_y.square()
        covariance, variances = _averaged(part * y, *bands) - means, square_x + square_y - squares
        similarity = (2 * means + _C1) * (2 * covariance + _C2) / ((squares + _C1) * (variances + _C2))
        scores.append(similarity.mean((-3, -2, -1)))
    return torch.cat(scores)


def ssim_torchmetrics(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute torchmetrics' SSIM, which pads the border by reflection and includes it in the average. Legacy."""
    _large_enough(candidate)
    return _guard(_ssim_torchmetrics, candidate, truth, worst=-1.0)


def ssim_rescaled(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute SSIM after each image is rescaled to [0, 1] by its minimum and maximum. Legacy.

    It ignores brightness and contrast, and so is higher than `ssim` and not comparable with it. The program of
    "Convolutional Variational Bottlenecks" computes it with torchmetrics 0.11, which pads the border and cuts it off.
    """
    _large_enough(candidate)
    return _guard(lambda x, y: _ssim(_stretch(x), _stretch(y)), candidate, truth, worst=-1.0)


def ssim_rescaled_padded(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute `ssim_torchmetrics` of images rescaled as by `ssim_rescaled`. Legacy.

    The same program computes it with a later torchmetrics, which keeps the padded border.
    """
    _large_enough(candidate)
    return _guard(lambda x, y: _ssim_torchmetrics(_stretch(x), _stretch(y)), candidate, truth, worst=-1.0)


def mse_adadefense(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute "MSE" as in AdaDefense's tables: the root of the mean squared error of 8-bit values (0 to 255)."""
    return 255 * mse(candidate, truth).sqrt()


def psnr_adadefense(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute "PSNR" as in AdaDefense's tables: 10 log10(255^2 / RMSE), capped like `psnr`."""
    rmse = mse_adadefense(candidate, truth).clamp(min=255 * math.sqrt(MSE_FLOOR))
    return 10 * (255**2 / rmse).log10()


def ssim_adadefense(candidate: Tensor, truth: Tensor) -> Tensor:
    """Compute SSIM as in AdaDefense's tables: a uniform window of 7, sample covariance (scikit-image's default)."""
    _large_enough(candidate)
    return _guard(_ssim_uniform, candidate, truth, worst=-1.0)


def _guard(score: Callable[[Tensor, Tensor], Tensor], candidate: Tensor, truth: Tensor, worst: float) -> Tensor:
    """Score image by image in high precision; pairs with an image that is not finite get the worst score."""
    if candidate.shape != truth.shape or candidate.ndim < 3:
        what = f"candidate is {tuple(candidate.shape)}, truth is {tuple(truth.shape)}"
        raise fail("metric", what, "give both as [..., C, H, W] of one shape")
    x, y = precise(candidate), precise(truth)
    usable, scores = finite(x) & finite(y), score(x, y)
    # A score can overflow for huge finite values.
    return torch.where(usable & torch.isfinite(scores), scores, worst)


def precise(images: Tensor) -> Tensor:
    """Return the images in float64, or in float32 on devices without float64 (MPS)."""
    return images.detach().to(torch.float32 if images.device.type == "mps" else torch.float64)


def finite(images: Tensor) -> Tensor:
    """Return which images have only finite values: [..., C, H, W] -> bool [...]."""
    return torch.isfinite(images).all(-1).all(-1).all(-1)


def window_side(height: int, width: int) -> int:
    """Return the side of SSIM's window: 11, or of smaller images the largest odd number that fits, with equal sigma.

    >>> window_side(28, 28), window_side(8, 8)
    (11, 7)
    """
    return min(WINDOW, (min(height, width) - 1) // 2 * 2 + 1)


def _large_enough(images: Tensor) -> None:
    if min(images.shape[-2:]) < SMALLEST:
        what = f"SSIM needs images of at least {SMALLEST}x{SMALLEST} pixels, these are {tuple(images.shape[-2:])}"
        raise fail("metric", what, "load the data with a larger size, or leave SSIM out")


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    return _similarity(_smooth(torch.stack([x, y, x * x, y * y, x * y])))


def _ssim_uniform(x: Tensor, y: Tensor) -> Tensor:
    moments = torch.stack([x, y, x * x, y * y, x * y])
    means = avg_pool2d(moments.flatten(0, -4), _UNIFORM, stride=1)
    return _similarity(means.unflatten(0, moments.shape[:-3]), _UNIFORM**2 / (_UNIFORM**2 - 1))


def _similarity(moments: Tensor, sample: float = 1.0) -> Tensor:
    """Compute SSIM from local means of x, y, x^2, y^2 and x y; `sample` scales the (co)variances."""
    mean_x, mean_y, square_x, square_y, product = moments
    variance_x, variance_y = sample * (square_x - mean_x.square()), sample * (square_y - mean_y.square())
    covariance = sample * (product - mean_x * mean_y)
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    contrast = (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    return (luminance * contrast).mean((-3, -2, -1))


def _smooth(images: Tensor) -> Tensor:
    """Average over a Gaussian window at all positions inside the image: [..., H, W] -> [..., H - 10, W - 10]."""
    window = _window(images)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    smooth = conv2d(conv2d(flat, window.reshape(1, 1, -1, 1)), window.reshape(1, 1, 1, -1))
    return smooth.reshape(*images.shape[:-2], *smooth.shape[-2:])


def _averaged(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute `_smooth` as two products with banded matrices: faster for many small images."""
    return rows.T @ (images @ columns)


def _band(window: Tensor, side: int) -> Tensor:
    """Return the matrix [side, side - 10] whose columns hold the window at each of its positions."""
    wide = len(window)
    # Place of pixel i within the window that begins at pixel j: i - j.
    offsets = torch.arange(side, device=window.device)[:, None] - torch.arange(side - wide + 1, device=window.device)
    return torch.where((offsets >= 0) & (offsets < wide), window[offsets.clamp(0, wide - 1)], 0)


def _window(images: Tensor) -> Tensor:
    side = window_side(*images.shape[-2:])
    offsets = torch.arange(side, dtype=images.dtype, device=images.device) - side // 2
    window = torch.exp(-0.5 * (offsets / _SIGMA).square())
    return window / window.sum()


def _ssim_torchmetrics(x: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings(), needs("metrics", "ssim_torchmetrics"):
        warnings.simplefilter("ignore")  # importing it warns about packages that are not needed here
        from torchmetrics.functional.image import structural_similarity_index_measure

    flat_x, flat_y = (images.reshape(-1, *images.shape[-3:]) for images in (x, y))
    scores = structural_similarity_index_measure(flat_x, flat_y, data_range=1.0, reduction="none")
    assert isinstance(scores, Tensor)
    return scores.reshape(x.shape[:-3])


def _stretch(images: Tensor) -> Tensor:
    low, high = images.amin((-3, -2, -1), keepdim=True), images.amax((-3, -2, -1), keepdim=True)
    return (images - low) / (high - low).clamp(min=1e-12)


NETS = ("alex", "vgg")
"""Backbones of LPIPS."""
WORST = 1.0
"""Score of broken images: LPIPS has no upper bound, but unrelated images are below 1 in practice."""
_SMALLEST = {"alex": 31, "vgg": 16}  # one pixel must be left after the last pooling


@dataclass(frozen=True)
class Missing:
    """A metric that could not be computed. The report shows the reason instead of the score."""

    reason: str


def lpips(candidate: Tensor, truth: Tensor, net: Literal["alex", "vgg"] = "alex") -> Tensor | Missing:
    """Compute LPIPS of pixels [..., C, H, W] in [0, 1] (R. Zhang et al., 2018): 0 is exact; scores [...] or `Missing`.

    Images are mapped to [-1, 1] and grey is repeated over three channels. An image that is not finite gets 1.
    """
    if net not in NETS:
        raise fail("lpips", f"has no network {net!r}", f"choose one of: {', '.join(NETS)}")
    if candidate.shape != truth.shape or candidate.ndim < 3 or candidate.shape[-3] not in (1, 3):
        what = f"candidate is {tuple(candidate.shape)}, truth is {tuple(truth.shape)}"
        raise fail("lpips", what, "give both as [..., 1 or 3, H, W] of one shape")
    if min(candidate.shape[-2:]) < _SMALLEST[net]:
        return Missing(f"LPIPS ({net}) needs images of at least {_SMALLEST[net]}x{_SMALLEST[net]} pixels")
    network = _network(net)
    if isinstance(network, Missing):
        return network
    usable = finite(candidate) & finite(truth)
    first, second = (_prepare(images, usable) for images in (candidate, truth))
    with torch.no_grad():
        scores = network.to(first.device)(first, second).reshape(usable.shape)
    return torch.where(usable, scores, WORST)


def _prepare(images: Tensor, usable: Tensor) -> Tensor:
    kept = torch.where(usable[..., None, None, None], images.detach().float(), 0)
    colour = kept.reshape(-1, *kept.shape[-3:]).expand(-1, 3, -1, -1)
    return colour * 2 - 1


@lru_cache(maxsize=len(NETS))
def _network(net: str) -> Any | Missing:
    try:
        import lpips as package  # pyright: ignore[reportMissingImports]

        return package.LPIPS(net=net, verbose=False).eval().requires_grad_(False)
    except ImportError as error:
        return Missing(f"{error}; {install('perceptual')}")
    except RuntimeError as error:  # torchvision built for another torch
        return Missing(f"torchvision does not work beside this torch: {error}")
    except OSError as error:  # the backbone's weights are downloaded on first use
        return Missing(f"the weights of {net} cannot be fetched: {error}")


def identification(candidate: Tensor, truth_index: Tensor, gallery: Tensor) -> Tensor:
    """Return 1 if the ground truth is the nearest gallery image in L2, else 0; shape [...].

    `candidate` is [..., C, H, W], `truth_index` [...] is the index of the ground truth in `gallery` [G, C, H, W]. An
    exact copy of the ground truth counts as it. A guess succeeds with probability 1 / G if the gallery has no copies,
    otherwise with the share of the image that has the most copies.
    """
    return (rank(candidate, truth_index, gallery) == 0).to(torch.get_default_dtype())


def rank(candidate: Tensor, truth_index: Tensor, gallery: Tensor) -> Tensor:
    """Count the gallery images that are nearer to the candidate than the ground truth: int64 [...], 0 identifies it.

    A candidate that is not finite is ranked last, G - 1, and never identified: in a gallery of one its rank is 1.
    """
    if candidate.shape[-3:] != gallery.shape[1:] or candidate.shape[:-3] != truth_index.shape:
        shapes = [tuple(part.shape) for part in (candidate, truth_index, gallery)]
        what = f"candidate, truth_index and gallery are {shapes}"
        raise fail("identification", what, "give [..., C, H, W], [...] and [G, C, H, W]")
    if truth_index.numel() and not (int(truth_index.min()) >= 0 and int(truth_index.max()) < len(gallery)):
        raise fail("truth_index", f"is outside 0 to {len(gallery) - 1}", "give the ground truth's index in the gallery")
    usable = finite(candidate)
    images, all_images = precise(candidate).flatten(-3).reshape(-1, gallery[0].numel()), precise(gallery).flatten(1)
    # The matrix-product form of the distance would let rounding decide between near copies.
    distance = torch.cdist(images.nan_to_num(0, 0, 0), all_images, compute_mode="donot_use_mm_for_euclid_dist")
    to_truth = distance.gather(1, truth_index.reshape(-1, 1))
    ranks = (distance < to_truth).sum(1).reshape(truth_index.shape)
    return torch.where(usable, ranks, max(len(gallery) - 1, 1))
