"""Gradients of a client's loss: plainly by autograd, and for many clients in one sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.gradients.fused import cosine_distance, squared_distance, total_variation
    from gradveil.gradients.layer_rules import RULES
    from gradveil.gradients.objective import Objective, cross_entropy, example_gradients, mean_gradient
    from gradveil.gradients.per_client import per_client_cosines, per_client_gradients, reference_gradients
    from gradveil.gradients.recorder import Recorder, Unsupported
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Objective": "gradveil.gradients.objective",
            "RULES": "gradveil.gradients.layer_rules",
            "Recorder": "gradveil.gradients.recorder",
            "Unsupported": "gradveil.gradients.recorder",
            "cosine_distance": "gradveil.gradients.fused",
            "cross_entropy": "gradveil.gradients.objective",
            "example_gradients": "gradveil.gradients.objective",
            "mean_gradient": "gradveil.gradients.objective",
            "per_client_cosines": "gradveil.gradients.per_client",
            "per_client_gradients": "gradveil.gradients.per_client",
            "reference_gradients": "gradveil.gradients.per_client",
            "squared_distance": "gradveil.gradients.fused",
            "total_variation": "gradveil.gradients.fused",
        },
    )

__all__ = [
    "RULES",
    "Objective",
    "Recorder",
    "Unsupported",
    "cosine_distance",
    "cross_entropy",
    "example_gradients",
    "mean_gradient",
    "per_client_cosines",
    "per_client_gradients",
    "reference_gradients",
    "squared_distance",
    "total_variation",
]
