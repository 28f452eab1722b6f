"""The undefended control: the same attacks on a few clients without a defence, where no such client was asked for.

A low rate against a defence means something only if the attack works without it. The control shows that, on few clients
and with otherwise equal settings. Recorded updates have none: they are what they are.
"""

from __future__ import annotations

from gradveil.audit.adaptive import attacks_against
from gradveil.audit.attacker import undefended
from gradveil.audit.config import RunConfig

UNDEFENDED = "none"
"""The defence of a control."""
CLIENTS = 8
"""Clients that a control attacks at most."""


def has_control(config: RunConfig) -> bool:
    """Decide whether a run adds a control by itself."""
    return config.control and config.observed is None and not any(undefended(text) for text in config.defences)


def control_attacks(config: RunConfig) -> list[str]:
    """List the attacks of a control: every attack that meets a defence of the run.

    Knowledge of a defence makes no difference without one: an adaptive attacker is then a non-adaptive one.
    """
    if not has_control(config):
        return []
    return list(dict.fromkeys(text for defence in config.defences for text in attacks_against(config.attacks, defence)))


def first_met(config: RunConfig, attack: str) -> str:
    """Return the first defence that an attack meets: its control has the budget that it has there.

    The first one stays the same when a resumed run has more defences.
    """
    return next(text for text in config.defences if attack in attacks_against(config.attacks, text))


def target_clients(clients: int, control: bool) -> int:
    """Count the clients that a trial attacks, of so many in the run.

    >>> target_clients(32, False), target_clients(32, True), target_clients(2, True)
    (32, 8, 2)
    """
    return min(clients, CLIENTS) if control else clients
