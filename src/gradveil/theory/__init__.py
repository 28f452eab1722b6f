"""Bounds that need no attack.

`gradveil.theory.input_jacobian` measures how strongly each coordinate of a gradient depends on the inputs,
`gradveil.theory.reconstruction_bound` bounds the error of every reconstruction from below,
`gradveil.theory.first_order_utility` computes the cost of noise, `gradveil.theory.accounting` its epsilon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.theory.accounting import Participation, assumptions, composed, epsilon, multiplier
    from gradveil.theory.first_order_utility import noise_utility, optimal_variances, second_order_utility
    from gradveil.theory.input_jacobian import exact_squared_row_norms, jacobian
    from gradveil.theory.reconstruction_bound import (
        Spectrum,
        block_bound,
        error_bound,
        information,
        spectrum,
        trace_bound,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Participation": "gradveil.theory.accounting",
            "Spectrum": "gradveil.theory.reconstruction_bound",
            "assumptions": "gradveil.theory.accounting",
            "block_bound": "gradveil.theory.reconstruction_bound",
            "composed": "gradveil.theory.accounting",
            "epsilon": "gradveil.theory.accounting",
            "error_bound": "gradveil.theory.reconstruction_bound",
            "exact_squared_row_norms": "gradveil.theory.input_jacobian",
            "information": "gradveil.theory.reconstruction_bound",
            "jacobian": "gradveil.theory.input_jacobian",
            "multiplier": "gradveil.theory.accounting",
            "noise_utility": "gradveil.theory.first_order_utility",
            "optimal_variances": "gradveil.theory.first_order_utility",
            "second_order_utility": "gradveil.theory.first_order_utility",
            "spectrum": "gradveil.theory.reconstruction_bound",
            "trace_bound": "gradveil.theory.reconstruction_bound",
        },
    )

__all__ = [
    "Participation",
    "Spectrum",
    "assumptions",
    "block_bound",
    "composed",
    "epsilon",
    "error_bound",
    "exact_squared_row_norms",
    "information",
    "jacobian",
    "multiplier",
    "noise_utility",
    "optimal_variances",
    "second_order_utility",
    "spectrum",
    "trace_bound",
]
