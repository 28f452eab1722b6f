"""Attacks of a server that changes the model it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.attacks.malicious.fishing import Fishing
    from gradveil.attacks.malicious.planted_block import Imprint, Planting, Trap
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Fishing": "gradveil.attacks.malicious.fishing",
            "Imprint": "gradveil.attacks.malicious.planted_block",
            "Planting": "gradveil.attacks.malicious.planted_block",
            "Trap": "gradveil.attacks.malicious.planted_block",
        },
    )

__all__ = [
    "Fishing",
    "Imprint",
    "Planting",
    "Trap",
]
