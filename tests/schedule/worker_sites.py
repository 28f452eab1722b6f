"""Sites that worker processes open in tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradveil.runs.task import Parcel, Report, Work


def deadly(setting: Mapping[str, Any]) -> Work:
    """Work that reports its order's bytes, and kills its own process as often as the setting demands for the task."""
    print("a line that must not reach the messages")

    def work(order: Parcel, report: Report) -> Parcel:
        number, marks = order.facts["number"], Path(setting["marks"])
        report(Parcel({"threads": torch.get_num_threads()}, order.data))
        kills = len(list(marks.glob(f"{number}-*")))
        if kills < setting["kills"].get(str(number), 0):
            (marks / f"{number}-{kills}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Parcel({"did": number}, order.data * number)

    return work


def refusing(_: Mapping[str, Any]) -> Work:
    """Refuse to open."""
    raise OSError("the disk has gone")
