"""The privacy budget of a Flower client: each round is counted in its ledger before the reply leaves.

A counted round stays counted even if its reply never arrives: the epsilon may be too large, never too small. The engine
reports the same epsilon for a client that answers as often. The ledger (`gradveil.federated.privacy_ledger`) belongs to
a named training, and its owner creates it. Without a ledger, each round is accounted for alone.
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
"""Log message for a client whose noise can be drawn again by anyone who has the app."""


@dataclass(frozen=True)
class Limit:
    """Largest epsilon that a client may spend in a training, at this delta; None for no limit."""

    epsilon: float | None = None
    delta: float = 1e-5

    @staticmethod
    def of(epsilon: float | None, delta: float, training: str | None, key: Key | None) -> Limit:
        """Check an app's limit: it needs a named training, and noise that others cannot draw."""
        checks = () if epsilon is None else (("epsilon", POSITIVE, epsilon),)
        problems = collect("privacy", (*checks, ("delta", PROBABILITY, delta)))
        if epsilon is not None and training is None:
            problem = "would start again with every run, and the server's operator starts runs"
            problems.append(Problem("privacy.epsilon", problem, 'name the training: training="lungs-2026"'))
        if epsilon is not None and key is not None:
            remedy = "leave the key out: noise then comes from the operating system"
            problems.append(Problem("privacy.epsilon", f"limits a client that has no epsilon ({FIXED})", remedy))
        refuse(problems)
        return Limit(epsilon, delta)

    def provable(self, privacy: Privacy, unprotected: str | None = None) -> None:
        """Refuse a limit for a client without a formal guarantee."""
        if self.epsilon is not None and (unprotected or not privacy.sound):
            reason = f"{NOTHING}: {unprotected}" if unprotected else privacy.promise()
            raise fail("privacy.epsilon", f"limits a client that has no epsilon ({reason})", _PROVES)


@dataclass(frozen=True)
class Charge:
    """Privacy that a client has spent, the next reply included."""

    file: Path | None
    """The ledger's file; None without a ledger or a named training."""
    ledger: Ledger
    epsilon: Mapping[Unit, float]
    """Epsilon at the limit's delta, for each unit with a formal guarantee."""
    guarantee: str
    """The guarantee in words, with its assumptions."""

    def keep(self) -> None:
        """Write the ledger; do this before the reply is computed."""
        if self.file is not None:
            keep(self.file, self.ledger)

    def __str__(self) -> str:
        """Describe the charge for a log."""
        if self.file is None:
            return f"privacy of this round alone: {self.guarantee}; nothing is kept across rounds and runs"
        rounds = self.ledger.rounds
        return f"privacy spent in {rounds} round{'s' if rounds > 1 else ''}: {self.guarantee}"


def charged(
    memory: Memory, client: Client, batch: Batch, limit: Limit, unprotected: str | None = None
) -> Charge | None:
    """Count one more round, without writing it yet; None for a client without a formal guarantee.

    A round that would exceed the limit is refused, and so is one that cannot be added to the counted rounds, and a
    limit without a ledger. `unprotected` names a part of the reply that voids the guarantee of this round.
    """
    privacy = examine(client, batch)
    limit.provable(privacy, unprotected)
    before = None if memory.ledger is None else read(memory.ledger)
    if limit.epsilon is not None and before is None:
        problem = f"has no ledger to be counted in: {memory.ledger} is missing"
        raise fail("privacy.epsilon", problem, f"create one, once for this training: {memory.to_create}")
    if before is None or not before.rounds:
        if unprotected or not privacy.sound:
            return None
        if before is not None and not memory.fresh:
            raise fail(str(memory.ledger), "counts no round, but rounds have been answered", LOST)
    added = [_spent(client, mechanism, i, batch, unprotected) for i, mechanism in enumerate(privacy.mechanisms)]
    earlier = before.spent if before else []
    refuse(list(_misfits(str(memory.ledger), earlier, added)))
    ledger = Ledger(rounds=1 + (before.rounds if before else 0), spent=_added([*earlier, *added]))
    epsilon, texts = accounted(ledger.spent, limit.delta)
    lost: list[Unit] = [*dict.fromkeys(mechanism.unit for mechanism in privacy.mechanisms)]
    lost = [unit for unit in lost if unit not in epsilon]
    why = {unit: privacy.void(unit) or unprotected or "a round of this training was sent without" for unit in lost}
    texts += [f"{NOTHING} of each {unit}: {why[unit]}" for unit in lost]
    _within(limit, {m.unit: epsilon.get(m.unit, math.inf) for m in privacy.sound}, ledger.rounds - 1)
    return Charge(memory.ledger if before else None, ledger, epsilon, "; ".join(texts))


def check_fixed_key(memory: Memory) -> None:
    """Log that noise of a fixed key has no guarantee; refuse it where a ledger counts the training's privacy."""
    if memory.ledger is not None and memory.ledger.exists():
        problem = "puts noise that others can draw on a training whose privacy is counted"
        raise fail("key", problem, f"leave the key or the training's name out: {memory.ledger} counts real noise")
    LOG.info("%s", FIXED)


def _within(limit: Limit, epsilon: Mapping[Unit, float], rounds: int) -> None:
    """Refuse a round that would exceed the limit for some unit."""
    if limit.epsilon is None:
        return
    answered = f"{rounds} round{'' if rounds == 1 else 's'} answered"
    remedy = "end the training here: a larger epsilon, or another training on the same data, weakens the guarantee"
    refuse(
        [
            Problem(
                "privacy.epsilon", f"would be {value:.4g} for each {unit} ({answered}), above {limit.epsilon:g}", remedy
            )
            for unit, value in epsilon.items()
            if value > limit.epsilon
        ]
    )


def _spent(client: Client, mechanism: Mechanism, index: int, batch: Batch, unprotected: str | None) -> SpentNoise:
    """Count the noisy sums that one round sends of a mechanism."""
    training = released(client, mechanism, len(batch.targets), 1, delta=0.5)
    return SpentNoise(
        mechanism=index,
        unit=mechanism.unit,
        multiplier=0.0 if unprotected or mechanism.flaws else float(mechanism.multiplier),
        sampling=training.sampling,
        rate=float(training.rate),
        sums=training.steps,
        times=training.at_most or training.steps,
    )


def _misfits(file: str, before: Sequence[SpentNoise], added: Sequence[SpentNoise]) -> Iterator[Problem]:
    """Report why this round cannot be added to the counted rounds."""
    remedy = "keep defence and sampling through a training, or name another training: privacy spent in both adds up"
    kinds = [{(spent.mechanism, spent.unit) for spent in counted} for counted in (before, added)]
    if before and kinds[0] != kinds[1]:
        yield Problem(file, "counts other mechanisms than this client's", remedy)
    old, new = ({spent.sampling for spent in counted if spent.unit == "example"} for counted in (before, added))
    if old and new and old != new:
        problem = f"counts sums of {min(old)} batches, and this round's are {min(new)}: "
        yield Problem(file, f"{problem}their neighbouring data sets differ", remedy)


def _added(parts: Iterable[SpentNoise]) -> list[SpentNoise]:
    """Add up the counts of equal noise."""
    totals: dict[tuple[object, ...], SpentNoise] = {}
    for part in parts:
        if (total := totals.get(part.alike())) is not None:
            part = total.model_copy(update={"sums": total.sums + part.sums, "times": total.times + part.times})
        totals[part.alike()] = part
    return list(totals.values())
