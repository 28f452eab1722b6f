"""A model behind a block that its server put before it, so that updates give examples away."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn


class Planted(nn.Module):
    """Image -> linear measures -> cut -> linear -> an image of the same shape -> the model as it was.

    Measures below zero are cut to zero, and those above a ceiling to it. Only examples between the two count for a
    measure's weights and bias, and the gradient of these says what the examples are: which ones count is the server's
    choice.
    """

    ceiling: Tensor

    def __init__(self, model: nn.Module, shape: tuple[int, int, int], units: int) -> None:
        """Put a block of so many measures before the model; without a ceiling at first."""
        super().__init__()
        self.measure = nn.Linear(prod(shape), units)
        self.register_buffer("ceiling", torch.full((units,), torch.inf))
        self.back = nn.Linear(units, prod(shape))
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Measure the image, and give the model what comes back."""
        seen = torch.minimum(torch.relu(self.measure(x.flatten(1))), self.ceiling)
        return self.model(self.back(seen).unflatten(1, x.shape[1:]))
