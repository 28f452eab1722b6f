"""Log-likelihood of an update under the noise that the simulated client adds: entries weighted by their noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

EXACT = 0.05
"""An entry without noise counts as known to this share of its size: nearer answers fit it as well."""
ROUNDING = 1e-6
"""The same of the root mean square of its layer, for entries that are much smaller than others."""


def log_likelihood(
    quiet: Mapping[str, Tensor], draws: Iterable[Mapping[str, Tensor]], observed: Mapping[str, Tensor]
) -> Tensor:
    """Return the mean log-likelihood of an entry of the observed updates [N], NaN where no noise is added.

    `quiet` are the simulated updates without noise, `draws` the same with noise, drawn independently. Given an entry's
    mean square noise over K draws, the entry follows Student's t law with K degrees of freedom. What is simulated may
    be scaled, as many objectives look at directions alone.
    """
    sent, plain = _flat(observed, observed), _flat(quiet, observed)
    count, total = 0, torch.zeros_like(sent)
    for drawn in draws:
        total += (_flat(drawn, observed) - plain).square()
        count += 1
    baseline = torch.cat([_rounding(value.flatten(1)) for value in observed.values()], 1)
    square = total / count + (EXACT * sent).square() + baseline
    scale = (sent * plain / square).sum(1) / (plain.square() / square).sum(1).clamp_min(torch.finfo(sent.dtype).tiny)
    found = []
    for factor in (torch.ones_like(scale), scale.clamp_min(0)):
        misfit = (factor.unsqueeze(1) * plain - sent).square() / square
        entries = (count + 1) / 2 * torch.log1p(misfit / count) + square.log() / 2
        found.append(-entries.mean(1, dtype=torch.double))
    noisy = (total > baseline).any(1)
    return torch.where(noisy, torch.maximum(*found), torch.nan).to(sent.dtype)


def _flat(update: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([update[name].flatten(1) for name in names], 1)


def _rounding(layer: Tensor) -> Tensor:
    """Return the mean square that rounding leaves of a layer's entries, for each of them."""
    least = torch.finfo(layer.dtype).tiny ** 0.5
    return (ROUNDING**2 * layer.square().mean(1, keepdim=True)).clamp_min(least).expand_as(layer)
