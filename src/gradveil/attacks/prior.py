"""What images look like, as penalties on [N, B, C, H, W]: one number a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.client import Client
from gradveil.core.tree import Tensors

_REFRESH = 50
"""Iterations between two looks at the other restarts."""


def energy(x: Tensor) -> Tensor:
    """Mean over the images of the Euclidean norm (the l2 prior of Yin et al. 2021)."""
    return x.flatten(2).square().sum(2).clamp_min(1e-24).sqrt().mean(1)


def statistics_distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Tensor:
    """Sum the distances of means and of variances over the layers, the first layer ten times (Yin et al. 2021).

    Names are `<layer>.mean` and `<layer>.var`; tensors are [N, channels]. `found` has the layers that ran, as they ran.
    """
    names = [name for name in found if name in wanted]
    first = names[0].rpartition(".")[0]
    total: Tensor | None = None
    for name in names:
        size = (found[name] - wanted[name]).square().sum(1).clamp_min(1e-24).sqrt()
        size = 10 * size if name.rpartition(".")[0] == first else size
        total = size if total is None else total + size
    assert total is not None, "a model with a BatchNorm prior has a BatchNorm layer"
    return total


def statistics_wanted(knowledge: Knowledge, belief: Client, victims: Tensor, like: Tensor) -> Tensors:
    """Gather what a BatchNorm prior pulls to: the true batch statistics if granted, else the running ones.

    There is nothing to pull to in a model without such layers.
    """
    granted = {n[11:]: how for n, how in knowledge.tensors.items() if n.startswith("statistics.")}
    known = {n: how.value for n, how in granted.items() if isinstance(how, Known) and how.value is not None}
    if known:
        return {n: value.to(like)[victims] for n, value in known.items()}
    return {n: v.to(like).expand(len(victims), *v.shape) for n, v in belief.running().items()}


class Consensus:
    """The pull to the mean of a victim's restarts, looked at afresh now and then (group consistency, Yin et al. 2021).

    The distance is the mean square over the pixels. Restarts that have left the batch no longer count.
    """

    def __init__(self, restarts: int, register: bool) -> None:
        """Start without having looked."""
        self.restarts, self.register = restarts, register
        self._means: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, rows: Tensor, iteration: int) -> Tensor:
        """Return the distance [N] of each row from its victim's mean."""
        victims = (rows // self.restarts).tolist()
        if iteration % _REFRESH == 0:
            self._means = {victim: self._mean(x.detach(), victims, victim) for victim in set(victims)}
        centre = torch.stack([self._means[victim] for victim in victims])
        return (x - centre).square().flatten(1).mean(1)

    def _mean(self, x: Tensor, victims: list[int], victim: int) -> Tensor:
        own = x[[place for place, other in enumerate(victims) if other == victim]]
        return (shifted_onto(own, own.mean(0)) if self.register else own).mean(0)


def shifted_onto(images: Tensor, reference: Tensor) -> Tensor:
    """Shift each image [N, B, C, H, W] in whole pixels, around the border, to where it meets the reference best.

    The best shift is the peak of the circular cross-correlation over all channels.
    """
    spectrum = torch.fft.rfft2(images).conj() * torch.fft.rfft2(reference)
    height, width = images.shape[-2:]
    peak = torch.fft.irfft2(spectrum, s=(height, width)).sum(2).flatten(-2).argmax(-1)
    rows = (torch.arange(height, device=images.device) - (peak // width).unsqueeze(-1)) % height
    columns = (torch.arange(width, device=images.device) - (peak % width).unsqueeze(-1)) % width
    place = rows.unsqueeze(-1) * width + columns.unsqueeze(-2)
    flat = place.flatten(-2).unsqueeze(2).expand(*images.shape[:3], -1)
    return images.flatten(-2).gather(-1, flat).view_as(images)
