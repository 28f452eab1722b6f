"""Surrogate models: one gradient at parameters on the line of a client's local training.

After many local steps, the update is nearly parallel to the gradient of all examples at some parameters between those
before (w0) and after (wT): w = (1 - a) w0 + a wT, with a in [0, 1] optimised together with the images (Zhu, Yao,
Blaschko 2023, "Surrogate Model Extension (SME): A Fast and Accurate Weight Update Attack on Federated Learning", ICML).
The attacker needs neither the step size nor the number of steps, and an iteration costs one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradveil.core.noise import Noise, Uniform
from gradveil.core.tree import Tensors

PLACE = "surrogate.place"
"""The variable that says where on the line a row's parameters are."""
_REACH = 500.0
"""Half the length of the line in units of the variable. The paper's step size of a is 1/1000 of that of the images."""
PROBES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Places at which given images are tried, of which the best counts."""


def place_noise() -> Noise:
    """Return the variable: it starts in the middle of the line."""
    return Noise((), Uniform(-_REACH, _REACH), neutral=0.0, lower=-_REACH, upper=_REACH)


def place(share: float) -> float:
    """Return the variable's value at a share of the line.

    >>> place(0.5), place(1.0)
    (0.0, 500.0)
    """
    return (2 * share - 1) * _REACH


def on_the_line(params: Mapping[str, Tensor], update: Mapping[str, Tensor], where: Tensor) -> Tensors:
    """Return parameters on the line, given those before, the update (before minus after) and a value of the variable.

    >>> import torch
    >>> on_the_line({"w": torch.zeros(1)}, {"w": torch.ones(1)}, torch.tensor(place(0.25)))["w"]
    tensor([-0.2500])
    """
    share = 0.5 + where / (2 * _REACH)
    return {name: value - share * update[name] if name in update else value for name, value in params.items()}
