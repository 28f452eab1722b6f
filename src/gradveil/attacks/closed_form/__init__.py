"""Attacks that solve equations instead of searching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.attacks.closed_form.first_layer import Analytic
    from gradveil.attacks.closed_form.layer_by_layer import Recursive
    from gradveil.attacks.closed_form.unmix import Unmix
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Analytic": "gradveil.attacks.closed_form.first_layer",
            "Recursive": "gradveil.attacks.closed_form.layer_by_layer",
            "Unmix": "gradveil.attacks.closed_form.unmix",
        },
    )

__all__ = [
    "Analytic",
    "Recursive",
    "Unmix",
]
