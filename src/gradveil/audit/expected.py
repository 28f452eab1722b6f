"""How much work each cell of a run is expected to be, for the time that is left."""

from __future__ import annotations

from statistics import fmean

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.base import Attack
from gradveil.attacks.inversion import Inversion
from gradveil.attacks.planted import Planting
from gradveil.attacks.rgap import Recursive
from gradveil.audit.budget import read_budget, restarts_worth
from gradveil.audit.cell import cells, sharers_of
from gradveil.audit.config import ClientConfig, RunConfig
from gradveil.audit.scene import Scene


def expected_work(scene: Scene) -> dict[str, float]:
    """Say of every cell how many gradients of an image it takes, at most: iterations x restarts x examples x steps.

    Victims are the same everywhere, but for a control's, who are few.

    A closed form counts as nothing, and an attack of which nobody knows it counts as
    the mean of the others.
    """
    config = scene.config
    known: dict[str, float | None] = {}
    for cell in cells(config):
        rows = _row_iterations(scene.attacks[cell.attack], config, sharers_of(scene, cell))
        share = cell.clients(config.victims) / config.victims
        known[cell.id] = None if rows is None else rows * pass_cost(config.client[cell.client]) * share
        if cell.meeting in scene.unfit:
            known[cell.id] = 0.0
    usual = fmean(told) if (told := [work for work in known.values() if work]) else 1.0
    return {name: usual if work is None else work for name, work in known.items()}


def _row_iterations(attack: Attack, config: RunConfig, attackers: int) -> float | None:
    """Count the iterations of all restarts of one victim; a budget in time is taken to be spent, whatever it buys."""
    if isinstance(attack, Analytic | Planting | Recursive):
        return 0.0
    if not isinstance(attack, Inversion):
        return None
    own = attack.descent.iterations * restarts_worth(attack)
    if config.budget is None:
        return own
    budget = read_budget(config.budget)
    if budget.unit == "seconds":
        return 1.0
    return min(own, budget.amount / attackers / config.victims)


def pass_cost(client: ClientConfig) -> float:
    """Count the examples whose gradients make one update.

    >>> pass_cost(ClientConfig(batch=8)), pass_cost(ClientConfig(batch=8, local={"lr": 0.1, "steps": 3, "batch": 2}))
    (8, 6)
    >>> pass_cost(ClientConfig(batch=8, members=2, local={"lr": 0.1, "epochs": 3}))
    48
    """
    if client.local is None:
        return client.examples
    if client.local.epochs is not None:
        return client.examples * client.local.epochs
    return client.members * (client.local.batch or client.batch) * (client.local.steps or 1)
