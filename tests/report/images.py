"""Real faces, degraded copies of them in the place of reconstructions, and their scores."""

from __future__ import annotations

import torch
from skimage.data import lfw_subset
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from gradveil.metrics import psnr, ssim


def faces(count: int, channels: int = 1, size: int = 32) -> Tensor:
    """The first faces of scikit-image's subset of Labelled Faces in the Wild, [V, 1, C, size, size] in [0, 1]."""
    images = torch.from_numpy(lfw_subset()[:count].copy()).float()[:, None]
    large = interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return large.clamp(0, 1).expand(-1, channels, -1, -1)[:, None].contiguous()


def degrade(truth: Tensor, quality: float, generator: torch.Generator) -> Tensor:
    """Mix a truth with noise: every target client gets its own share around `quality`."""
    target_clients = truth.shape[0]
    noise = torch.rand(truth.shape, generator=generator)
    quality_of_each = (quality + 0.22 * torch.randn(target_clients, generator=generator) * (1 - quality) ** 0.5).clamp(
        0, 1
    )
    share = quality_of_each.reshape(-1, 1, 1, 1, 1) ** 0.7
    smooth = avg_pool2d(truth.flatten(0, 1), 3, 1, 1).reshape(truth.shape)
    return (share * (quality * truth + (1 - quality) * smooth) + (1 - share) * noise).clamp(0, 1)


def scores(candidate: Tensor, truth: Tensor) -> dict[str, float]:
    """A control's scores."""
    similarity = ssim(candidate, truth)
    rate = float((similarity > 0.5).double().mean())
    return {"asr": rate, "ssim_mean": float(similarity.mean()), "psnr_mean": float(psnr(candidate, truth).mean())}


def controls(candidate: Tensor, truth: Tensor) -> dict[str, dict[str, float]]:
    """Wrong target client and guesses, from faces that are nobody's."""
    target_clients, batch, channels = truth.shape[:3]
    public = faces(100, channels)[60:].expand(-1, batch, -1, -1, -1)
    mean, other = public.mean(0, keepdim=True).expand_as(truth), public[:target_clients].contiguous()
    named = {"wrong_target_client": candidate.roll(1, 0), "mean_image": mean.contiguous(), "class_image": other}
    named["class_mean"] = ((mean + other) / 2).contiguous()
    return {name: scores(guess, truth) for name, guess in named.items()}
