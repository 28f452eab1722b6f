"""Utility of a defended gradient in the first two terms of a Taylor series; what pruning leaves out.

Xue et al. 2024, "Revisiting Gradient Pruning", call gamma_1 the share of an update's energy that is not sent. It says
how far the gradient of a perfect match may be from the true one. It is no bound from below on anybody's error: where
the mask shows in the zeros, other entries are not needed (docs/results.md has DGP undone by one who reads them).

A step w - eta * sent lowers the loss by eta <g, sent> - eta^2 / 2 sent^T H sent. In Chen, Gürsoy and Lei 2024, "Optimal
Defenses Against Gradient Reconstruction Attacks", Definition 2, the utility of first order does not depend on noise of
mean zero: the expectation of <g, sent>. That of second order is -sum_i g_i^2 s_i^2 for independent noise: what it adds
to the expectation of -<g, sent>^2, so g g^T takes the place of H.

That reading of the paper is unverified, as are the weights of the two terms, and whether Theorems 2 to 4 take the
expectations inside or outside the root; here they are inside, sqrt(E ||dg_i/dx||^2 / E g_i^2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.core.tree import Tensors, squared_norm, tmap


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
    layer so small that floor(k1 P) = floor(k2 P) = 0 nothing goes. And gamma_1 = 1 where all that is kept is
    zero.

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


def first_order_utility(gradient: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensor:
    """Return <g, sent>: by how much a small step along what was sent lowers the loss, in units of the step.

    Of a pruned gradient it is the sum of g_i^2 over what is kept. Noise of mean zero leaves its expectation alone.

    >>> first_order_utility({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 2.0])})
    tensor(4.)
    """
    return torch.stack([(value * sent[name]).sum() for name, value in gradient.items()]).sum()


def noise_utility(gradient: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
    """Return -sum_i g_i^2 s_i^2, the second-order utility that independent noise of variances s_i^2 takes.

    It is minus the variance of <g, sent>.

    >>> noise_utility({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 0.25])})
    tensor(-1.5000)
    """
    return -torch.stack([(value.square() * variances[name]).sum() for name, value in gradient.items()]).sum()


def second_order_utility(gradient: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensor:
    """Return -<g, sent>^2 of one update, whose mean over draws of the noise holds `noise_utility` as its variance."""
    return -first_order_utility(gradient, sent).square()


def utilities(gradients: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute both utilities of every target's update {name: [V, ...]}, over those of the gradient itself: float64 [V].

    <g, sent> / ||g||^2 is the share of the loss that a small undefended step would take; minus its square is on average
    over draws of the noise `noise_utility` / ||g||^4 below minus the square of its mean. Not a number for g = 0.

    >>> utilities({"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[0.0, 2.0]])})
    (tensor([0.8000], dtype=torch.float64), tensor([-0.6400], dtype=torch.float64))
    """
    g, s = ({name: value.detach().double() for name, value in part.items()} for part in (gradients, sent))
    whole = torch.vmap(first_order_utility)(g, g)
    return torch.vmap(first_order_utility)(g, s) / whole, torch.vmap(second_order_utility)(g, s) / whole.square()


def privacy_loss(
    squares: Mapping[str, Tensor], gradient: Mapping[str, Tensor], variances: Mapping[str, Tensor]
) -> Tensor:
    """Return by how much noise tells more than the optimal noise of the same second-order utility, relatively.

    (sum_i n_i^2 / s_i^2) (sum_i g_i^2 s_i^2) / (sum_i n_i |g_i|)^2 - 1, with n_i^2 the squared row norms ||dg_i/dx||^2
    and s_i^2 the variances: the privacy term times the utility's cost, over the least that the product can be (Cauchy
    and Schwarz), which variances in proportion to n_i / |g_i| reach. No scale of the noise enters. Infinite where a
    coordinate that depends on x gets no noise; the sums are in double precision.

    >>> squares, g = {"w": torch.tensor([1.0, 16.0])}, {"w": torch.tensor([1.0, 1.0])}
    >>> round(float(privacy_loss(squares, g, {"w": torch.tensor([1.0, 4.0])})), 6)
    0.0
    >>> round(float(privacy_loss(squares, g, {"w": torch.tensor([1.0, 1.0])})), 6)
    0.36
    """
    n = torch.cat([value.flatten() for value in squares.values()]).double()
    g = torch.cat([gradient[name].flatten() for name in squares]).double()
    s = torch.cat([variances[name].flatten() for name in squares]).double()
    told = torch.where(n > 0, n / s, 0.0).sum()
    return told * (g.square() * s).sum() / (n.sqrt() * g.abs()).sum().square() - 1


