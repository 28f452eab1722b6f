"""LPIPS, where its package and weights are at hand; otherwise the reason why not. Never another metric in its place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from gradveil.core.errors import fail
from gradveil.metrics.image import finite

NETS = ("alex", "vgg")
"""Backbones of LPIPS that can be asked for."""
WORST = 1.0
"""LPIPS has no upper bound; unrelated images lie below 1 in practice."""
_SMALLEST = {"alex": 31, "vgg": 16}  # one pixel must be left after the last pooling


@dataclass(frozen=True)
class Missing:
    """A metric that could not be computed, and why. The report shows the reason in the metric's place."""

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
        return Missing(f"{error}; pip install 'gradveil[perceptual]'")
    except RuntimeError as error:  # torchvision built for another torch
        return Missing(f"torchvision does not work beside this torch: {error}")
    except OSError as error:  # the backbone's weights are downloaded on first use
        return Missing(f"the weights of {net} cannot be fetched: {error}")
