"""Distances between the update an attacker simulates and the one he observed: one number a row, rows first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.fused import cosine_distance, squared_distance
from gradveil.core.tree import root

Distance = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(simulated [N, ...], observed [N, ...]) -> [N]"""


def l2(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences (Zhu et al. 2019, "Deep Leakage from Gradients", eq. 4)."""
    return squared_distance([simulated[name] for name in observed], list(observed.values()))


def l2_and_norm(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences and its root: d^2 + d, whose slope does not fade near the end.

    GRNN (Ren et al. 2022) calls the second term a Wasserstein distance; its program computes a Euclidean norm.
    """
    square = l2(simulated, observed)
    return square + root(square)


def l1(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Sum of absolute differences."""
    return _total((simulated[name] - value).flatten(1).abs().sum(1) for name, value in observed.items())


def cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """1 - cosine over all layers concatenated (Geiping et al. 2020, eq. 4)."""
    return cosine_distance([simulated[name] for name in observed], list(observed.values()))


def layerwise_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of 1 - cosine."""
    return _total(cosine({n: simulated[n]}, {n: observed[n]}) for n in observed) / len(observed)


def median_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Median over the layers of 1 - cosine: no layer decides by its length."""
    return torch.stack([cosine({n: simulated[n]}, {n: observed[n]}) for n in observed], 1).median(1).values


def tokenwise_cosine(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Mean over the layers of 1 - cosine, where each row of an embedding [1, T, D] is compared by itself, and averaged.

    In a transformer the gradient of a class token is tens of times as long as those of patches, and would hide them.
    """
    return _total(_by_token(simulated[n], observed[n]) for n in observed) / len(observed)


def _by_token(simulated: Tensor, observed: Tensor) -> Tensor:
    if observed.dim() != _EMBEDDING or observed.shape[1] != 1:
        return cosine({"": simulated}, {"": observed})
    rows, tokens, width = len(observed), *observed.shape[2:]
    apart = (value.reshape(rows * tokens, width) for value in (simulated, observed))
    return cosine_distance(*([value] for value in apart)).view(rows, tokens).mean(1)


_EMBEDDING = 4
"""Dimensions of an embedding [1, T, D], with the rows in front."""


def sapag(simulated: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
    """Adaptive Gaussian kernel (SAPAG): sum_l Q_l (1 - exp(-mean(d_l^2) / (2 var(g_l)))), Q_l = 1 / (l + 1)."""
    parts: list[Tensor] = []
    for layer, (name, value) in enumerate(observed.items()):
        difference = (simulated[name] - value).flatten(1).square().mean(1)
        variance = value.flatten(1).var(1, unbiased=False).clamp_min(1e-20)
        parts.append((1 - torch.exp(-difference / (2 * variance))) / (layer + 1))
    return _total(parts)


OBJECTIVES: dict[str, Distance] = {
    "l2": l2,
    "l2-and-norm": l2_and_norm,
    "l1": l1,
    "cosine": cosine,
    "layerwise-cosine": layerwise_cosine,
    "tokenwise-cosine": tokenwise_cosine,
    "sapag": sapag,
}
"""The distances by name, as presets and run files write them."""


_POWERS = {"l2": 2, "l2-and-norm": 2, "l1": 1}
"""How these distances grow with the updates; the others do not."""


def of_gradients(distance: Tensor, name: str, client: Client, examples: int) -> Tensor:
    """Measure a distance between what clients send as one between gradients: local updates divided by lr T.

    Priors, tolerances and optimisers are set for gradients: without this, one step of size 0.001 looks a million times
    nearer by its squares than the very same gradient.
    """
    if client.local is None or name not in _POWERS:
        return distance
    length = client.local.lr * max(1, client.local.count(examples // client.members))
    if name == "l2-and-norm":  # its two terms grow differently: d from d^2 + d, without a difference of near numbers
        norm = 2 * distance / (1 + (1 + 4 * distance).sqrt()) / length
        return norm.square() + norm
    return distance / length ** _POWERS[name]


def _total(parts) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None, "an update has at least one tensor"
    return total