def global_ratio(
    squares: Sequence[Mapping[str, Tensor]], gradients: Sequence[Mapping[str, Tensor]], clamp: float = math.inf
) -> Tensors:
    """Compute sqrt(E ||dg_i/dx||^2 / E g_i^2) from the squared row norms and gradients of public batches.

    The ratio of the global forms: the same for every batch, so that noise with variances in proportion to it does not
    depend on private data, and the bounds of `gradveil.theory.reconstruction_bound` hold for it. Zero where no row
    depends on the inputs; infinite where gradients are zero on all batches and depend on the inputs, which is for the
    caller to cap.

    With a finite `clamp` C it is Theorem 3's, of updates that are cut to [-C, C]: an entry that was cut, |g_i| > C,
    tells nothing of its batch, so it is E 1{|g_i| <= C} ||dg_i/dx||^2 that counts. What is cut on every batch gets no
    noise; of one batch it is the local form. `optimal_variances` scales after that, so what is cut takes no share of
    the noise. Utility is that of the gradient before the cut.

    >>> rows, gradients = {"w": torch.tensor([4.0, 4.0])}, [{"w": torch.tensor([1.0, each])} for each in (1.0, 7.0)]
    >>> [round(float(value), 4) for value in global_ratio([rows, rows], gradients, clamp=2.0)["w"]]
    [2.0, 0.2828]
    """
    seen = [
        {name: torch.where(g[name].abs() > clamp, 0.0, rows[name]) for name in rows}
        for rows, g in zip(squares, gradients, strict=True)
    ]
    rows, sizes = expected(seen), expected([tmap(torch.square, one) for one in gradients])
    return {name: torch.where(row > 0, row / sizes[name], 0.0).sqrt() for name, row in rows.items()}


def expected(of_batches: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Average over public batches.

    >>> expected([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}])
    {'w': tensor([2., 2.])}
    """
    return {name: torch.stack([one[name] for one in of_batches]).mean(0) for name in of_batches[0]}


def global_masks(
    squares: Sequence[Mapping[str, Tensor]], gradients: Sequence[Mapping[str, Tensor]], removed: int
) -> Tensors:
    """Mark what the global form of optimal pruning keeps: all but the `removed` coordinates of largest `global_ratio`.

    Of all masks that are the same for every batch none keeps as much expected first-order utility, sum_i E g_i^2, and
    tells less, sum_i E ||dg_i/dx||^2. Of equal coordinates the last ones go first.

    >>> global_masks([{"w": torch.tensor([4.0, 1.0, 9.0])}], [{"w": torch.ones(3)}], 1)
    {'w': tensor([ True,  True, False])}
    """
    ratio = global_ratio(squares, gradients)
    flat = torch.cat([value.flatten() for value in ratio.values()])
    kept = torch.ones_like(flat, dtype=torch.bool)
    kept[flat.argsort(stable=True)[flat.numel() - removed :]] = False
    parts = kept.split([value.numel() for value in ratio.values()])
    return {name: part.reshape(ratio[name].shape) for name, part in zip(ratio, parts, strict=True)}


def optimal_variances(ratio: Mapping[str, Tensor], mean: float, cap: float = 1e6) -> Tensors:
    """Scale ratios, each at most `cap`, to variances s_i^2 with the given mean over all coordinates."""
    capped = {name: value.clamp(max=cap) for name, value in ratio.items()}
    found = torch.stack([value.sum() for value in capped.values()]).sum() / sum(v.numel() for v in capped.values())
    share = mean / torch.where(found > 0, found, torch.ones_like(found))
    return {name: value * share for name, value in capped.items()}
