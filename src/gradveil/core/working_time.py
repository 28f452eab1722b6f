"""The clock by which work is measured."""

from __future__ import annotations

import time

import torch


def working_time(device: torch.device | str) -> float:
    """Return seconds of this process's processors, which other programs do not slow down; of the clock on a GPU.

    Differences count.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
