"""Log-likelihood of a noisy update, given simulated updates: entries are weighted by the noise on them.

The noise of entries is taken to be independent. Entries may share noise, so that sums or differences of them cancel it,
or few guesses undo it. Three tests look for this: the number of random numbers that the client declares, the signs of
simulated noise, and how much of the noise changes where an eighth of the numbers is drawn again. They miss noise of
many numbers that is small in other directions than single entries and such sums (a rotated basis).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

EXACT = 0.05
"""Relative error up to which an entry without noise counts as explained."""
ROUNDING = 1e-6
"""The same relative to the root mean square of the layer, for entries much smaller than others."""
DRAWS = 4
"""Simulations with fresh noise from which the noise of an entry is estimated."""
GROUPS = 64
"""Groups of entries, each spread over the whole update, from which the spread of the total is estimated."""
COLUMNS = 2 + GROUPS
"""The mean log-likelihood of an entry, the extent of shared noise (see `sharing`), and the sum of every group."""

ADDED = ("send.", "step.")
"""Prefixes of noise that is added to gradients or finished updates."""
_BY_CHANCE = 30.0
"""The mean square of a standard normal value over three pairs of draws hardly ever exceeds this: 1 in 10^7."""
_SCALED = 1e-3
"""Noise of which at most this share is left, once the update is rescaled, only scales the update."""
_AGAIN = 1 / 8
"""Share of the numbers that are drawn again: none of five is half of the time."""
_ENOUGH = 500
"""Noisy entries of a layer of which hardly ever a quarter of that share changes."""
_GOLDEN = (5**0.5 - 1) / 2


def log_likelihood(
    quiet: Mapping[str, Tensor], draws: Iterable[Mapping[str, Tensor]], observed: Mapping[str, Tensor]
) -> Tensor:
    """Return the mean log-likelihood of the entries and the sums of groups [N, 1 + GROUPS], NaN without noise.

    `quiet` are the simulated updates without noise, `draws` are the same updates with independent noise. Given an
    entry's mean square noise over K draws, the entry follows Student's t law with K degrees of freedom. The simulated
    update may be rescaled, as many objectives compare directions only.
    """
    sent, plain = _flat(observed, observed), _flat(quiet, observed)
    count, total = 0, torch.zeros_like(sent)
    for noisy in draws:
        total += (_flat(noisy, observed) - plain).square()
        count += 1
    baseline = torch.cat([_rounding(value.flatten(1)) for value in observed.values()], 1)
    square = total / count + (EXACT * sent).square() + baseline
    scale = (sent * plain / square).sum(1) / (plain.square() / square).sum(1).clamp_min(torch.finfo(sent.dtype).tiny)
    # Neighbouring entries fall into different groups, and so do those of a row or a column.
    places = torch.arange(sent.shape[1], dtype=torch.double, device=sent.device)
    group = ((places * _GOLDEN).frac() * GROUPS).long().clamp_max(GROUPS - 1)
    group_sums = list[Tensor]()
    for factor in (torch.ones_like(scale), scale.clamp_min(0)):
        misfit = (factor.unsqueeze(1) * plain - sent).square() / square
        # Log density of Student's t with K degrees of freedom and the scale sqrt(square), up to constants.
        entries = -((count + 1) / 2 * torch.log1p(misfit / count) + square.log() / 2)
        sums = torch.zeros(len(sent), GROUPS, dtype=torch.double, device=sent.device)
        group_sums.append(sums.index_add_(1, group, entries.double()))
    unscaled, scaled = group_sums
    sums = torch.where((scaled.sum(1) > unscaled.sum(1)).unsqueeze(1), scaled, unscaled)
    columns = torch.cat([sums.sum(1, keepdim=True) / sent.shape[1], sums], 1)
    has_noise = (total > baseline).any(1, keepdim=True)
    return torch.where(has_noise, columns, torch.nan).to(sent.dtype)


def explained(likelihood: Tensor, shared: Tensor) -> Tensor:
    """Combine the results of `log_likelihood` and `sharing` in columns [N, COLUMNS]."""
    return torch.cat([likelihood[:, :1], shared.to(likelihood).unsqueeze(1), likelihood[:, 1:]], 1)


def likelier(answer: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the excess of the ground truth's log-likelihood over an answer's [N], and the same in spreads [N].

    Both arguments are columns [N, COLUMNS]. The spread of the sum follows from the spread between groups of entries.
    """
    more = (truth[:, -GROUPS:] - answer[:, -GROUPS:]).double()
    spread = more.std(1).clamp_min(torch.finfo(torch.double).tiny) * GROUPS**0.5
    return more.sum(1), more.sum(1) / spread


