"""A denoiser as a prior of images, trained once on public images and kept.

A small network removes Gaussian noise from public images. What it would change in a candidate says how unlike such
images the candidate is: regularisation by denoising (Romano, Elad, Milanfar 2017) adds 1/2 |x - D(x)|^2 to the
objective, whose derivative, with D(x) held, is x - D(x). Training takes about a minute of one processor, so the weights
are kept in the user's cache folder, under a hash of the images and of every setting of the training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.attacks.inversion.generators import custom_network
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.noise import Key
from gradveil.core.private_files import seal, unseal, write_private
from gradveil.core.streams import Stream
from gradveil.core.user_code import called
from gradveil.nn.initial_weights import initialise

FEWEST, ENOUGH = 64, 4096
"""Fewest public images on which a denoiser is trained, and the number of the first ones that are used."""
LEVEL = 0.1
"""Standard deviation of the noise that a candidate is taken to have, in units of the pixels' range."""
_WIDTH, _DEPTH, _DILATED = 32, 6, (2, 3)
"""Channels, convolutions, and those of them that look two pixels far."""
_LESSONS, _BATCH, _RATE, _MOST = 1200, 16, 2e-3, 0.4
"""Steps of the training, images in each, the largest step size, and the largest standard deviation of noise."""
_FORM = 1
"""Raised whenever the network or its training changes, so that older files are not taken."""


class Denoiser(nn.Module):
    """Images [N, C, H, W] in [0, 1] with noise of a level [N] to images without."""

    def __init__(self, channels: int) -> None:
        """Build the convolutions; the last one predicts the noise."""
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels + 1, _WIDTH, 3, padding=1), nn.ReLU()]
        for number in range(1, _DEPTH - 1):
            far = 2 if number in _DILATED else 1
            layers += [nn.Conv2d(_WIDTH, _WIDTH, 3, padding=far, dilation=far), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(_WIDTH, channels, 3, padding=1))

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        """Remove the noise."""
        plane = level.view(-1, 1, 1, 1).expand(-1, 1, *images.shape[-2:])
        return images - self.layers(torch.cat([images, plane], 1))


def train_denoiser(images: Tensor, key: Key, lessons: int = _LESSONS) -> Denoiser:
    """Train a denoiser on images [M, C, H, W] in [0, 1], with noise of every level up to 0.4."""
    net = Denoiser(int(images.shape[1]))
    initialise(net, key.child(Stream.NETWORK).generator()).to(images)
    optimiser = torch.optim.Adam(net.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=max(2, lessons))
    draw = key.child(Stream.LESSONS).generator()
    with torch.enable_grad():
        for _ in range(lessons):
            clean = images[torch.randint(len(images), (_BATCH,), generator=draw).to(images.device)]
            level = (_MOST * torch.rand(len(clean), generator=draw)).to(images)
            noise = torch.randn(clean.shape, generator=draw).to(images)
            found = net(clean + level.view(-1, 1, 1, 1) * noise, level)
            optimiser.zero_grad()
            (found - clean).square().mean().backward()
            optimiser.step()
            schedule.step()
    return net.requires_grad_(requires_grad=False)


def kept_denoiser(images: Tensor, folder: Path | None = None) -> Denoiser:
    """Return the denoiser of these images [M, C, H, W] in [0, 1]: the one that is kept, or a new one, which then is.

    A file that is damaged is made again. Where the folder cannot be written, nothing is kept.
    """
    folder = folder or cache_folder()
    pixels = images[:ENOUGH].detach().float().cpu().contiguous()
    settings = (_FORM, _WIDTH, _DEPTH, _DILATED, _LESSONS, _BATCH, _RATE, _MOST, tuple(pixels.shape))
    name = hashlib.sha256(repr(settings).encode() + pixels.numpy().tobytes()).hexdigest()
    file = folder / f"denoiser-{name[:32]}.safetensors"
    net = Denoiser(int(pixels.shape[1]))
    try:
        net.load_state_dict(unseal(file.read_bytes(), str(file), "remove it")[0])
    except (OSError, GradveilError, RuntimeError):
        net = train_denoiser(pixels, Key(0, (Stream.NETWORK,)))
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, seal({n: value.contiguous() for n, value in net.state_dict().items()}))
    return net.requires_grad_(requires_grad=False).to(images.device)


def cache_folder() -> Path:
    """Return the folder for what is trained once: GRADVEIL_CACHE, or `gradveil` in the user's cache folder."""
    if own := os.environ.get("GRADVEIL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradveil"


def denoiser_problems(denoiser: nn.Module | str, weight: float, shape: tuple[int, ...]) -> Iterator[Problem]:
    """Refuse a custom denoiser without a weight, or of other images."""
    if not weight:
        yield Problem("denoiser", "has no effect, because the weight denoise is 0", "set denoise, such as denoise=1")
    blank = torch.rand(2, *shape, generator=Key(0).generator())
    try:
        net = custom_network(denoiser, "denoiser")
        with torch.no_grad():
            images = called("denoiser", "the denoiser", lambda: net(blank, torch.full((2,), LEVEL)))
    except GradveilError as error:
        yield from error.problems
        return
    returned = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if returned != (2, *shape):
        problem = f"returns {returned} for images {(2, *shape)} and levels of noise (2,)"
        yield Problem("denoiser", problem, "return the images without noise, in [0, 1]")


def unlikeness(net: nn.Module, images: Tensor) -> Tensor:
    """Return 1/2 |x - D(x)|^2 [N] of images [N, B, C, H, W] in [0, 1], as a mean over pixels; D(x) is held."""
    flat = images.flatten(0, 1)
    with torch.no_grad():
        clean = net(flat.float(), flat.new_full((len(flat),), LEVEL, dtype=torch.float32)).to(images)
    return (images - clean.unflatten(0, images.shape[:2])).square().flatten(1).mean(1) / 2
