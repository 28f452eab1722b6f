"""What an attacker may spend: victim-iterations or seconds for each defence, shared by all who attack it.

A victim-iteration is one iteration on one victim's restart. Seconds are working time of one process; they are turned
into iterations by a short measurement before the attack, which is written down, so that a resumed run spends the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gradveil.attacks.base import Attack
from gradveil.attacks.inversion import Inversion
from gradveil.audit.plans import Plans
from gradveil.core.errors import fail

_MEASURED = 10
"""Iterations of the measurement."""
_FORM = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|h)?$")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """How much, of what."""

    amount: float
    unit: Literal["victim-iterations", "seconds"]


def read_budget(text: str) -> Budget:
    """Read a budget.

    >>> read_budget("64000"), read_budget("1.5m")
    (Budget(amount=64000.0, unit='victim-iterations'), Budget(amount=90.0, unit='seconds'))
    """
    match = _FORM.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise fail("budget", f"is '{text}'", "give victim-iterations (64000), or a time: 90s, 10m, 2h")
    number, unit = float(match[1]), match[2]
    return Budget(number * _SECONDS[unit], "seconds") if unit else Budget(number, "victim-iterations")


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


def within(
    budget: Budget,
    attack: Attack,
    attackers: int,
    victims: int,
    whole: int,
    run: Callable[[Attack], object],
    plans: Plans,
) -> Attack:
    """Return the attack with as many iterations as its share of the budget allows, at most its own.

    `attackers` share the budget of a defence; `victims` of the run's `whole` are attacked here. `run` attacks once, for
    a measurement; `plans` keeps its result. An attack without iterations stays as it is.
    """
    if not isinstance(attack, Inversion):
        return attack
    share = budget.amount / attackers
    worth = restarts_worth(attack)
    if budget.unit == "victim-iterations":
        allowed = int(share / (whole * worth))
    else:
        seconds = share * victims / whole

        def measure() -> tuple[int, ...]:
            short = replace(attack, descent=replace(attack.descent, iterations=_MEASURED, halving=False))
            run(short)  # the first run of a shape also compares with the reference
            began = time.perf_counter()
            run(short)
            each = (time.perf_counter() - began) / (_MEASURED * attack.restarts)
            return (max(1, int(seconds / (each * worth))),)

        (allowed,) = plans.settled("iterations", measure)
    limit = max(1, min(allowed, attack.descent.iterations))
    return replace(attack, descent=replace(attack.descent, iterations=limit))
