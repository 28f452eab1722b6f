"""What an update is worth as it was sent, and what pruning left out of it: facts of a cell beside its scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradveil.client import Client
from gradveil.core.tree import Tensors
from gradveil.defences import Dual, Feedback, OptimalPruning, Pruning
from gradveil.defences.privacy import stages
from gradveil.theory.pruning import degraded_cosine, least_gamma, worst_cosine
from gradveil.theory.utility import utilities


def worth(sent: Tensors, raw: Tensors) -> Tensors:
    """Compute Definition 2's two utilities [V] of Chen, Gürsoy and Lei 2024, in units of an undefended step."""
    first, second = utilities(raw, sent)
    return {"first_order_utility": first, "second_order_utility": second}


def pruned(client: Client, fresh: bool) -> dict[str, float] | None:
    """Return what is known of how much this client's pruning leaves out, None where it does not prune, or not alone.

    `fresh` says that no round came before: from then on error feedback sends what was left out earlier, too. Of dual
    pruning `proposition_1` is the lower bound of gamma_1 that the paper prints, `least` our sharper one; both hold for
    shares that come out whole.
    """
    found = [stage for _, stage in stages(client.send)]
    inner = [stage.inner if isinstance(stage, Feedback) else stage for stage in found]
    late = not fresh and any(isinstance(stage, Feedback) for stage in found)
    if not inner or late or client.step or client.batch or client.members > 1:
        return None
    if not all(isinstance(stage, Pruning) for stage in inner):
        return None
    if any(isinstance(stage, OptimalPruning) and stage.std for stage in inner):
        return None
    if len(inner) == 1 and isinstance(inner[0], Dual):
        printed, least = least_gamma(inner[0].top, inner[0].bottom)
        return {"least": least, "proposition_1": printed}
    return {}


def left_out(distance: Tensor, known: Mapping[str, float] | None) -> dict[str, Any] | None:
    """Tell gamma_1 and Theorem 1's degradation of a perfect match, as means over the victims.

    `promised` is the cosine distance from the raw gradient that the theorem prints, sqrt(gamma_1); `worst` is what a
    gradient equal to what was sent has, 1 - sqrt(1 - gamma_1). The Euclidean one is sqrt(gamma_1) of the raw length.
    """
    if known is None:
        return None
    gamma, perfect = distance.square(), torch.zeros_like(distance)
    found = {
        "gamma": gamma,
        "promised": degraded_cosine(perfect, gamma),
        "worst": worst_cosine(perfect, gamma),
    }
    return {**{name: float(value.mean()) for name, value in found.items()}, **known}
