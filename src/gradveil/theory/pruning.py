"""What pruning leaves out of an update, and what that means for an attacker who matches what was sent.

Xue et al. 2024, "Revisiting Gradient Pruning", call gamma_1 the share of an update's energy that is not sent. It says
how far the gradient of a perfect match may be from the true one. It is no bound from below on anybody's error: where
the mask shows in the zeros, other entries are not needed (docs/results.md has DGP undone by one who reads them).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core.tree import squared_norm, tmap


def gamma(update: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensor:
    """Measure gamma_1 = ||g - sent||^2 / ||g||^2 of one update; zero for a zero update.

    The square of the relative distance that an audit records (`gradveil.metrics.relative_distance`).
    """
    whole = squared_norm(update)
    return squared_norm(tmap(torch.sub, update, sent)) / torch.where(whole > 0, whole, torch.ones_like(whole))


def least_gamma(top: float, bottom: float) -> tuple[float, float]:
    """Return what dual pruning leaves out at least: as Proposition 1 has it, and the most that holds for every update.

    Proposition 1: (1 - sqrt(1 - k1 k2))^2 < gamma_1 < 1 for the shares k1 = `top` and k2 = `bottom`. Ours is sharper:
    the largest entries are no smaller than the middle ones, so gamma_1 >= k1 / (1 - k2), with equality where the bottom
    is zero and all else equal. Proposition 1 follows from it where k1 > 0, and says next to nothing: k1 k2 is at most
    1/4, so its bound is never above 1.8 %, and zero where k1 or k2 is. Both speak of shares that come out whole: of a
    layer so small that floor(k1 P) = floor(k2 P) = 0 nothing goes. And gamma_1 = 1 where all that is kept is zero.

    >>> [round(bound, 4) for bound in least_gamma(0.05, 0.75)]
    [0.0004, 0.2]
    """
    return (1 - (1 - top * bottom) ** 0.5) ** 2, top / (1 - bottom)


def degraded(epsilon: Tensor, share: Tensor, length: Tensor) -> Tensor:
    """Return epsilon + sqrt(gamma_1) ||g|| (Theorem 1, Euclidean).

    An attacker whose gradient is within epsilon of what was sent is within so much of the true gradient g.
    """
    return epsilon + share.sqrt() * length


def degraded_cosine(epsilon: Tensor, share: Tensor) -> Tensor:
    """Return epsilon + (1 - epsilon) sqrt(gamma_1) (Theorem 1, cosine distance), as printed.

    As a bound it fails for large epsilon: `worst_cosine` is the one that holds for every match.
    """
    return epsilon + (1 - epsilon) * share.sqrt()


def worst_cosine(epsilon: Tensor, share: Tensor) -> Tensor:
    """Return the largest cosine distance from g of a gradient within epsilon of what was sent: the angles add up.

    What is sent has cosine sqrt(1 - gamma_1) with g, so this is 1 - cos(acos(1 - epsilon) + acos(sqrt(1 - gamma_1))),
    and 2 where the angles exceed a half turn.
    """
    angle = torch.acos((1 - epsilon).clamp(-1, 1)) + torch.acos((1 - share).clamp(0, 1).sqrt())
    return 1 - torch.cos(angle.clamp(max=torch.pi))
