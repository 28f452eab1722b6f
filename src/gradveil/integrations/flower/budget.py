"""The differential privacy that a client has spent: how often it has sent sums under which noise, counted on its disk.

    <folder>/<identity>/privacy-<training>      of a training with a name, over all its runs
    <folder>/<identity>/run-<id>/privacy        of a run that belongs to none

A round is counted before its reply is made, and stays counted if the reply never arrives: what is told may be too much,
never too little. It is what the engine tells of a client that answers as often (`gradveil.federated.privacy`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradveil.client import Client
from gradveil.core.allowed import collect
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.files import DamagedError, read_json, sync, write_json
from gradveil.core.types import Batch
from gradveil.defences.privacy import NOTHING, Mechanism, Privacy, examine, promised
from gradveil.federated.privacy import released
from gradveil.integrations.flower.memory import Memory
from gradveil.theory.accounting import POSITIVE, PROBABILITY, Sampling, Training, Unit

Count = Annotated[int, Field(ge=1)]
_PROVES = "choose a defence that has one, such as dp(clip=1, sigma=1) or user-dp(clip=1, sigma=1), or leave epsilon out"
_LOST = "put a copy of it back: without it nobody knows what was spent; another training's name starts at zero"


@dataclass(frozen=True)
class Limit:
    """The epsilon that a client may spend in a training, at this delta; None for no limit."""

    epsilon: float | None = None
    delta: float = 1e-5

    @staticmethod
    def of(epsilon: float | None, delta: float, training: str | None) -> Limit:
        """Check what an app asks for; a limit without a training's name would start anew with every run."""
        given = () if epsilon is None else (("epsilon", POSITIVE, epsilon),)
        problems = collect("privacy", (*given, ("delta", PROBABILITY, delta)))
        if epsilon is not None and training is None:
            what = "would be spent anew in every run, and who runs the server starts runs"
            problems.append(Problem("privacy.epsilon", what, 'name the training: training="lungs-2026"'))
        refuse(problems)
        return Limit(epsilon, delta)

    def provable(self, privacy: Privacy, beside: str | None = None) -> None:
        """Refuse a limit of what nothing proves."""
        if self.epsilon is not None and (beside or not privacy.sound):
            said = f"{NOTHING}: {beside}" if beside else privacy.promise()
            raise fail("privacy.epsilon", f"limits what has no epsilon ({said})", _PROVES)


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


