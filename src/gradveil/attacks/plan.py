"""How many rows to work on at once."""

from __future__ import annotations

import ctypes
import sys
from math import ceil

import torch

CACHE_BUDGET = 600 * 2**20
"""Bytes that one iteration of a batch may write on a CPU."""
MOST_ROWS = 64
"""Rows of one batch on a CPU: beyond these a batch is no faster."""


def rows_at_once(bytes_per_row: int, rows: int, device: torch.device | str) -> int:
    """Choose the rows of one batch from what an iteration of one row writes; the batches come out about equal.

    On a CPU a call costs as much as the arithmetic of a few rows of a small network, and more rows write more than
    caches and freed blocks hold. Victim-iterations a second on one EPYC core (32 MiB of last-level cache; the large
    networks with `keep_freed_memory`):

    | rows | LeNetZhu, 1.2 MiB a row | Scheliga CNN, 1.3 MiB | ViT, 50 MiB | ResNet-18, its gradients made, 136 MiB |
    |---|---|---|---|---|
    | 1 | 316 | 213 | 22.7 | 7.8 |
    | 4 | 870 | 656 | 23.5 | 12.1 |
    | 8 | 1240 | 987 | 24.4 | 12.2 (6 rows) |
    | 32 | 2006 | 1755 | | |
    | 64 | 2273 | 2011 | | |
    | 128 | 2055 | 1725 | | |

    So: at most 64 rows, which write at most 600 MiB. Other devices take what fits half of their free memory.

    >>> rows_at_once(2**20, 100, "cpu"), rows_at_once(50 * 2**20, 100, "cpu"), rows_at_once(2**30, 100, "cpu")
    (50, 12, 1)
    """
    device = torch.device(device)
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[0] // 2 // max(1, bytes_per_row)
    else:
        most = min(MOST_ROWS, CACHE_BUDGET // max(1, bytes_per_row))
    batches = ceil(rows / max(1, most))
    return ceil(rows / max(1, batches))


def keep_freed_memory() -> bool:
    """Let this process keep large blocks that it freed, instead of giving each back to the system and asking again.

    Changes glibc's allocator for the whole process, so it is for programs to call, not for libraries. ResNet-18 on one
    core: 14.0 instead of 9.0 victim-iterations a second with 4 rows. Returns whether there was a glibc to change.
    """
    allocator = ctypes.CDLL(None) if sys.platform == "linux" else None
    if allocator is None or not hasattr(allocator, "mallopt"):
        return False
    settings = ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, 2**31 - 1))
    return all(allocator.mallopt(name, value) == 1 for name, value in settings)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
