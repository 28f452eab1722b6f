"""The plans of attacks under way, kept in the run directory: RUN/plans/CELL/FIRST-LAST.json, a file a share of victims.

How many rows are worked on at once is chosen for the machine as it is, and decides the last bits of the results. So it
is written before an attack starts, and an attack that was killed takes it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradveil.core.files import read_json, write_private

Plan = tuple[int, ...]
_NAMES = {"rows": "", "iterations": "-iterations"}
_REMEDY = "give the command of the audit again: the attack is then planned anew"


def _forget(_name: str, _plan: Plan) -> None:
    """Keep nothing."""


@dataclass(frozen=True)
class Plans:
    """What has been settled for one share of a cell, and who writes down what is settled now."""

    known: Mapping[str, Plan] = field(default_factory=dict[str, Plan])
    keep: Callable[[str, Plan], None] = _forget

    def settled(self, name: str, choose: Callable[[], Plan]) -> Plan:
        """Return the plan of this name that is known; where there is none, choose one and have it written."""
        if name in self.known:
            return tuple(self.known[name])
        plan = choose()
        self.keep(name, plan)
        return plan


UNPLANNED = Plans()
"""Nothing settled, and nobody who writes it down."""


def read_plans(folder: Path, numbers: range) -> dict[str, Plan]:
    """Read what was settled for these victims of a cell, whose plans lie in `folder`."""
    files = {name: _file(folder, numbers, name) for name in _NAMES}
    return {name: tuple(read_json(file, _REMEDY)) for name, file in files.items() if file.is_file()}


def write_plan(folder: Path, numbers: range, name: str, plan: Plan) -> None:
    """Write what was settled for these victims of a cell."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    write_private(_file(folder, numbers, name), json.dumps(plan).encode())


def _file(folder: Path, numbers: range, name: str) -> Path:
    return folder / f"{numbers.start}-{numbers.stop - 1}{_NAMES[name]}.json"
