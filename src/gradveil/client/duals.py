"""Tensors with a tangent, in forward mode."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_mode = cast(Any, forward_ad)


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Give a tensor a tangent, within `forward_ad.dual_level`."""
    return _mode.make_dual(value, tangent)


def unpacked(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor and its tangent, which is zero where there is none."""
    primal, tangent = _mode.unpack_dual(value)
    return primal, torch.zeros_like(primal) if tangent is None else tangent
