"""Statements of the two papers on dual gradient pruning: what is left out, and what follows from it.

Xue et al. 2024, "Revisiting Gradient Pruning" (DGP), and its predecessor, the anonymous preprint "Aligned Dual Gradient
Pruning" (ADGP). For a gradient G and what is sent of it, g, gamma is the share of the energy that is not sent.

- Definition 1: an attack is an (epsilon, delta)-attack if its distance to G is at most epsilon with probability
  1 - delta: `strength` measures epsilon of finished attacks.
- Proposition 1: ||x - x'|| >= ||G - g|| / ||dG/dx||, to first order: `taylor_bound`. It holds for an attacker whose
  image has g as its whole gradient. An attacker who reads the mask off the zeros compares sent entries only, and goes
  below it (docs/explanation/guarantees.md has numbers).
- Assumption 1: gamma < 1 with a constant of the shares. `least_gamma` is its lower end in DGP.
- Theorem 1: `degraded`, `degraded_cosine` and `worst_cosine` bound an attacker's distance from above, not from below.
- Lemma 1, Theorem 2, Corollary 1: the residual of error feedback and the convergence of the training. They need the
  gamma of P = G + e, of which no bound below 1 is known: the largest entries are held back for ever and grow.

Right sides are functions of numbers; a training measures the left sides round by round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    """Return two lower bounds of gamma_1 for dual pruning: that of Assumption 1, and the tight one.

    Assumption 1: (1 - sqrt(1 - k1 k2))^2 < gamma_1 < 1 for the shares k1 = `top` and k2 = `bottom`. The tight bound:
    the largest entries are no smaller than the middle ones, so gamma_1 >= k1 / (1 - k2), with equality if the bottom is
    zero and all else equal. It implies Assumption 1 for k1 > 0, whose bound is never above 1.8 %, as k1 k2 is at most
    1/4. Both assume that k1 P and k2 P are whole numbers: a small layer with floor(k1 P) = floor(k2 P) = 0 loses
    nothing. gamma_1 = 1 if all kept entries are zero.

    >>> [round(bound, 4) for bound in least_gamma(0.05, 0.75)]
    [0.0004, 0.2]
    """
    return (1 - (1 - top * bottom) ** 0.5) ** 2, top / (1 - bottom)


def degraded(epsilon: Tensor, share: Tensor, length: Tensor) -> Tensor:
    """Return epsilon + sqrt(gamma_1) ||g|| (Theorem 1, Euclidean).

    It bounds the distance from the true gradient g of a gradient within epsilon of the sent one.
    """
    return epsilon + share.sqrt() * length


def degraded_cosine(epsilon: Tensor, share: Tensor) -> Tensor:
    """Return epsilon + (1 - epsilon) sqrt(gamma_1) (Theorem 1, cosine distance), as printed.

    It is not a bound for large epsilon; `worst_cosine` is one for every epsilon.
    """
    return epsilon + (1 - epsilon) * share.sqrt()


def worst_cosine(epsilon: Tensor, share: Tensor) -> Tensor:
    """Return the largest cosine distance from g of a gradient within epsilon of the sent one: the angles add up.

    The sent gradient has cosine sqrt(1 - gamma_1) with g, so the result is
    1 - cos(acos(1 - epsilon) + acos(sqrt(1 - gamma_1))), and 2 if the angles exceed a half turn.
    """
    angle = torch.acos((1 - epsilon).clamp(-1, 1)) + torch.acos((1 - share).clamp(0, 1).sqrt())
    return 1 - torch.cos(angle.clamp(max=torch.pi))


def taylor_bound(left_out: Tensor, norm: Tensor) -> Tensor:
    """Return ||G - g|| / ||dG/dx||, the least distance of an image from x whose gradient is g (Proposition 1).

    It is of first order in the distance, and of an attacker who matches g as a whole gradient. `norm` is the largest
    singular value of the Jacobian (`gradveil.theory.input_jacobian.spectral_norm`).

    >>> taylor_bound(torch.tensor(0.5), torch.tensor(0.25))
    tensor(2.)
    """
    return left_out / norm


def strength(distances: Sequence[float], delta: float) -> float:
    """Return the smallest epsilon with which attacks of these distances are (epsilon, delta)-attacks (Definition 1).

    A distance is that of the true gradient from the gradient of what the attack found, Euclidean or cosine.

    >>> strength([0.4, 0.1, 0.3, 0.2], delta=0.25)
    0.3
    """
    # Without 1e-9, a product that rounding puts just above a whole number would ask for one attack more.
    needed = math.ceil((1 - delta) * len(distances) - 1e-9)
    return sorted(distances)[max(needed, 1) - 1]


def residual_bound(share: float, energy: float) -> float:
    """Return 3 gamma (2 + gamma) / (2 (1 - gamma)^2) G^2, the bound of E ||e_t||^2 (Lemma 1 of DGP).

    e_t is the mean residual of all users, gamma the largest share left out of any P = G + e, and G^2 = `energy` the
    largest squared norm of a user's gradient.

    >>> round(residual_bound(0.64, 11.41)), round(residual_bound(0.9999, 11.41) / 1e9)
    (223, 5)
    """
    return 3 * share * (2 + share) / (2 * (1 - share) ** 2) * energy if share < 1 else math.inf


def aligned_residual_bound(share: float, energy: float, variance: float) -> float:
    """Return (gamma / 2) ((2 + gamma) / (1 - gamma))^2 (G^2 + sigma^2), the bound of E ||e_t||^2 (Lemma 1 of ADGP).

    G^2 = `energy` is the largest squared norm of the full gradient, sigma^2 = `variance` the mean squared distance of a
    user's gradient from it.

    >>> round(aligned_residual_bound(0.683, 1.0, 0.0), 1)
    24.5
    """
    return share / 2 * ((2 + share) / (1 - share)) ** 2 * (energy + variance) if share < 1 else math.inf


def convergence_bound(gap: float, step: float, rounds: int, smoothness: float, noise: float, residual: float) -> float:
    """Return the bound of the mean squared gradient norm over the rounds (Theorem 2 of both papers).

    4 (l0 - l*) / (eta T) + 2 K eta S + 4 eta^2 K^2 R with the gap l0 - l*, the step eta, T rounds, the smoothness K,
    S = `noise` (G^2 + sigma^2 in DGP, G^2 + sigma^2 / N with N users in ADGP), and R the bound of Lemma 1.

    >>> convergence_bound(gap=1.0, step=0.5, rounds=8, smoothness=1.0, noise=2.0, residual=1.0)
    4.0
    """
    return 4 * gap / (step * rounds) + 2 * smoothness * step * noise + 4 * (step * smoothness) ** 2 * residual


def best_step(gap: float, rounds: int, smoothness: float, noise: float) -> float:
    """Return the step sqrt((l0 - l*) / (K T S)) of Corollary 1; DGP prints it without the root."""
    return math.sqrt(gap / (smoothness * rounds * noise))


def convergence_rate(gap: float, rounds: int, smoothness: float, noise: float) -> float:
    """Return 6 sqrt(K (l0 - l*) S / T), what Theorem 2 gives at `best_step` but for O(1 / T) (Corollary 1).

    ADGP prints 6 times the step itself, K and S below the line; this is what follows from its Theorem 2.

    >>> step = best_step(2.0, 100, 3.0, 5.0)
    >>> whole = convergence_bound(2.0, step, 100, 3.0, 5.0, residual=7.0)
    >>> math.isclose(whole, convergence_rate(2.0, 100, 3.0, 5.0) + 4 * 3.0 * 2.0 * 7.0 / (100 * 5.0))
    True
    """
    return 6 * math.sqrt(smoothness * gap * noise / rounds)
