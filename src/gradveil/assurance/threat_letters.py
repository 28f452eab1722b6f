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
    "B": "no attack on updates alone was run",
    "C": "clients send one gradient, or no attack was run",
    "D": "no attack had auxiliary data",
    "E": "no attack was granted statistics of a client's data",
    "F": "no malicious server was run, or none fits",
    "G": "no malicious server had auxiliary data",
    "H": "Gradveil has no attack that selects or inserts clients",
}
"""Why a letter was not run: nothing follows for it."""


def letter_of(row: Row) -> Letter | None:
    """Derive the letter of a trial; None for attacks that know client secrets, which are beyond H.

    The statistics of a batch are those of the client's data (E); a verdict never counts them.
    """
    if row.secrets:
        return "E" if all(str(secret).startswith(_STATISTICS) for secret in row.secrets) else None
    has_data = any(str(grant).startswith("public:") for grant in row.info.get("grants", ()))
    if row.planted:
        return "G" if has_data else "F"
    if has_data:
        return "D"
    return "C" if row.local else "B"
