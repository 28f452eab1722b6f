"""The ledger of a client's privacy: how often it has sent sums under which noise, over all runs of a training.

    <folder>/_ledgers/<identity>/<training>

It lies outside of the folders of runs, which people remove when runs are over, and nobody but its owner makes one:
`gradveil ledger create`. A program that made a missing one would start at zero what has been spent before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradveil.core.errors import Problem, fail
from gradveil.core.files import DamagedError, make_private, read_json, sync, write_json
from gradveil.defences.privacy import promised
from gradveil.theory.accounting import Sampling, Training, Unit

FOLDER = "~/.gradveil/flower"
"""Where clients keep their files unless somebody says otherwise."""
Count = Annotated[int, Field(ge=1)]
LOST = "put a copy of it back: without it nobody knows what was spent; another training's name starts at zero"
"""What to do where a ledger is missing or damaged, and rounds have been answered."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Spent(BaseModel):
    """Noisy sums of one kind that were sent, or were about to be."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    mechanism: Annotated[int, Field(ge=0)]
    """Which of the client's noises made them."""
    unit: Unit
    multiplier: Annotated[float, Field(ge=0)]
    """Of the noise; 0 where something voids what it proves."""
    sampling: Sampling
    rate: Annotated[float, Field(gt=0, le=1)]
    sums: Count
    times: Count
    """In how many of them a unit is at most, if its batches are shuffled; under Poisson sampling by chance."""

    def training(self, delta: float) -> Training:
        """Say it as the accounting takes it."""
        shuffled = self.sampling == "shuffled"
        return Training(self.sums, self.rate, delta, self.sampling, at_most=self.times if shuffled else None)

    def alike(self) -> tuple[object, ...]:
        """Return what has to be equal for counts to add up."""
        return self.mechanism, self.unit, self.multiplier, self.sampling, self.rate


class Ledger(BaseModel):
    """What was counted; no rounds in a new one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["gradveil privacy"] = "gradveil privacy"
    version: Literal[2] = 2
    rounds: Annotated[int, Field(ge=0)] = 0
    spent: list[Spent] = []


_FORM = TypeAdapter(Ledger)


def file_name(where: str, name: str) -> str:
    """Check a name that becomes part of a path.

    >>> file_name("training", "lungs-2026")
    'lungs-2026'
    """
    if not _NAME.fullmatch(name):
        remedy = "use up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        raise fail(where, f"is {name!r}, which is no name for a file", remedy)
    return name


def place(folder: Path, identity: str, training: str) -> Path:
    """Name the file of a client's ledger. No client can be called as the folder is: names begin otherwise."""
    return folder / "_ledgers" / file_name("identity", identity) / file_name("training", training)


def create(file: Path) -> None:
    """Make an empty ledger where there is none."""
    if file.exists():
        raise fail(str(file), "is there already, and counts on", "look at it: gradveil ledger show")
    make_private(file.parent)
    keep(file, Ledger())


def keep(file: Path, ledger: Ledger) -> None:
    """Write a ledger so that it lasts."""
    write_json(file, ledger.model_dump())
    sync(file.parent)


def read(file: Path) -> Ledger | None:
    """Read a ledger; None where there is none."""
    if not file.exists():
        return None
    try:
        found = _FORM.validate_python(read_json(file, LOST))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise DamagedError(Problem(str(file), f"is no count of privacy: {where}: {first['msg']}", LOST)) from None
    if bool(found.rounds) != bool(found.spent):
        raise DamagedError(Problem(str(file), "is no count of privacy: rounds and sums do not agree", LOST))
    return found


def accounted(spent: Sequence[Spent], delta: float) -> tuple[dict[Unit, float], list[str]]:
    """Find the epsilon of each unit, in words too: of two noises that protect one unit, the better promise."""
    best: dict[Unit, tuple[float, str]] = {}
    for place in sorted({part.mechanism for part in spent}):
        own = [part for part in spent if part.mechanism == place]
        value, text = promised(own[0].unit, [(part.multiplier, part.training(delta)) for part in own])
        if math.isfinite(value) and (own[0].unit not in best or value < best[own[0].unit][0]):
            best[own[0].unit] = value, text
    return {unit: value for unit, (value, _) in best.items()}, [text for _, text in best.values()]
