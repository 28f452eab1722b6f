"""Attack budgets in iterations or seconds, and the chunks of attacks under way.

`auto` is a time for the whole run, shared evenly by its defended settings; attacks that set their own iterations are no
part of it.

A target-iteration is one iteration on one target client's restart, or one update that a learner simulates to learn
from. Seconds are processor time of one process, because a verdict must not depend on what else a machine does: the same
search on a busy one takes longer, and goes as far. (On a GPU they are seconds of the clock.) They are turned into
iterations (updates of a learner) by a short measurement before the attack, which is written down, so that a resumed run
spends the same. A search with few of them lowers its step size until its end, since it would never see a plateau.

How many rows are worked on at once is chosen for the machine as it is, and decides the last bits of the results. So it
is written before an attack starts, and an attack that was killed takes it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.rehearsal import iterations_within
from gradveil.attacks.learned import Learned
from gradveil.attacks.protocol import Attack
from gradveil.audit.audit_config import AUTO
from gradveil.core.errors import fail
from gradveil.core.private_files import read_json, write_private

AUTO_SECONDS = 180.0
"""Processor time of all attacks that share the budget `auto`, whatever the number of defences."""
_MEASURED, _SLOW = 10, 2.0
"""Iterations of the measurement; where one takes longer than so many seconds, it has few."""
_FEW, _TAUGHT = 3, 64
"""Few iterations, or updates of a learner; and those of a fast learner, which learns from 64 at once."""
_LEAST = 0.1
"""Share of a measurement that its iterations take at least, since clocks are coarse."""
_PLATEAUS = 4
"""A search with fewer iterations than so many plateaus take is on a schedule that ends with them."""
_FORM = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|h)?$")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """How much, of what."""

    amount: float
    unit: Literal["target-iterations", "seconds"]


def read_budget(text: str, settings: int = 1) -> Budget:
    """Read a budget of each defence; `auto` is shared by so many defended settings.

    >>> read_budget("64000"), read_budget("1.5m")
    (Budget(amount=64000.0, unit='target-iterations'), Budget(amount=90.0, unit='seconds'))
    >>> read_budget("auto", settings=4)
    Budget(amount=45.0, unit='seconds')
    """
    if text.strip() == AUTO:
        return Budget(AUTO_SECONDS / settings, "seconds")
    match = _FORM.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise fail("budget", f"is '{text}'", "give target-iterations (64000), or a time: 90s, 10m, 2h; or auto, none")
    number, unit = float(match[1]), match[2]
    return Budget(number * _SECONDS[unit], "seconds") if unit else Budget(number, "target-iterations")


def restarts_worth(attack: Inversion) -> float:
    """Count the restarts that an attack pays for, in whole budgets of one: halving pays for few.

    >>> restarts_worth(Inversion("a", restarts=8))
    8.0
    """
    if not attack.descent.halving or attack.restarts == 1:
        return float(attack.restarts)
    left, spent, before, budget = attack.restarts, 0.0, 0, 1024
    rungs = sorted(budget >> rung for rung in range(1, (attack.restarts - 1).bit_length() + 1))
    for end in (*rungs, budget):
        spent += left * (end - before) / budget
        left, before = (left + 1) // 2, end
    return spent


def spends(attack: Attack) -> bool:
    """Return whether an attack has iterations, or updates that it learns from, which a budget limits."""
    return isinstance(attack, Inversion | Learned)


def weight(attack: Attack, examples: int) -> float:
    """Return the part of a budget that an attack has, where a search has one.

    A network that learns to undo updates tells few examples apart: in batches of 8 it found none behind any defence.

    >>> weight(Learned(), 1), weight(Learned(), 8), weight(Inversion("a"), 8)
    (1.0, 0.125, 1.0)
    """
    return 1 / examples if isinstance(attack, Learned) else 1.0


@dataclass(frozen=True)
class BudgetShare:
    """Who shares the budget of a defence, and of what the attack has to do with it."""

    attackers: float
    """How many share it; those who need more or less than this attack count as more or less than one."""
    target_clients: int
    """Those attacked here."""
    whole: int
    """All target clients of the run."""
    lessons: int = 0
    """Updates that a learner simulates in an epoch, whatever the target clients."""
    searches: int = 1
    """How often it searches for one target, at most: once a round if it changes the model anew in every round."""
    noisy: bool = False
    """Whether noise is added to what is sent: rehearsals then try another length of the search too."""


def within(
    budget: Budget, attack: Attack, share: BudgetShare, time_of: Callable[[Attack], float], plans: Plans
) -> Attack:
    """Return the attack with as many iterations (updates of a learner) as its share of the budget allows.

    It has at most its own. `time_of` attacks once and returns the seconds of it, of a search those of its descent;
    `plans` keeps the result. An attack with neither stays as it is.
    """
    if not spends(attack):
        return attack
    amount = budget.amount / share.attackers
    timed = budget.unit == "seconds"
    seconds = amount * share.target_clients / share.whole
    if isinstance(attack, Inversion):
        worth = restarts_worth(attack)
        allowed = (
            _settled(plans, seconds / worth, _pace(attack, time_of))
            if timed
            else amount / (share.whole * worth * share.searches)
        )
        if attack.variants:
            allowed = iterations_within(allowed, share.target_clients, len(attack.variants), share.noisy, timed)
        limit = max(1, min(int(allowed), attack.descent.iterations))
        descent = replace(attack.descent, iterations=limit)
        return replace(attack, descent=_hurried(attack.descent, limit) if timed else descent)
    if isinstance(attack, Learned):
        a_pass, updates = min(share.lessons, attack.updates or share.lessons), int(amount)
        if timed:
            (updates,) = plans.settled("updates", lambda: (_updates_within(seconds, attack, a_pass, time_of),))
        if updates < a_pass:
            return replace(attack, epochs=1, updates=max(2, updates))
        return replace(attack, epochs=min(updates // a_pass, attack.epochs))
    return attack


def _hurried(descent: Descent, iterations: int) -> Descent:
    """Return a descent of so many iterations, on a schedule that ends with them if its plateaus hardly come.

    >>> _hurried(Descent(schedule=Plateau(400), iterations=4000), 1000).schedule
    Cosine(warmup=50)
    >>> _hurried(Descent(schedule=Plateau(400), iterations=4000), 3000).schedule
    Plateau(patience=400, factor=0.1)
    """
    few = isinstance(descent.schedule, Plateau) and iterations < _PLATEAUS * descent.schedule.patience
    schedule = Cosine() if few else descent.schedule
    return replace(descent, iterations=iterations, schedule=schedule)


def share_left(whole: Attack, afforded: Attack, lessons: int = 0) -> float | None:
    """Compute what share of its iterations, or of a learner's updates, a budget leaves an attack; None if all.

    A pass of a learner is over so many `lessons`.
    """
    if isinstance(whole, Inversion) and isinstance(afforded, Inversion):
        left = afforded.descent.iterations / whole.descent.iterations
    elif isinstance(whole, Learned) and isinstance(afforded, Learned):
        left = afforded.epochs / whole.epochs * (1 if afforded.updates is None else afforded.updates / lessons)
    else:
        return None
    return left if left < 1 else None


def _settled(plans: Plans, seconds: float, pace: Callable[[], float]) -> int:
    """Return how many steps of this many seconds each fit, as it was measured the first time."""
    (allowed,) = plans.settled("iterations", lambda: (max(1, int(seconds / pace())),))
    return allowed


def _pace(attack: Inversion, time_of: Callable[[Attack], float]) -> Callable[[], float]:
    def pace() -> float:
        one = replace(attack, variants=(), descent=replace(attack.descent, iterations=1, halving=False))
        # The first search of a shape also compares with the reference, and each has a beginning that is no iteration.
        count = _FEW if time_of(one) > _SLOW else _MEASURED
        short = replace(one, descent=replace(one.descent, iterations=1 + count))
        whole, beginning = time_of(short), time_of(one)
        return max(whole - beginning, _LEAST * whole) / (count * attack.restarts)

    return pace


def _updates_within(seconds: float, attack: Learned, a_pass: int, time_of: Callable[[Attack], float]) -> int:
    """Return how many updates a learner simulates and learns from in this time, by what a few of them take."""
    one = replace(attack, epochs=1, updates=_FEW)
    # The first attack on a shape also compares with the reference, and each has a beginning that is no update.
    first = time_of(one)
    more = max(1, min(_FEW if first > _SLOW else _TAUGHT, a_pass - _FEW))
    whole, beginning = time_of(replace(one, updates=_FEW + more)), time_of(one)
    # The measurement counts: of a short time it takes much.
    left = max(0.0, seconds - first - whole - beginning)
    return int(left * more / max(whole - beginning, _LEAST * whole))


Plan = tuple[int, ...]
_NAMES = {"rows": "", "iterations": "-iterations", "updates": "-updates", "variants": "-variants"}
_REMEDY = "give the command of the audit again: the attack is then planned again"


def _forget(_name: str, _plan: Plan) -> None:
    """Keep nothing."""


@dataclass(frozen=True)
class Plans:
    """What has been settled for one share of a trial, and who writes down what is settled now."""

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
    """Read what was settled for these target clients of a trial, whose plans lie in `folder`."""
    files = {name: _file(folder, numbers, name) for name in _NAMES}
    return {name: tuple(read_json(file, _REMEDY)) for name, file in files.items() if file.is_file()}


def write_plan(folder: Path, numbers: range, name: str, plan: Plan) -> None:
    """Write what was settled for these target clients of a trial."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    write_private(_file(folder, numbers, name), json.dumps(plan).encode())


def _file(folder: Path, numbers: range, name: str) -> Path:
    return folder / f"{numbers.start}-{numbers.stop - 1}{_NAMES[name]}.json"
