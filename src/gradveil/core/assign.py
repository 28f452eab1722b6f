"""One-to-one assignment of least total cost."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import (  # pyright: ignore[reportMissingTypeStubs]
    linear_sum_assignment,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor

from gradveil.core.errors import fail


def match(cost: Tensor) -> Tensor:
    """Give every row its own column so that the sum of the chosen costs is least, for each victim.

    `cost` is [V, B, B]; the result is int64 [V, B], the column of each row (H. W. Kuhn's assignment problem, solved by
    scipy). A cost that is not finite is avoided wherever finite ones can be had, so a broken candidate is matched last.

    >>> match(torch.tensor([[[9.0, 1.0], [2.0, float("nan")]]]))
    tensor([[1, 0]])
    """
    if cost.ndim != 3 or cost.shape[1] != cost.shape[2]:
        raise fail("cost", f"has shape {tuple(cost.shape)}", "give one square matrix a victim: [V, B, B]")
    columns = [_solve(matrix) for matrix in cost.detach().to("cpu", torch.float64).numpy()]
    found = np.stack(columns) if columns else np.empty((0, cost.shape[1]), dtype=np.int64)
    return torch.as_tensor(found, dtype=torch.int64, device=cost.device)


def _solve(matrix: NDArray[np.float64]) -> NDArray[np.int64]:
    finite = np.isfinite(matrix)
    # One avoided entry must cost more than any choice of finite ones: scaled to [0, 1], B of them cost at most B.
    low, high = (matrix[finite].min(), matrix[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (matrix - low) / max(high - low, np.finfo(np.float64).tiny)
    return cast("NDArray[np.int64]", linear_sum_assignment(np.where(finite, scaled, len(matrix) + 1.0))[1])
