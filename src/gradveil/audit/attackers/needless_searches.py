"""Searches that a verdict does not need: of defences that closed forms break, in runs whose attacks nobody named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradveil.audit.attack_selection import TrialAddress, undefended
from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import NEEDLESS, Trial
from gradveil.audit.verdict import verdicts

Place = tuple[int, int | None]
"""Client and round of a training: the setting of an address."""


def needless(
    left: Sequence[TrialAddress], finished: Sequence[Trial], addresses: Mapping[str, TrialAddress]
) -> dict[str, str]:
    """Return for each of these trials that is not needed the reason, from the trials that are finished.

    A search without a defence, or of a control, shows that the search works: it is needed until every defence is
    broken.
    """
    rows = [Row(place, trial) for place, trial in enumerate(finished) if trial.failed is None]
    places: dict[object, Place] = {}
    for row in rows:
        address = addresses[row.info["trial"]]
        places[row.setting] = address.client, address.trained
    broken = {
        (*places[verdict.setting], verdict.defence): verdict.best.attack
        for verdict in verdicts(rows)
        if verdict.level == "broken"
    }
    reasons: dict[str, str] = {}
    for trial in left:
        place = trial.client, trial.trained
        asked = {a.defence for a in addresses.values() if (a.client, a.trained) == place and not a.control}
        protects = {name for name in asked if not undefended(name)}
        vouches = trial.control or undefended(trial.defence)
        wanted = protects | (set() if trial.control else {trial.defence}) if vouches else {trial.defence}
        if wanted and all((*place, name) in broken for name in wanted):
            by = list(dict.fromkeys(broken[*place, name] for name in sorted(wanted)))
            reasons[trial.id] = f"{NEEDLESS}, since {' and '.join(by)} already {'break' if by[1:] else 'breaks'} it"
    return reasons
