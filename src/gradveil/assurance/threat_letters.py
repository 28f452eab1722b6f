"""Published letters of threat models, derived from what the attack of a trial was granted.

The letters are those of Carletti et al. (USENIX Security 2025): A to E watch and know more and more, F to H change the
model that they send. The name of an attack decides nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gradveil.audit.result_rows import Row

Letter = Literal["A", "B", "C", "D", "E", "F", "G", "H"]
"""A threat model of the survey."""


_STATISTICS = "statistics."
_LABELS, _RANGE, _PUBLIC = "targets:", "bounds:", "public:"
"""Beginnings of grants: the labels of the batch, the range of its values, public examples."""


class ThreatModel(NamedTuple):
    """Name of an attacker, and what it knows or does."""

    name: str
    knows: str


THREAT_MODELS: dict[Letter, ThreatModel] = {
    "A": ThreatModel("Eavesdropper", "sees updates only"),
    "B": ThreatModel("Informed eavesdropper", "also knows architecture, weights and loss"),
    "C": ThreatModel("Parameter-aware eavesdropper", "also knows local steps, learning rate and batch"),
    "D": ThreatModel("Data-enhanced eavesdropper", "also has auxiliary data"),
    "E": ThreatModel("Statistical-informed eavesdropper", "also knows the clients' data distribution"),
    "F": ThreatModel("Active manipulator", "changes the model that it sends"),
    "G": ThreatModel("Data-enhanced manipulator", "changes the model, with auxiliary data"),
    "H": ThreatModel("Active client manipulator", "also selects clients or inserts its own"),
}
"""All letters, the weakest attacker first."""

NOT_RUN: dict[Letter, str] = {
    "A": "every attack on examples knows the model; restored labels are under inference",
    "B": "every attack was granted more, or none was run",
    "C": "clients send one gradient, or every attack was granted more",
    "D": "no attack had auxiliary data and nothing of a client's own",
    "E": "no attack was granted labels, ranges or statistics of a client's data",
    "F": "no malicious server was run, or none fits",
    "G": "no malicious server had auxiliary data",
    "H": "Gradveil has no attack that selects or inserts clients",
}
"""Why a letter was not run: nothing follows for it."""


def letter_of(row: Row) -> Letter | None:
    """Derive the letter of a trial; None for attacks that know client secrets, which are beyond H.

    The true labels of a batch, the range of its values and its statistics are facts of the client's data (E); a verdict
    never counts those with statistics. Levels and ranges of a table's columns are auxiliary data (D): public rows show
    them. A server that changes the model and is given labels stays F or G, which `labels_given` has to be printed with.
    """
    if row.secrets:
        return "E" if all(str(secret).startswith(_STATISTICS) for secret in row.secrets) else None
    granted = [str(grant) for grant in row.info.get("grants", ())]
    of_client = labels_given(row) or any(grant.startswith(_RANGE) for grant in granted)
    has_data = any(grant.startswith(_PUBLIC) for grant in granted) or bool(row.info.get("columns"))
    if row.planted:
        return "G" if has_data else "F"
    if of_client:
        return "E"
    if has_data:
        return "D"
    return "C" if row.local else "B"


def labels_given(row: Row) -> bool:
    """Report whether the attack was given the true labels of the target's examples."""
    return any(str(grant).startswith(_LABELS) for grant in row.info.get("grants", ()))
