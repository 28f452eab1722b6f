"""Measures of error feedback in a round: what was left out, and how the residual grew.

They are the left sides of Lemma 1 and of the assumptions that Theorem 2 needs in the papers on dual pruning; their
right sides are in `gradveil.theory.gradient_pruning`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import isfinite
from typing import NamedTuple

import torch

from gradveil.core.tree import Tensors, squared_norm, tmap


@dataclass(frozen=True)
class HeldBack:
    """What error feedback held back in a round, over the clients of the round."""

    gamma: float
    """Share of the energy of P = G + e that was not sent: sum of ||P - sent||^2 over sum of ||P||^2."""
    residual: float
    """Squared norm of the clients' mean residual after the round, ||e||^2."""
    largest: float
    """Largest squared norm of a client's own gradient G (Assumption 3 of the paper on DGP)."""
    full: float
    """Squared norm of the mean of the clients' gradients (Assumption 3 of the preprint on ADGP)."""
    variance: float
    """Mean squared distance of a client's gradient from that mean, sigma^2."""


class Compressed(NamedTuple):
    """One client's update as it was sent, and its residual before and after."""

    sent: Tensors
    before: Tensors
    after: Tensors


def held_back(clients: Iterable[Compressed]) -> HeldBack | None:
    """Measure what the clients of a round held back; None without clients, or where they have diverged.

    P = sent + e_after, and the gradient is G = P - e_before.
    """
    count, lost, whole, sizes = 0, 0.0, 0.0, list[float]()
    residual: Tensors = {}
    gradient: Tensors = {}
    for sent, before, after in clients:
        compressed = tmap(torch.add, sent, after)
        own = tmap(torch.sub, compressed, before)
        lost += float(squared_norm(after))
        whole += float(squared_norm(compressed))
        sizes.append(float(squared_norm(own)))
        residual = tmap(torch.add, residual, after) if count else dict(after)
        gradient = tmap(torch.add, gradient, own) if count else own
        count += 1
    if not count:
        return None
    full = float(squared_norm(gradient)) / count**2
    variance = max(0.0, sum(sizes) / count - full)
    share = lost / whole if whole else 0.0
    found = HeldBack(share, float(squared_norm(residual)) / count**2, max(sizes), full, variance)
    return found if all(map(isfinite, astuple(found))) else None