class _Ledger(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["gradveil privacy"] = "gradveil privacy"
    version: Literal[1] = 1
    rounds: Count
    spent: Annotated[list[Spent], Field(min_length=1)]


_FORM = TypeAdapter(_Ledger)


@dataclass(frozen=True)
class Charge:
    """What a client has spent once the next reply is made."""

    file: Path
    ledger: _Ledger
    epsilon: Mapping[Unit, float]
    """At the limit's delta, of the units of which something is proven."""
    guarantee: str
    """The same in words, with what it assumes."""

    def keep(self) -> None:
        """Write it down; a reply may be made after that."""
        write_json(self.file, self.ledger.model_dump())
        sync(self.file.parent)

    def __str__(self) -> str:
        """Say it for a log."""
        rounds = self.ledger.rounds
        return f"privacy spent in {rounds} round{'s' if rounds > 1 else ''}: {self.guarantee}"


def charged(memory: Memory, client: Client, batch: Batch, limit: Limit, beside: str | None = None) -> Charge | None:
    """Count one more round, without writing it yet; None for a client that proves nothing.

    A round that would go beyond the limit is refused, and so is one that cannot be added to what was counted. `beside`
    says what else the reply holds that no noise covers.
    """
    privacy = examine(client, batch)
    limit.provable(privacy, beside)
    before = _read(memory.ledger)
    if before is None:
        if beside or not privacy.sound:
            return None
        if not memory.fresh:
            raise fail(str(memory.ledger), "is missing, where rounds have been answered", _LOST)
    now = [_spent(client, mechanism, place, batch, beside) for place, mechanism in enumerate(privacy.mechanisms)]
    earlier = before.spent if before else []
    refuse(list(_misfits(memory.ledger, earlier, now)))
    ledger = _Ledger(rounds=1 + (before.rounds if before else 0), spent=_added([*earlier, *now]))
    epsilon, texts = _told(ledger.spent, limit.delta)
    lost: list[Unit] = [*dict.fromkeys(mechanism.unit for mechanism in privacy.mechanisms)]
    lost = [unit for unit in lost if unit not in epsilon]
    why = {unit: privacy.void(unit) or beside or "a round of this training was sent without" for unit in lost}
    texts += [f"{NOTHING} of each {unit}: {why[unit]}" for unit in lost]
    _within(limit, {m.unit: epsilon.get(m.unit, math.inf) for m in privacy.sound}, ledger.rounds - 1)
    return Charge(memory.ledger, ledger, epsilon, "; ".join(texts))


def _within(limit: Limit, epsilon: Mapping[Unit, float], rounds: int) -> None:
    """Refuse a round after which the privacy of some unit would be less than was promised."""
    if limit.epsilon is None:
        return
    answered = f"{rounds} round{'' if rounds == 1 else 's'} answered"
    remedy = "leave the training here: a larger epsilon, or another training on the same data, promises less"
    above = {unit: value for unit, value in epsilon.items() if value > limit.epsilon}
    what = f"({answered}), above {limit.epsilon:g}"
    refuse(
        [
            Problem("privacy.epsilon", f"would be {value:.4g} of each {unit} {what}", remedy)
            for unit, value in above.items()
        ]
    )


def _read(file: Path) -> _Ledger | None:
    if not file.exists():
        return None
    try:
        return _FORM.validate_python(read_json(file, _LOST))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise DamagedError(Problem(str(file), f"is no count of privacy: {where}: {first['msg']}", _LOST)) from None


def _spent(client: Client, mechanism: Mechanism, place: int, batch: Batch, beside: str | None) -> Spent:
    """Say what one round sends of a mechanism."""
    training = released(client, mechanism, len(batch.targets), 1, delta=0.5)
    return Spent(
        mechanism=place,
        unit=mechanism.unit,
        multiplier=0.0 if beside or mechanism.flaws else float(mechanism.multiplier),
        sampling=training.sampling,
        rate=float(training.rate),
        sums=training.steps,
        times=training.at_most or training.steps,
    )


def _misfits(file: Path, before: Sequence[Spent], now: Sequence[Spent]) -> Iterator[Problem]:
    """Say why this round cannot be added to what was counted."""
    remedy = "keep defence and sampling through a training, or name another one: privacy spent in both adds up"
    kinds = [{(spent.mechanism, spent.unit) for spent in counted} for counted in (before, now)]
    if before and kinds[0] != kinds[1]:
        yield Problem(str(file), "counts other mechanisms than those of this client", remedy)
    theirs, ours = ({spent.sampling for spent in counted if spent.unit == "example"} for counted in (before, now))
    if theirs and ours and theirs != ours:
        what = f"counts sums of {min(theirs)} batches, and this round's are {min(ours)}: they mean other neighbours"
        yield Problem(str(file), what, remedy)


def _added(parts: Iterable[Spent]) -> list[Spent]:
    """Add up what is alike."""
    found: dict[tuple[object, ...], Spent] = {}
    for part in parts:
        if (own := found.get(part.alike())) is not None:
            part = own.model_copy(update={"sums": own.sums + part.sums, "times": own.times + part.times})
        found[part.alike()] = part
    return list(found.values())


def _told(spent: Sequence[Spent], delta: float) -> tuple[dict[Unit, float], list[str]]:
    """Find the epsilon of each unit; where two noises protect the same one, both promises hold: the better is told."""
    said: dict[Unit, tuple[float, str]] = {}
    for place in sorted({part.mechanism for part in spent}):
        own = [part for part in spent if part.mechanism == place]
        value, text = promised(own[0].unit, [(part.multiplier, part.training(delta)) for part in own])
        if math.isfinite(value) and (own[0].unit not in said or value < said[own[0].unit][0]):
            said[own[0].unit] = value, text
    return {unit: value for unit, (value, _) in said.items()}, [text for _, text in said.values()]
