"""Sites that worker processes open in tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradveil.runs.task import Parcel, Tell, Work


def deadly(setting: Mapping[str, Any]) -> Work:
    """Work that tells what it was given, and kills its own process where a task says so and has not done it before."""
    print("a line that must not reach the messages")

    def work(order: Parcel, tell: Tell) -> Parcel:
        number, marks = order.facts["number"], Path(setting["marks"])
        tell(Parcel({"threads": torch.get_num_threads()}, order.data))
        kills = len(list(marks.glob(f"{number}-*")))
        if kills < setting["kills"].get(str(number), 0):
            (marks / f"{number}-{kills}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Parcel({"did": number}, order.data * number)

    return work


def refusing(_: Mapping[str, Any]) -> Work:
    """Refuse to open."""
    raise OSError("the disk has gone")
