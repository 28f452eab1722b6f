"""The ledger of sent sums and noise over all runs of a training, and the privacy that they spend.

    <folder>/_ledgers/<identity>/<training>

It is outside of the run folders, which people remove after a run, and only its owner creates one, with `gradveil ledger
create`. A program that created a missing ledger would forget the privacy spent before.

The guarantee holds against a server that sees each update separately and knows its sender, so sampling of clients does
not amplify privacy. It counts the rounds that a client answers, which depend on the seed and not on data. Losses on
validation examples, and metrics of training examples, are not covered.
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
"""Default folder of a client's files."""
Count = Annotated[int, Field(ge=1)]
LOST = "put a copy of it back: without it the privacy spent is unknown; another training's name starts at zero"
"""Fix for a missing or damaged ledger of a training with answered rounds."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class SpentNoise(BaseModel):
    """Noisy sums of one kind that were sent, or counted before sending."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    mechanism: Annotated[int, Field(ge=0)]
    """Index of the client's noise mechanism."""
    unit: Unit
    multiplier: Annotated[float, Field(ge=0)]
    """Noise multiplier; 0 if the guarantee is void."""
    sampling: Sampling
    rate: Annotated[float, Field(gt=0, le=1)]
    sums: Count
    times: Count
    """Largest number of sums that contain a unit, for shuffled batches; under Poisson sampling it is random."""

    def training(self, delta: float) -> Participation:
        """Convert to the form of the accounting."""
        shuffled = self.sampling == "shuffled"
        return Participation(self.sums, self.rate, delta, self.sampling, at_most=self.times if shuffled else None)

    def alike(self) -> tuple[object, ...]:
        """Return the fields that must be equal for counts to be added."""
        return self.mechanism, self.unit, self.multiplier, self.sampling, self.rate


class Ledger(BaseModel):
    """Content of a ledger; a new one has no rounds."""

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


def ledger_file(folder: Path, identity: str, training: str) -> Path:
    """Return the file of a client's ledger. No client is named like its folder: names start with a letter or digit."""
    return folder / "_ledgers" / file_name("identity", identity) / file_name("training", training)


def create(file: Path) -> None:
    """Create an empty ledger; refuse to replace one."""
    if file.exists():
        raise fail(str(file), "is there already, and counts on", "look at it: gradveil ledger show")
    make_private(file.parent)
    keep(file, Ledger())


def keep(file: Path, ledger: Ledger) -> None:
    """Write a ledger, and flush it to disk."""
    write_json(file, ledger.model_dump())
    sync(file.parent)


def read(file: Path) -> Ledger | None:
    """Read a ledger; None if there is none."""
    if not file.exists():
        return None
    try:
        ledger = _FORM.validate_python(read_json(file, LOST))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise DamagedError(Problem(str(file), f"is no count of privacy: {where}: {first['msg']}", LOST)) from None
    if bool(ledger.rounds) != bool(ledger.spent):
        raise DamagedError(Problem(str(file), "is no count of privacy: rounds and sums do not agree", LOST))
    return ledger


def accounted(spent: Sequence[SpentNoise], delta: float) -> tuple[dict[Unit, float], list[str]]:
    """Compute the epsilon of each unit, with a description; of two mechanisms for one unit the better counts."""
    best: dict[Unit, tuple[float, str]] = {}
    for mechanism in sorted({noise.mechanism for noise in spent}):
        parts = [noise for noise in spent if noise.mechanism == mechanism]
        unit = parts[0].unit
        value, text = promised(unit, [(part.multiplier, part.training(delta)) for part in parts])
        if math.isfinite(value) and (unit not in best or value < best[unit][0]):
            best[unit] = value, text
    return {unit: value for unit, (value, _) in best.items()}, [text for _, text in best.values()]


def guarantee(federation: Federation, rounds: int, delta: float) -> dict[str, Any]:
    """Return the guarantee of a training for each example and each client: in words, and as epsilon per unit.

    It is the weakest guarantee of all clients, after all planned rounds: stopping early because of what was observed
    does not lower epsilon.
    """
    sizes = [_size(federation, len(share.train.targets)) for share in federation.shares]
    privacy = {size: examine(federation.client, _first(federation, size)) for size in set(sizes)}
    any_of_them = privacy[sizes[0]]  # all clients have the same mechanisms
    if not any_of_them.sound:
        return {"guarantee": any_of_them.promise(), "epsilon": {}, "delta": None}
    answers = Counter(client for number in range(1, rounds + 1) for client in federation.chosen(number)[0])
    best: dict[str, tuple[float, str]] = {}
    for index, mechanism in enumerate(any_of_them.mechanisms):
        if mechanism.flaws:
            continue
        of_each = [(privacy[size].mechanisms[index], size, answers[client]) for client, size in enumerate(sizes)]
        value, text = _account(federation.client, of_each, delta)
        # If two mechanisms protect the same unit, both guarantees hold, and the better one is reported.
        if mechanism.unit not in best or value < best[mechanism.unit][0]:
            best[mechanism.unit] = value, text
    texts = "; ".join([*(text for _, text in best.values()), *any_of_them.denied(), *_too_large(delta, best, sizes)])
    return {"guarantee": texts, "epsilon": {unit: value for unit, (value, _) in best.items()}, "delta": delta}


def _too_large(delta: float, units: Collection[str], sizes: Sequence[int]) -> Iterator[str]:
    """Warn of a delta at which publishing a unit drawn at random counts as private (Dwork and Roth 2014, sec. 2.3)."""
    counts = {"example": max(sizes), "client": len(sizes)}
    for unit in units:
        if delta * counts[unit] >= 1:
            yield f"delta is not below one over {counts[unit]} {unit}s: it allows that one of them is published"


def _account(client: Client, of_each: list[tuple[Mechanism, int, int]], delta: float) -> tuple[float, str]:
    """Return the largest epsilon of clients with these mechanisms, sizes and rounds, with a description."""
    parts = {
        (mechanism.multiplier, released(client, mechanism, size, max(rounds, 1), delta)): mechanism
        for mechanism, size, rounds in of_each
    }
    value, noise, training = worst(parts)
    return value, promise(parts[noise, training], training)


def released(client: Client, mechanism: Mechanism, examples: int, rounds: int, delta: float) -> Participation:
    """Return how often an example (or the client itself) is part of a noisy sum in this number of answered rounds.

    Only Poisson sampling amplifies privacy. Otherwise neighbouring data sets differ by *replacement*, since batches
    keep their size and participation is visible.
    """
    local, sums = client.local, mechanism.sums * rounds
    if mechanism.unit == "client" or local is None:
        return Participation(sums, delta=delta, sampling="shuffled", at_most=sums)
    if local.sampling == "poisson":
        return Participation(sums, rate=local.batch / examples, delta=delta)
    # Upper bound on the passes over the data in a round: an example is in at most one batch per pass.
    passes = math.ceil(mechanism.sums / (examples // local.batch))
    return Participation(sums, delta=delta, sampling="shuffled", at_most=passes * rounds)


def _size(federation: Federation, examples: int) -> int:
    """Count the examples that a client's update is computed from."""
    return examples if federation.client.local or not federation.batch else min(federation.batch, examples)


def _first(federation: Federation, size: int) -> Batch:
    share = next(share for share in federation.shares if len(share.train.targets) >= size)
    return Batch(share.train.inputs[:size], share.train.targets[:size])
