"""Image metrics against scikit-image and against naive formulas."""

import numpy as np
import pytest
import torch
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity
from torchmetrics.functional.image import structural_similarity_index_measure

from gradveil.core.errors import GradveilError
from gradveil.metrics import (
    METRICS,
    mse,
    mse_adadefense,
    psnr,
    psnr_adadefense,
    ssim,
    ssim_adadefense,
    ssim_pairs,
    ssim_rescaled,
    ssim_rescaled_padded,
    ssim_torchmetrics,
)
from gradveil.metrics.image_similarity import _stretch

IMAGES = [name for name, entry in METRICS.items() if entry.of == "images" and name != "lpips"]
WORST = {"mse": 1.0, "psnr": 0.0, "ssim": -1.0, "ssim_torchmetrics": -1.0, "ssim_rescaled": -1.0,
         "ssim_rescaled_padded": -1.0, "ssim_adadefense": -1.0,
         "mse_adadefense": 255.0, "psnr_adadefense": 10 * np.log10(255)}  # fmt: skip


def pair(channels: int, noise: float = 0.1, size: tuple[int, int] = (32, 32)) -> tuple[torch.Tensor, torch.Tensor]:
    """Two target clients with two images each, smooth truths with noisy candidates."""
    generator = torch.Generator().manual_seed(channels)
    truth = torch.rand(4, channels, 8, 8, generator=generator, dtype=torch.float64)
    truth = torch.nn.functional.interpolate(truth, size=size, mode="bicubic").clamp(0, 1)
    candidate = (truth + noise * torch.randn(truth.shape, generator=generator, dtype=torch.float64)).clamp(0, 1)
    return candidate.reshape(2, 2, channels, *size), truth.reshape(2, 2, channels, *size)


def skimage_default(candidate: torch.Tensor, truth: torch.Tensor) -> float:
    return structural_similarity(truth.numpy(), candidate.numpy(), channel_axis=0, data_range=1.0)


def skimage_ssim(candidate: torch.Tensor, truth: torch.Tensor) -> float:
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    return structural_similarity(truth.numpy(), candidate.numpy(), channel_axis=0, **settings)


