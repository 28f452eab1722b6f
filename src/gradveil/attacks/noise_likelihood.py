"""How well simulated updates explain a noisy one: the log-likelihood of its entries, weighed by the noise on them.

Noise is taken to be independent from entry to entry. Whether it may be shared by entries, so that sums or differences
of them cancel it, is tested: by how many random numbers the client declares, and by the signs of simulated noise.
Noise that is quiet in other directions than single entries and such sums (a rotated basis) is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

EXACT = 0.05
"""An entry without noise counts as known to this share of its size: nearer answers fit it as well."""
ROUNDING = 1e-6
"""The same of the root mean square of its layer, for entries that are much smaller than others."""
DRAWS = 4
"""Simulations with fresh noise that the noise of an entry is taken from."""
GROUPS = 64
"""Groups of entries that the spread of a sum over all of them is taken from, each spread over the whole update."""
COLUMNS = 2 + GROUPS
"""The mean log-likelihood of an entry, how far its noise is shared (see `sharing`), and the sum in every group."""

ADDED = ("send.", "step.")
"""How the names of noise start that is added to gradients or to finished updates: what else is random changes both."""
_BY_CHANCE = 30.0
"""The mean square of a standard normal value over three pairs of draws hardly ever exceeds this: 1 in 10^7."""
_SCALED = 1e-3
"""Noise of which no larger share is left, once the update is scaled, is no more than a scale."""
_GOLDEN = (5**0.5 - 1) / 2


def log_likelihood(
    quiet: Mapping[str, Tensor], draws: Iterable[Mapping[str, Tensor]], observed: Mapping[str, Tensor]
) -> Tensor:
    """Return the log-likelihood of the entries [N, 1 + GROUPS], NaN where no noise is added: mean, and sums of groups.

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
    group = _groups(sent.shape[1], sent.device)
    found = list[Tensor]()
    for factor in (torch.ones_like(scale), scale.clamp_min(0)):
        misfit = (factor.unsqueeze(1) * plain - sent).square() / square
        entries = -((count + 1) / 2 * torch.log1p(misfit / count) + square.log() / 2)
        sums = torch.zeros(len(sent), GROUPS, dtype=torch.double, device=sent.device)
        found.append(sums.index_add_(1, group, entries.double()))
    better = (found[1].sum(1) > found[0].sum(1)).unsqueeze(1)
    sums = torch.where(better, found[1], found[0])
    columns = torch.cat([sums.sum(1, keepdim=True) / sent.shape[1], sums], 1)
    noisy = (total > baseline).any(1, keepdim=True)
    return torch.where(noisy, columns, torch.nan).to(sent.dtype)


def explained(likelihood: Tensor, shared: Tensor) -> Tensor:
    """Put what `log_likelihood` and `sharing` found in columns [N, COLUMNS]."""
    return torch.cat([likelihood[:, :1], shared.to(likelihood).unsqueeze(1), likelihood[:, 1:]], 1)


def likelier(answer: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much the log-likelihood of the truth exceeds an answer's [N], and how many spreads that is [N].

    Both are columns [N, COLUMNS]. The spread of the sum is taken from that between groups of entries.
    """
    more = (truth[:, -GROUPS:] - answer[:, -GROUPS:]).double()
    spread = more.std(1).clamp_min(torch.finfo(torch.double).tiny) * GROUPS**0.5
    return more.sum(1), more.sum(1) / spread


def sharing(quiet: Mapping[str, Tensor], draws: Sequence[Mapping[str, Tensor]], declared: int) -> Tensor:
    """Return how far noise is shared by entries [N]: above 1 it is, of independent noise it hardly ever is.

    `draws` are four simulations with fresh noise, `declared` is how many random numbers make it. With fewer numbers
    than noisy entries it is shared. So it is where, in a layer or in one of its rows, the differences of two pairs of
    draws agree in sign more or less often than by chance: they are independent, and symmetric, whatever the law is.
    Noise that only scales the whole update is left out.
    """
    least = _rounding(_flat(quiet, quiet)).sqrt()
    plain = _flat(quiet, quiet)
    whole = plain.square().sum(1, keepdim=True).clamp_min(torch.finfo(plain.dtype).tiny)
    noise, noisy = list[Tensor](), torch.zeros_like(plain, dtype=torch.bool)
    for drawn in draws:
        own = _flat(drawn, quiet) - plain
        left = own - (own * plain).sum(1, keepdim=True) / whole * plain
        scaled = left.norm(dim=1, keepdim=True) <= _SCALED * own.norm(dim=1, keepdim=True)
        noise.append(own)
        noisy |= (own.abs() > least) & ~scaled
    few = noisy.sum(1) / max(declared, 1)
    agree = 0.0
    for a, b, c, d in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)):
        signs = torch.sign((noise[a] - noise[b]) * (noise[c] - noise[d])) * noisy
        agree = agree + torch.stack([_agreement(part, value) for part, value in _layers(signs, quiet)], 1) / 3
    return torch.maximum(few.to(plain.dtype), torch.as_tensor(agree).amax(1) / _BY_CHANCE)


def _layers(flat: Tensor, like: Mapping[str, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(flat.split([value[0].numel() for value in like.values()], 1), like.values(), strict=True)


def _agreement(signs: Tensor, layer: Tensor) -> Tensor:
    """Return the largest square of a sum of signs, over its size: of the layer and each of its rows."""
    rows = signs.unflatten(1, (layer.shape[1], -1)) if layer.dim() > 2 else signs.unsqueeze(1)
    square = (rows.sum(2).square() / rows.square().sum(2).clamp_min(1)).amax(1)
    return torch.maximum(square, signs.sum(1).square() / signs.square().sum(1).clamp_min(1))


def _groups(entries: int, device: torch.device) -> Tensor:
    """Return the group of each entry: neighbours are in different ones, as are those of a row or a column."""
    places = torch.arange(entries, dtype=torch.double, device=device)
    return ((places * _GOLDEN).frac() * GROUPS).long().clamp_max(GROUPS - 1)


def _flat(update: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([update[name].flatten(1) for name in names], 1)


def _rounding(layer: Tensor) -> Tensor:
    """Return the mean square that rounding leaves of a layer's entries, for each of them."""
    least = torch.finfo(layer.dtype).tiny ** 0.5
    return (ROUNDING**2 * layer.square().mean(1, keepdim=True)).clamp_min(least).expand_as(layer)
