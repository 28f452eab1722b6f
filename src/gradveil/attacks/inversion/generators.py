"""Generators of images, and their training on auxiliary data.

The papers attack with generative adversarial networks that were trained for weeks. Here the attack trains the decoder
of a variational autoencoder in minutes (Kingma, Welling 2014). It learns stably from few images, and its latent numbers
are N(0, 1), like the start of a search. Its images are softer than those of a good adversarial network, which you can
pass instead.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from math import ceil, log2

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import glu, interpolate

from gradveil.core.errors import fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.user_code import called, imported
from gradveil.nn.initial_weights import initialise

_FIRST = 4
"""Height and width of the first feature map."""
_MOST = 8
"""Largest ratio of the channels of a feature map to those of the last one."""
_BATCH = 64
"""Images per training step of the autoencoder."""


class Generator(nn.Module):
    """Latent numbers [B, Z] to images [B, C, H, W] in [0, 1].

    A transposed convolution of one pixel gives 4x4; each block doubles height and width (nearest neighbour, 3x3
    convolution, normalisation, gated linear unit) up to a power of two; the centre is the image (Ren et al. 2022,
    GRNN, section 4.1). `norm="batch"` normalises over the images, `"group"` each by itself.
    """

    def __init__(self, latent: int, shape: tuple[int, ...], width: int, norm: str) -> None:
        """Build blocks with `width` channels before the last convolution, and twice as many in each earlier block."""
        super().__init__()
        self.shape = shape
        blocks = max(0, ceil(log2(max(shape[1:]) / _FIRST)))
        channels = [width * min(2 ** (blocks - block), _MOST) for block in range(blocks + 1)]
        # Twice the channels, of which the gated linear unit leaves half.
        self.first = nn.Linear(latent, 2 * channels[0] * _FIRST**2, bias=False)
        self.norm = _norm(norm, 2 * channels[0])
        self.blocks = nn.ModuleList(_Double(a, b, norm) for a, b in pairwise(channels))
        self.last = nn.Conv2d(channels[-1], shape[0], 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        """Draw images."""
        x = self.first(latent).unflatten(-1, (-1, _FIRST, _FIRST))
        x = glu(self.norm(x), -3)
        for block in self.blocks:
            x = block(x)
        top, left = ((x.shape[place] - self.shape[place]) // 2 for place in (-2, -1))
        return torch.sigmoid(self.last(x))[..., top : top + self.shape[1], left : left + self.shape[2]]


class _Double(nn.Module):
    """Twice the height and width."""

    def __init__(self, before: int, after: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, 2 * after, 3, padding=1, bias=False)
        self.norm = _norm(norm, 2 * after)

    def forward(self, x: Tensor) -> Tensor:
        return glu(self.norm(self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))), -3)


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":  # always with the statistics of the batch: running statistics would be hidden state
        return nn.BatchNorm2d(channels, track_running_stats=False)
    # At least 16 channels in a group, and groups of equal size.
    most = max(1, channels // 16)
    return nn.GroupNorm(next(groups for groups in range(most, 0, -1) if channels % groups == 0), channels)


class _Encoder(nn.Module):
    """Images [B, C, H, W] to mean and logarithm of the variance of their latent numbers, [B, Z] each."""

    def __init__(self, latent: int, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels, sides, after = shape[0], shape[1:], width
        while max(sides) > _FIRST:
            layers += [nn.Conv2d(channels, after, 3, stride=2, padding=1), nn.SiLU()]
            channels, after = after, min(2 * after, _MOST * width)
            sides = tuple((side + 1) // 2 for side in sides)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 2 * latent))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # The spread is the logarithm of the variance; the clamp keeps its exponential finite.
        mean, spread = self.layers(images).chunk(2, -1)
        return mean, spread.clamp(-10, 10)


def train_generator(images: Tensor, latent: int, width: int, lessons: int, key: Key) -> Generator:
    """Train a generator on images [M, C, H, W] in [0, 1]: the decoder of a variational autoencoder.

    The noise of the pixels is the optimal one for each batch, which balances the reconstruction error against the prior
    (Rybkin, Daniilidis, Levine 2021, sigma-VAE): D/2 log(mean squared error) + KL.
    """
    channels, height, width_of = images.shape[1:]
    shape = (int(channels), int(height), int(width_of))
    decoder, encoder = Generator(latent, shape, width, "group"), _Encoder(latent, shape, width)
    parts = nn.ModuleDict({"decoder": decoder, "encoder": encoder})
    initialise(parts, key.child(Stream.NETWORK).generator()).to(images)
    optimiser = torch.optim.Adam(parts.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=max(2, lessons))
    draw = key.child(Stream.LESSONS).generator()
    for _ in range(lessons):
        places = torch.randint(len(images), (_BATCH,), generator=draw)
        batch = images[places.to(images.device)]
        mean, spread = encoder(batch)
        noise = torch.randn(mean.shape, generator=draw).to(mean)
        drawn = decoder(mean + (spread / 2).exp() * noise)
        error = (drawn - batch).square().mean().clamp_min(1e-6)
        divergence = (mean.square() + spread.exp() - 1 - spread).sum(1).mean() / 2
        optimiser.zero_grad()
        (batch[0].numel() / 2 * error.log() + divergence).backward()
        optimiser.step()
        schedule.step()
    return decoder.requires_grad_(requires_grad=False)


def draw_with(module: nn.Module, weights: dict[str, Tensor], latent: Tensor) -> Tensor:
    """Draw images of each row with its weights [N, ...] from its latent numbers [N, B, Z]."""
    return torch.func.vmap(lambda of_row, numbers: functional_call(module, of_row, (numbers,)))(weights, latent)


def custom_network(network: nn.Module | str, setting: str = "generator") -> nn.Module:
    """Import a custom generator or denoiser, or copy it, so that the attack does not change it."""
    module = network if isinstance(network, nn.Module) else imported(network, setting)
    if not isinstance(module, nn.Module):
        if not callable(module):
            raise fail(setting, f"is {type(module).__name__}, not a module", "name a torch.nn.Module")
        module = called(setting, "making it", module)
    if not isinstance(module, nn.Module):
        raise fail(setting, f"is {type(module).__name__}, not a module", "return a torch.nn.Module")
    return deepcopy(module).eval().requires_grad_(requires_grad=False)
