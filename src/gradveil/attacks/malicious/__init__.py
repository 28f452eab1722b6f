"""Attacks of a server that changes the model it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.attacks.malicious.fishing import Fishing
    from gradveil.attacks.malicious.hidden_units import CopiedRows, QuantileBiases
    from gradveil.attacks.malicious.loss_steering import Steering
    from gradveil.attacks.malicious.planted_block import Imprint, Planting, Trap
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "CopiedRows": "gradveil.attacks.malicious.hidden_units",
            "Fishing": "gradveil.attacks.malicious.fishing",
            "Imprint": "gradveil.attacks.malicious.planted_block",
            "Planting": "gradveil.attacks.malicious.planted_block",
            "QuantileBiases": "gradveil.attacks.malicious.hidden_units",
            "Steering": "gradveil.attacks.malicious.loss_steering",
            "Trap": "gradveil.attacks.malicious.planted_block",
        },
    )

__all__ = [
    "CopiedRows",
    "Fishing",
    "Imprint",
    "Planting",
    "QuantileBiases",
    "Steering",
    "Trap",
]
