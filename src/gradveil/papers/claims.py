"""What a paper claims, and whether our measurements reproduce it.

`printed/claims.toml` names for each claim the cells that it rests on. A claim is reproduced if all of its measured
cells agree with the paper, and all of its orders hold among our numbers.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from gradveil.papers.comparison import AGREES, DIFFERS, NOT_RUN, ComparedCell, Measured, compare
from gradveil.papers.study import Cell, CellPattern, Study

REPRODUCED, PARTLY = "reproduced", "partly"
"""Outcomes of a claim, in addition to `differs` and `not run`."""


class ClaimedOrder(BaseModel):
    """Two rows of a table of which one has the larger number, wherever both are measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str
    more: str
    less: str
    metric: str
    column: str | None = None


class Claim(BaseModel):
    """A claim of a paper."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    setting: str
    cells: list[CellPattern] = []
    """The printed numbers that it rests on."""
    orders: list[ClaimedOrder] = []
    """Orders that it states of values which are only drawn."""


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its outcome."""

    study: Study
    claim: Claim
    outcome: str
    basis: str
    """What was compared, in numbers."""

    @property
    def tables(self) -> list[str]:
        """The tables that it rests on."""
        return list(dict.fromkeys(one.table or "" for one in (*self.claim.cells, *self.claim.orders)))


def claims_of(key: str) -> list[Claim]:
    """Read the claims of a paper."""
    text = (files("gradveil.papers") / key / "printed" / "claims.toml").read_text("utf-8")
    return [Claim.model_validate(entry) for entry in tomllib.loads(text)["claims"]]


def judged_claims(study: Study, measured: Measured) -> list[JudgedClaim]:
    """Judge every claim of a paper by the measurements."""
    compared = [cell for name in study.tables for cell in compare(study, name, measured).cells]
    return [_judged(study, claim, compared) for claim in claims_of(study.key)]


def _judged(study: Study, claim: Claim, compared: Sequence[ComparedCell]) -> JudgedClaim:
    outcomes = [
        one.status
        for one in compared
        if any(pattern.covers(one.cell) for pattern in claim.cells) and study.measurement(one.cell)
    ]
    outcomes += [outcome for order in claim.orders for outcome in _ordered(order, compared)]
    counts = Counter(outcomes)
    judged = counts[AGREES] + counts[DIFFERS]
    outcome = NOT_RUN
    if judged:
        outcome = {judged: REPRODUCED, 0: DIFFERS}.get(counts[AGREES], PARTLY)
    parts = [f"{counts[AGREES]} of {judged} agree"] if judged else []
    parts += [f"{counts[NOT_RUN]} not run"] if counts[NOT_RUN] else []
    return JudgedClaim(study, claim, outcome, ", ".join(parts))


def _ordered(order: ClaimedOrder, compared: Sequence[ComparedCell]) -> list[str]:
    """Compare each number of the row that should have more with that of the other row."""
    known: dict[tuple[str, str], dict[str, ComparedCell]] = {}
    for one in compared:
        cell: Cell = one.cell
        same = (cell.table, cell.metric) == (order.table, order.metric) and order.column in (None, cell.column)
        if same and cell.row in (order.more, order.less):
            known.setdefault((cell.setting, cell.column), {})[cell.row] = one
    found = []
    for pair in known.values():
        if len(pair) == 2:
            more, less = (pair[row].ours for row in (order.more, order.less))
            found.append(NOT_RUN if more is None or less is None else AGREES if more > less else DIFFERS)
    return found
