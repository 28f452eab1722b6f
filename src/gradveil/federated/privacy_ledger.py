"""The ledger of sent sums and noise over all runs of a training, and the privacy they amount to.

    <folder>/_ledgers/<identity>/<training>

It lies outside of the folders of runs, which people remove when runs are over, and nobody but its owner makes one:
`gradveil ledger create`. A program that made a missing one would start at zero what has been spent before.

It holds towards a server who sees each update by itself and knows who sends it, so that choosing some of the clients
amplifies nothing. Of a client counts in how many rounds it answers: that depends on the seed and not on anybody's data.
What clients tell of examples that they keep apart (validation losses) is not covered, nor is it of those they train on.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.private_files import DamagedError, make_private, read_json, sync, write_json
from gradveil.core.types import Batch
from gradveil.defences.guarantees import Mechanism, examine, promise, promised
from gradveil.federated.engine import Federation
from gradveil.theory.accounting import Participation, Sampling, Unit, worst

FOLDER = "~/.gradveil/flower"
"""Where clients keep their files unless somebody says otherwise."""
Count = Annotated[int, Field(ge=1)]
LOST = "put a copy of it back: without it nobody knows what was spent; another training's name starts at zero"
"""What to do where a ledger is missing or damaged, and rounds have been answered."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class SpentNoise(BaseModel):
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

    def training(self, delta: float) -> Participation:
        """Say it as the accounting takes it."""
        shuffled = self.sampling == "shuffled"
        return Participation(self.sums, self.rate, delta, self.sampling, at_most=self.times if shuffled else None)

    def alike(self) -> tuple[object, ...]:
        """Return what has to be equal for counts to add up."""
        return self.mechanism, self.unit, self.multiplier, self.sampling, self.rate


class Ledger(BaseModel):
    """What was counted; no rounds in a new one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["gradveil privacy"] = "gradveil privacy"
    version: Literal[2] = 2
    rounds: Annotated[int, Field(ge=0)] = 0
    spent: list[SpentNoise] = []


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


def accounted(spent: Sequence[SpentNoise], delta: float) -> tuple[dict[Unit, float], list[str]]:
    """Find the epsilon of each unit, in words too: of two noises that protect one unit, the better promise."""
    best: dict[Unit, tuple[float, str]] = {}
    for place in sorted({part.mechanism for part in spent}):
        own = [part for part in spent if part.mechanism == place]
        value, text = promised(own[0].unit, [(part.multiplier, part.training(delta)) for part in own])
        if math.isfinite(value) and (own[0].unit not in best or value < best[own[0].unit][0]):
            best[own[0].unit] = value, text
    return {unit: value for unit, (value, _) in best.items()}, [text for _, text in best.values()]


def guarantee(federation: Federation, rounds: int, delta: float) -> dict[str, Any]:
    """Say what is proven of each example and of each client of a training: in words, and the epsilon of each unit.

    It is that of the client of which least is proven, after all the rounds that were planned: who stops earlier because
    of what he saw has no smaller epsilon.
    """
    sizes = [_size(federation, len(share.train.targets)) for share in federation.shares]
    found = {size: examine(federation.client, _first(federation, size)) for size in set(sizes)}
    any_of_them = found[sizes[0]]
    if not any_of_them.sound:
        return {"guarantee": any_of_them.promise(), "epsilon": {}, "delta": None}
    answers = Counter(client for number in range(1, rounds + 1) for client in federation.chosen(number)[0])
    said: dict[str, tuple[float, str]] = {}
    for place, mechanism in enumerate(any_of_them.mechanisms):
        if mechanism.flaws:
            continue
        of_each = [(found[size].mechanisms[place], size, answers[client]) for client, size in enumerate(sizes)]
        value, text = _account(federation.client, of_each, delta)
        # Where two noises protect the same unit, both promises hold: the better one is told.
        if mechanism.unit not in said or value < said[mechanism.unit][0]:
            said[mechanism.unit] = value, text
    texts = "; ".join([*(text for _, text in said.values()), *any_of_them.denied(), *_too_large(delta, said, sizes)])
    return {"guarantee": texts, "epsilon": {unit: value for unit, (value, _) in said.items()}, "delta": delta}


def _too_large(delta: float, units: Collection[str], sizes: Sequence[int]) -> Iterator[str]:
    """Warn of a delta at which publishing a unit drawn at random counts as private (Dwork and Roth 2014, sec. 2.3)."""
    counts = {"example": max(sizes), "client": len(sizes)}
    for unit in units:
        if delta * counts[unit] >= 1:
            yield f"delta is not below one over {counts[unit]} {unit}s: it allows that one of them is published"


def _account(client: Client, of_each: list[tuple[Mechanism, int, int]], delta: float) -> tuple[float, str]:
    """Find the largest epsilon of clients with these mechanisms, sizes and rounds, and put it into words."""
    parts = {
        (mechanism.multiplier, released(client, mechanism, size, max(rounds, 1), delta)): mechanism
        for mechanism, size, rounds in of_each
    }
    value, noise, training = worst(parts)
    return value, promise(parts[noise, training], training)


def released(client: Client, mechanism: Mechanism, examples: int, rounds: int, delta: float) -> Participation:
    """Say how often an example (or the client itself) gets into a noisy sum when the client answers so many times.

    Only Poisson sampling amplifies. Otherwise neighbours differ in what is *replaced*: batches keep their size, and
    everybody sees that the client took part.
    """
    local, sums = client.local, mechanism.sums * rounds
    if mechanism.unit == "client" or local is None:
        return Participation(sums, delta=delta, sampling="shuffled", at_most=sums)
    if local.sampling == "poisson":
        return Participation(sums, rate=local.batch / examples, delta=delta)
    passes = math.ceil(mechanism.sums / (examples // local.batch))
    return Participation(sums, delta=delta, sampling="shuffled", at_most=passes * rounds)


def _size(federation: Federation, examples: int) -> int:
    """Count the examples that a client's update is made from."""
    return examples if federation.client.local or not federation.batch else min(federation.batch, examples)


def _first(federation: Federation, size: int) -> Batch:
    share = next(share for share in federation.shares if len(share.train.targets) >= size)
    return Batch(share.train.inputs[:size], share.train.targets[:size])
