"""The privacy budget of a Flower client: each round is counted in its ledger before the reply leaves.

What was counted stays counted if the reply never arrives: the epsilon may be too large, never too small. It is what
the engine reports of a client that answers as often (`gradveil.federated.privacy_ledger`). The ledger
(`gradveil.federated.privacy_ledger`) belongs to a training with a name, and its owner has made it; without one, each
round is accounted for by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import collect
from gradveil.core.types import Batch
from gradveil.defences.guarantees import NOTHING, Mechanism, Privacy, examine
from gradveil.federated.privacy_ledger import LOST, Ledger, SpentNoise, accounted, keep, read, released
from gradveil.integrations.flower.client_memory import LOG, Memory
from gradveil.theory.accounting import POSITIVE, PROBABILITY, Unit

_PROVES = "choose a defence that has one, such as dp(clip=1, sigma=1) or user-dp(clip=1, sigma=1), or leave epsilon out"
FIXED = f"{NOTHING}: the noise comes from a fixed key"
"""What the log reports of a client whose noise anybody who has the app can draw."""


@dataclass(frozen=True)
class Limit:
    """The epsilon that a client may spend in a training, at this delta; None for no limit."""

    epsilon: float | None = None
    delta: float = 1e-5

    @staticmethod
    def of(epsilon: float | None, delta: float, training: str | None, key: Key | None) -> Limit:
        """Check what an app asks for: nothing counts without a training's name, or for noise that others can draw."""
        given = () if epsilon is None else (("epsilon", POSITIVE, epsilon),)
        problems = collect("privacy", (*given, ("delta", PROBABILITY, delta)))
        if epsilon is not None and training is None:
            what = "would be spent anew in every run, and who runs the server starts runs"
            problems.append(Problem("privacy.epsilon", what, 'name the training: training="lungs-2026"'))
        if epsilon is not None and key is not None:
            remedy = "leave the key out: noise then comes from the operating system"
            problems.append(Problem("privacy.epsilon", f"limits what has no epsilon ({FIXED})", remedy))
        refuse(problems)
        return Limit(epsilon, delta)

    def provable(self, privacy: Privacy, beside: str | None = None) -> None:
        """Refuse a limit of what nothing proves."""
        if self.epsilon is not None and (beside or not privacy.sound):
            said = f"{NOTHING}: {beside}" if beside else privacy.promise()
            raise fail("privacy.epsilon", f"limits what has no epsilon ({said})", _PROVES)


@dataclass(frozen=True)
class Charge:
    """What a client has spent once the next reply is made."""

    file: Path | None
    """Where it is counted; None where the training has no ledger, or the run belongs to none."""
    ledger: Ledger
    epsilon: Mapping[Unit, float]
    """At the limit's delta, of the units of which something is proven."""
    guarantee: str
    """The same in words, with what it assumes."""

    def keep(self) -> None:
        """Write it down; a reply may be made after that."""
        if self.file is not None:
            keep(self.file, self.ledger)

    def __str__(self) -> str:
        """Say it for a log."""
        if self.file is None:
            return f"privacy of this round alone: {self.guarantee}; nothing is kept across rounds and runs"
        rounds = self.ledger.rounds
        return f"privacy spent in {rounds} round{'s' if rounds > 1 else ''}: {self.guarantee}"


def charged(memory: Memory, client: Client, batch: Batch, limit: Limit, beside: str | None = None) -> Charge | None:
    """Count one more round, without writing it yet; None for a client that proves nothing.

    A round that would go beyond the limit is refused, and so is one that cannot be added to what was counted, and a
    limit without a ledger. `beside` names what voids the promise of this round: what else the reply holds, say.
    """
    privacy = examine(client, batch)
    limit.provable(privacy, beside)
    before = None if memory.ledger is None else read(memory.ledger)
    if limit.epsilon is not None and before is None:
        what = f"has no ledger to be counted in: {memory.ledger} is missing"
        raise fail("privacy.epsilon", what, f"make one, once for this training: {memory.to_create}")
    if before is None or not before.rounds:
        if beside or not privacy.sound:
            return None
        if before is not None and not memory.fresh:
            raise fail(str(memory.ledger), "counts no round, where rounds have been answered", LOST)
    now = [_spent(client, mechanism, place, batch, beside) for place, mechanism in enumerate(privacy.mechanisms)]
    earlier = before.spent if before else []
    refuse(list(_misfits(str(memory.ledger), earlier, now)))
    ledger = Ledger(rounds=1 + (before.rounds if before else 0), spent=_added([*earlier, *now]))
    epsilon, texts = accounted(ledger.spent, limit.delta)
    lost: list[Unit] = [*dict.fromkeys(mechanism.unit for mechanism in privacy.mechanisms)]
    lost = [unit for unit in lost if unit not in epsilon]
    why = {unit: privacy.void(unit) or beside or "a round of this training was sent without" for unit in lost}
    texts += [f"{NOTHING} of each {unit}: {why[unit]}" for unit in lost]
    _within(limit, {m.unit: epsilon.get(m.unit, math.inf) for m in privacy.sound}, ledger.rounds - 1)
    return Charge(memory.ledger if before else None, ledger, epsilon, "; ".join(texts))


def uncounted(memory: Memory) -> None:
    """Say that noise of a fixed key proves nothing; where a ledger counts, such a round would be missing in it."""
    if memory.ledger is not None and memory.ledger.exists():
        what = "puts noise that others can draw on a training whose privacy is counted"
        raise fail("key", what, f"leave the key or the training's name out: {memory.ledger} counts real noise")
    LOG.info("%s", FIXED)


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


def _spent(client: Client, mechanism: Mechanism, place: int, batch: Batch, beside: str | None) -> SpentNoise:
    """Say what one round sends of a mechanism."""
    training = released(client, mechanism, len(batch.targets), 1, delta=0.5)
    return SpentNoise(
        mechanism=place,
        unit=mechanism.unit,
        multiplier=0.0 if beside or mechanism.flaws else float(mechanism.multiplier),
        sampling=training.sampling,
        rate=float(training.rate),
        sums=training.steps,
        times=training.at_most or training.steps,
    )


def _misfits(file: str, before: Sequence[SpentNoise], now: Sequence[SpentNoise]) -> Iterator[Problem]:
    """Say why this round cannot be added to what was counted."""
    remedy = "keep defence and sampling through a training, or name another one: privacy spent in both adds up"
    kinds = [{(spent.mechanism, spent.unit) for spent in counted} for counted in (before, now)]
    if before and kinds[0] != kinds[1]:
        yield Problem(file, "counts other mechanisms than those of this client", remedy)
    theirs, ours = ({spent.sampling for spent in counted if spent.unit == "example"} for counted in (before, now))
    if theirs and ours and theirs != ours:
        what = f"counts sums of {min(theirs)} batches, and this round's are {min(ours)}: they mean other neighbours"
        yield Problem(file, what, remedy)


def _added(parts: Iterable[SpentNoise]) -> list[SpentNoise]:
    """Add up what is alike."""
    found: dict[tuple[object, ...], SpentNoise] = {}
    for part in parts:
        if (own := found.get(part.alike())) is not None:
            part = own.model_copy(update={"sums": own.sums + part.sums, "times": own.times + part.times})
        found[part.alike()] = part
    return list(found.values())