def looped(reference, candidate: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    rows = [[reference(c, t) for c, t in zip(cs, ts, strict=True)] for cs, ts in zip(candidate, truth, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("size", [(32, 32), (11, 17)])
def test_ssim_is_scikit_images(channels: int, noise: float, size: tuple[int, int]) -> None:
    candidate, truth = pair(channels, noise, size)
    torch.testing.assert_close(ssim(candidate, truth), looped(skimage_ssim, candidate, truth), rtol=0, atol=1e-9)
    uniform = looped(skimage_default, candidate, truth)
    torch.testing.assert_close(ssim_adadefense(candidate, truth), uniform, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [(8, 8), (7, 12)])
def test_ssim_of_small_images_has_the_largest_window_that_fits(size: tuple[int, int]) -> None:
    candidate, truth = pair(3, 0.2, size)
    weights = np.exp(-0.5 * (np.arange(-3, 4) / 1.5) ** 2)
    weights = np.outer(weights, weights) / weights.sum() ** 2

    def reference(c: torch.Tensor, t: torch.Tensor) -> float:
        found = []
        for place in np.ndindex(3, size[0] - 6, size[1] - 6):
            channel, top, left = place
            x, y = (image[channel, top : top + 7, left : left + 7].numpy() for image in (c, t))
            means = (weights * x).sum(), (weights * y).sum()
            variances = (weights * (x - means[0]) ** 2).sum() + (weights * (y - means[1]) ** 2).sum()
            covariance = (weights * (x - means[0]) * (y - means[1])).sum()
            luminance = (2 * means[0] * means[1] + 1e-4) / (means[0] ** 2 + means[1] ** 2 + 1e-4)
            found.append(luminance * (2 * covariance + 9e-4) / (variances + 9e-4))
        return float(np.mean(found))

    expected = looped(reference, candidate, truth)
    torch.testing.assert_close(ssim(candidate, truth), expected, rtol=0, atol=1e-9)
    pairs = ssim_pairs(candidate.flatten(0, 1), truth.flatten(0, 1)).diagonal().double()
    torch.testing.assert_close(pairs, expected.flatten(), rtol=0, atol=1e-5)
    assert all(METRICS[name].function(candidate, truth).isfinite().all() for name in IMAGES)


def test_ssim_of_flat_float32_images_keeps_its_precision() -> None:
    candidate, truth = (torch.full((1, 1, 1, 16, 16), value) for value in (0.9, 0.8999))
    expected = looped(skimage_ssim, candidate.double(), truth.double())
    torch.testing.assert_close(ssim(candidate, truth), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("channels", [1, 3])
def test_mse_and_psnr_are_scikit_images(channels: int) -> None:
    candidate, truth = pair(channels)
    expected = looped(lambda c, t: mean_squared_error(t.numpy(), c.numpy()), candidate, truth)
    torch.testing.assert_close(mse(candidate, truth), expected)
    expected = looped(lambda c, t: peak_signal_noise_ratio(t.numpy(), c.numpy(), data_range=1), candidate, truth)
    torch.testing.assert_close(psnr(candidate, truth), expected)


def test_legacy_ssim_of_torchmetrics_is_torchmetrics_and_not_the_default() -> None:
    candidate, truth = pair(3, 0.2)

    def reference(c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return structural_similarity_index_measure(c[None], t[None], data_range=1.0)

    expected = looped(reference, candidate, truth)
    torch.testing.assert_close(ssim_torchmetrics(candidate, truth), expected)
    assert (expected - ssim(candidate, truth)).abs().min() > 1e-3


def test_rescaled_ssim_forgives_brightness_and_contrast() -> None:
    candidate, truth = pair(3, 0.05)

    def reference(c: torch.Tensor, t: torch.Tensor) -> float:
        return skimage_ssim((c - c.min()) / (c.max() - c.min()), (t - t.min()) / (t.max() - t.min()))

    torch.testing.assert_close(ssim_rescaled(candidate, truth), looped(reference, candidate, truth), atol=1e-9, rtol=0)
    torch.testing.assert_close(ssim_rescaled(0.2 + truth / 3, truth), torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(
        ssim_rescaled_padded(candidate, truth), ssim_torchmetrics(_stretch(candidate), _stretch(truth))
    )
    assert ssim(0.2 + truth / 3, truth).max() < 0.9


def test_adadefense_readings_on_8_bit_values() -> None:
    candidate, truth = pair(3)
    difference = 255 * (candidate - truth).numpy()
    rmse = np.sqrt((difference**2).mean((-3, -2, -1)))
    np.testing.assert_allclose(mse_adadefense(candidate, truth), rmse)
    np.testing.assert_allclose(psnr_adadefense(candidate, truth), 10 * np.log10(255**2 / rmse))


def test_an_exact_reconstruction_reads_100_db() -> None:
    _, truth = pair(1)
    assert psnr(truth, truth).tolist() == [[100.0] * 2] * 2
    assert mse(truth, truth).abs().max() == 0
    torch.testing.assert_close(ssim(truth, truth), torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_candidate_gets_the_worst_score_and_spares_the_others(name: str, broken: float) -> None:
    candidate, truth = pair(3)
    score = METRICS[name].function
    clean = score(candidate, truth)
    candidate[1, 0, 2, 5, 5] = broken
    scores = score(candidate, truth)
    assert scores[1, 0].item() == pytest.approx(WORST[name])
    kept = torch.tensor([[True, True], [False, True]])
    torch.testing.assert_close(scores[kept], clean[kept], rtol=0, atol=0)


@pytest.mark.parametrize("name", IMAGES)
def test_absurdly_large_values_do_not_overflow_to_nan(name: str) -> None:
    candidate, truth = pair(3)
    candidate[1, 0, 2, 5, 5] = 1e300
    assert METRICS[name].function(candidate, truth).isfinite().all()


@pytest.mark.parametrize("name", IMAGES)
def test_the_table_says_which_direction_is_better(name: str) -> None:
    near, truth = pair(3, 0.05)
    far, _ = pair(3, 0.5)
    score, higher = METRICS[name].function, METRICS[name].higher_is_better
    assert ((score(near, truth) > score(far, truth)) == higher).all()


@pytest.mark.parametrize("name", IMAGES)
def test_leading_dimensions_are_free(name: str) -> None:
    candidate, truth = pair(1)
    score = METRICS[name].function
    torch.testing.assert_close(score(candidate[0, 0], truth[0, 0]), score(candidate, truth)[0, 0])
    assert score(candidate[0], truth[0]).shape == (2,)


def test_wrong_shapes_and_images_too_small_for_ssim_are_refused() -> None:
    candidate, truth = pair(1)
    with pytest.raises(GradveilError, match="of one shape"):
        mse(candidate, truth[0])
    with pytest.raises(GradveilError, match="at least 7x7"):
        ssim(candidate[..., :6], truth[..., :6])
    assert mse(candidate[..., :6], truth[..., :6]).shape == (2, 2)
