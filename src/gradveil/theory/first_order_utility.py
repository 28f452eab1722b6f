"""Utility of a defended gradient by the first two terms of a Taylor series.

A step w - eta * sent lowers the loss by eta <g, sent> - eta^2 / 2 sent^T H sent. In Chen, Gürsoy and Lei 2024, "Optimal
Defenses Against Gradient Reconstruction Attacks", Definition 2, the utility of first order does not depend on noise of
mean zero: the expectation of <g, sent>. That of second order is -sum_i g_i^2 s_i^2 for independent noise: what it adds
to the expectation of -<g, sent>^2, so g g^T takes the place of H.

The first decides, the second compares defences of equal first-order utility; they are not weighed against each other.
Theorems 2 to 4 take expectations inside the root, sqrt(E ||dg_i/dx||^2 / E g_i^2), as their Cauchy step needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.core.tree import Tensors, tmap


def first_order_utility(gradient: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensor:
    """Return <g, sent>: the decrease of the loss by a small step along the sent update, per unit of the step.

    For a pruned gradient it is the sum of g_i^2 over kept entries. Noise of mean zero does not change its expectation.

    >>> first_order_utility({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 2.0])})
    tensor(4.)
    """
    return torch.stack([(value * sent[name]).sum() for name, value in gradient.items()]).sum()


def noise_utility(gradient: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
    """Return -sum_i g_i^2 s_i^2, the second-order utility of independent noise: minus the variance of <g, sent>.

    >>> noise_utility({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 0.25])})
    tensor(-1.5000)
    """
    return -torch.stack([(value.square() * variances[name]).sum() for name, value in gradient.items()]).sum()


def second_order_utility(gradient: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensor:
    """Return -<g, sent>^2 of one update; its mean over the noise contains `noise_utility` as the variance term."""
    return -first_order_utility(gradient, sent).square()


def utilities(gradients: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute both utilities of target clients' updates {name: [V, ...]} relative to the gradient's: float64 [V].

    The first, <g, sent> / ||g||^2, is the loss decrease relative to a small undefended step. The second is minus its
    square; averaged over the noise, this is lower by `noise_utility` / ||g||^4. NaN for g = 0.

    >>> utilities({"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[0.0, 2.0]])})
    (tensor([0.8000], dtype=torch.float64), tensor([-0.6400], dtype=torch.float64))
    """
    g, s = ({name: value.detach().double() for name, value in part.items()} for part in (gradients, sent))
    whole = torch.vmap(first_order_utility)(g, g)
    return torch.vmap(first_order_utility)(g, s) / whole, torch.vmap(second_order_utility)(g, s) / whole.square()


def privacy_loss(
    squares: Mapping[str, Tensor], gradient: Mapping[str, Tensor], variances: Mapping[str, Tensor]
) -> Tensor:
    """Return the relative excess of revealed information over the optimal noise of the same second-order utility.

    (sum_i n_i^2 / s_i^2) (sum_i g_i^2 s_i^2) / (sum_i n_i |g_i|)^2 - 1, with the squared row norms
    n_i^2 = ||dg_i/dx||^2 and the variances s_i^2: the privacy term times the cost of utility, divided by the smallest
    such product (Cauchy-Schwarz), which variances in proportion to n_i / |g_i| reach. It does not depend on the scale
    of the noise. Infinite if a coordinate that depends on x gets no noise; the sums are in double precision.

    >>> squares, g = {"w": torch.tensor([1.0, 16.0])}, {"w": torch.tensor([1.0, 1.0])}
    >>> round(float(privacy_loss(squares, g, {"w": torch.tensor([1.0, 4.0])})), 6)
    0.0
    >>> round(float(privacy_loss(squares, g, {"w": torch.tensor([1.0, 1.0])})), 6)
    0.36
    """
    n = torch.cat([value.flatten() for value in squares.values()]).double()
    g = torch.cat([gradient[name].flatten() for name in squares]).double()
    s = torch.cat([variances[name].flatten() for name in squares]).double()
    # 0 / 0: without noise, a coordinate that does not depend on x reveals nothing.
    information = torch.where(n > 0, n / s, 0.0).sum()
    return information * (g.square() * s).sum() / (n.sqrt() * g.abs()).sum().square() - 1


def global_ratio(
    squares: Sequence[Mapping[str, Tensor]], gradients: Sequence[Mapping[str, Tensor]], clamp: float = math.inf
) -> Tensors:
    """Compute sqrt(E ||dg_i/dx||^2 / E g_i^2) from the squared row norms and gradients of public batches.

    This ratio of the global forms is the same for every batch: noise with variances in proportion to it does not depend
    on private data, and the bounds of `gradveil.theory.reconstruction_bound` hold for it. It is zero for coordinates
    that never depend on the inputs, and infinite (for the caller to cap) where gradients are zero on all batches but
    depend on the inputs.

    A finite `clamp` C gives the ratio of Theorem 3, for updates clamped to [-C, C]: a clamped entry, |g_i| > C, reveals
    nothing about its batch, so E 1{|g_i| <= C} ||dg_i/dx||^2 counts. Entries clamped on every batch get no noise. For a
    single batch it is the local form. Utility is that of the gradient before clamping.

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
    """Return the masks of globally optimal pruning, which removes the `removed` coordinates of largest `global_ratio`.

    No other mask that is the same for every batch keeps as much expected first-order utility, sum_i E g_i^2, and
    reveals less, sum_i E ||dg_i/dx||^2. Of equal coordinates the last ones are removed first.

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
    average = torch.stack([value.sum() for value in capped.values()]).sum() / sum(v.numel() for v in capped.values())
    scale = mean / torch.where(average > 0, average, torch.ones_like(average))
    return {name: value * scale for name, value in capped.items()}