def sharing(quiet: Mapping[str, Tensor], draws: Sequence[Mapping[str, Tensor]], declared: int) -> Tensor:
    """Return the extent to which entries share noise [N]: above 1 they do. Independent noise hardly ever exceeds 1.

    `draws` are four simulations with fresh noise, made from `declared` random numbers each. Noise is shared if there
    are fewer numbers than noisy entries. It is also shared if, in a layer or one of its rows, the differences of two
    pairs of draws agree in sign more or less often than by chance: differences of independent draws are symmetric
    under any law. Noise that only scales the whole update does not count.
    """
    plain = _flat(quiet, quiet)
    least = _rounding(plain).sqrt()
    whole = plain.square().sum(1, keepdim=True).clamp_min(torch.finfo(plain.dtype).tiny)
    noise, noisy = list[Tensor](), torch.zeros_like(plain, dtype=torch.bool)
    for drawn in draws:
        added = _flat(drawn, quiet) - plain
        # What a factor on the whole update does not explain.
        left = added - (added * plain).sum(1, keepdim=True) / whole * plain
        scaled = left.norm(dim=1, keepdim=True) <= _SCALED * added.norm(dim=1, keepdim=True)
        noise.append(added)
        noisy |= (added.abs() > least) & ~scaled
    few = noisy.sum(1) / max(declared, 1)
    agree = 0.0
    for a, b, c, d in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)):
        signs = torch.sign((noise[a] - noise[b]) * (noise[c] - noise[d])) * noisy
        layers = signs.split([value[0].numel() for value in quiet.values()], 1)
        squares = [_agreement(part, value) for part, value in zip(layers, quiet.values(), strict=True)]
        agree = agree + torch.stack(squares, 1) / 3
    return torch.maximum(few.to(plain.dtype), torch.as_tensor(agree).amax(1) / _BY_CHANCE)


def drawn_again(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Choose few numbers of a tensor at random, four times: [4, *shape]."""
    return torch.rand(DRAWS, *shape, generator=generator) < _AGAIN


def reuse(
    quiet: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    mixed: Iterable[Mapping[str, Tensor]],
) -> Tensor:
    """Return how far the noise depends on few numbers [N]: above 1 it does, whatever else the client declares.

    `first` and `second` are simulations with fresh noise, `mixed` the first with those numbers of the second that
    `drawn_again` chooses. Of independent noise, of many numbers in any basis, and of a choice among directions of many
    numbers each of them changes at least that share. Of few numbers there is one that changes next to nothing.
    """
    whole = _flat(quiet, quiet)
    least = _rounding(whole)

    def changes(drawn: Mapping[str, Tensor]) -> Tensor:
        """Compute what is not explained by a factor on the whole update, the median over its entries."""
        change = _flat(drawn, quiet) - _flat(first, quiet)
        factor = torch.where(whole.square() > least, change / whole, torch.nan).nanmedian(1, keepdim=True).values
        left = change - factor.nan_to_num() * whole
        scaled = left.norm(dim=1, keepdim=True) <= _SCALED * change.norm(dim=1, keepdim=True)
        return torch.where(scaled, 0.0, left)

    full = changes(second).square()
    noisy = full > least
    sizes = [value[0].numel() for value in quiet.values()]

    def in_layers(values: Tensor) -> Tensor:
        return torch.stack([part.sum(1) for part in values.split(sizes, 1)], 1)

    full.clamp_min_(torch.finfo(full.dtype).tiny)
    shares = [in_layers((changes(each).square() / full).clamp_max(1) * noisy) for each in mixed]
    count = in_layers(noisy)
    smallest = torch.stack(shares).amin(0) / count.clamp_min(1)
    extent = _AGAIN / 4 / smallest.clamp_min(_AGAIN / 400)
    return torch.where(count >= _ENOUGH, extent, 0.0).amax(1)


def _agreement(signs: Tensor, layer: Tensor) -> Tensor:
    """Return the largest squared sum of signs divided by their number, over the layer and each of its rows."""
    rows = signs.unflatten(1, (layer.shape[1], -1)) if layer.dim() > 2 else signs.unsqueeze(1)
    square = (rows.sum(2).square() / rows.square().sum(2).clamp_min(1)).amax(1)
    return torch.maximum(square, signs.sum(1).square() / signs.square().sum(1).clamp_min(1))


def _flat(update: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([update[name].flatten(1) for name in names], 1)


def _rounding(layer: Tensor) -> Tensor:
    """Return the mean square rounding error of each entry of a layer."""
    least = torch.finfo(layer.dtype).tiny ** 0.5
    return (ROUNDING**2 * layer.square().mean(1, keepdim=True)).clamp_min(least).expand_as(layer)
