"""The plans of attacks under way, kept in the run directory: RUN/plans/CELL/FIRST-LAST.json, a file a share of victims.

How many rows are worked on at once is chosen for the machine as it is, and decides the last bits of the results. So it
is written before an attack starts, and an attack that was killed takes it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gradveil.core.files import read_json, write_private


def settled(file: Path, choose: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the plan that is written there; where there is none, choose one and write it."""
    if file.is_file():
        return tuple(read_json(file, "give the command of the audit again: the attack is then planned anew"))
    plan = choose()
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    write_private(file, json.dumps(plan).encode())
    return plan
