"""Cost of a defence: bytes sent, and distance of the sent update from the raw one.

Updates are {name: tensor [V, ...]}, target clients first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core.errors import Problem, refuse

VALUE_BYTES = 4
"""Bytes of a value in an uncompressed update: float32."""


def dense_bytes(update: Mapping[str, Tensor]) -> Tensor:
    """Count the bytes of all values, 4 per value, including zeros: int64 [V].

    >>> dense_bytes({"w": torch.zeros(2, 3, 5), "b": torch.zeros(2, 3)})
    tensor([72, 72])
    """
    target_clients, device = _target_clients(update)
    return torch.full((target_clients,), VALUE_BYTES * sum(v[0].numel() for v in update.values()), device=device)


def relative_distance(sent: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> Tensor:
    """Compute ||sent - raw|| / ||raw|| over all tensors together: float64 [V].

    Infinite if a sent value is not finite, or if the raw update is zero and the sent one is not.
    """
    difference, length, _, _ = _sums(sent, raw)
    ratio = (difference / length).sqrt()
    # 0 / 0: two updates of zeros are equal. NaN below comes from values that are not finite.
    ratio = torch.where((length == 0) & (difference == 0), torch.zeros_like(ratio), ratio)
    return torch.where(torch.isnan(ratio), torch.inf, ratio)


def cosine(sent: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> Tensor:
    """Compute <sent, raw> / (||sent|| ||raw||) over all tensors together: float64 [V].

    0 if either is zero or not finite.
    """
    _, length, sent_length, product = _sums(sent, raw)
    value = product / (length.sqrt() * sent_length.sqrt())
    return torch.where(torch.isfinite(value), value, 0.0).clamp(-1, 1)


def _sums(sent: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum (sent - raw)^2, raw^2, sent^2 and sent * raw for each target client, in float64 on the CPU."""
    only_one = "is in only one of the updates"
    problems = [
        Problem(f"update.{name}", only_one, "compare the same parameters") for name in sorted(set(sent) ^ set(raw))
    ]
    problems += [
        Problem(f"update.{name}", f"is {tuple(sent[name].shape)} and {tuple(raw[name].shape)}", "give one shape")
        for name in sorted(set(sent) & set(raw))
        if sent[name].shape != raw[name].shape
    ]
    refuse(problems)
    target_clients, _ = _target_clients(raw)
    sums = torch.zeros(4, target_clients, dtype=torch.float64)
    for name, value in raw.items():
        x, y = (part.detach().to("cpu", torch.float64).reshape(target_clients, -1) for part in (sent[name], value))
        pairs = ((x - y, x - y), (y, y), (x, x), (x, y))
        sums += torch.stack([torch.linalg.vecdot(first, second) for first, second in pairs])
    return sums[0], sums[1], sums[2], sums[3]


def _target_clients(update: Mapping[str, Tensor]) -> tuple[int, torch.device]:
    counts = {value.shape[0] if value.ndim else 0 for value in update.values()}
    if len(counts) != 1 or 0 in counts:
        remedy = "give {name: tensor [V, ...]} with at least one target client"
        refuse([Problem("update", f"has leading sizes {sorted(counts)}, not one number of target clients", remedy)])
    return counts.pop(), next(iter(update.values())).device
