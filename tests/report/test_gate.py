"""The gate: which cells count, what is above it, and what stands in the way of passing."""

from __future__ import annotations

from typing import Any

import pytest

from gradveil.audit.rows import Row
from gradveil.audit.store import Cell, Run
from gradveil.audit.verdict import verdicts
from gradveil.report.gate import Gate, gate
from tests.report.cells import BARE, row

TOLD = {"grants": ["targets: the true labels", "send.noise.w: its true value"]}


def judged(limit: float, *rows: Row, planned: int = 0) -> Gate:
    cells = [Cell({**each.info, "cell": f"cell-{place}"}, each.cell.records) for place, each in enumerate(rows)]
    return gate(Run({"cells": [f"cell-{place}" for place in range(planned or len(rows))]}, cells), limit)


def diverged(won: int, lost: int, of: int = 32, **change: Any) -> Row:
    made = row(won, of, **change)
    for record in made.cell.records[of - lost :]:
        record["status"] = "diverged"
    return made


def test_the_undefended_update_is_a_control() -> None:
    found = judged(0.1, BARE, row(3))
    assert found.passed
    assert [one.defence for one in found.counted] == ["dgp"]
    found = judged(0.05, BARE, row(3), row(4, attack="dlg"), row(0, attack="gi"))
    assert not found.passed
    assert [(one.attack, one.recovered) for one in found.above] == [("dlg", 4), ("ig", 3)]


def test_where_nothing_is_defended_the_undefended_update_counts() -> None:
    assert [one.recovered for one in judged(0.99, BARE).above] == [32]
    assert judged(1, BARE).passed
    assert [one.recovered for one in judged(0.5, row(0, defence="none + none"), BARE).above] == [32]


def test_who_was_told_secrets_never_counts() -> None:
    found = judged(0.1, BARE, row(32, attack="wiig", **TOLD), row(1))
    assert found.passed
    assert [one.attack for one in found.counted] == ["ig"]
    for won in (32, 0):
        alone = judged(0.1, BARE, row(won, attack="wiig", **TOLD))
        assert not alone.passed
        assert not alone.above
        assert alone.obstacles == (
            "everybody who attacked dgp (gradient) was told the client's secrets, which gives upper bounds only: "
            "add --attack adaptive",
        )
    bare = judged(0.1, row(0, defence="none", attack="gi", **TOLD))
    assert "add an attack that is told none" in bare.obstacles[0]


def test_the_gate_counts_what_the_verdicts_are_over() -> None:
    rows = [BARE, row(1), row(2, belief="naive"), row(9, **TOLD), row(3, defence="dp", seed=1), row(4, trained=10)]
    over = [one for verdict in verdicts(rows) if not verdict.undefended for one in verdict.judged]
    assert sorted(one.recovered for one in over) == [1, 2, 3, 4]
    assert [one.recovered for one in judged(0.5, *rows).counted] == [4, 3, 2, 1]


@pytest.mark.parametrize("defence", ["dgp", "none"])
def test_a_failed_cell_does_not_pass(defence: str) -> None:
    failed = row(0, defence=defence)
    failed = Row(0, Cell({**failed.info, "failed": "out of memory"}, []))
    found = judged(0.5, BARE, row(1), failed)
    assert not found.passed
    assert found.obstacles == (f"ig against {defence}, gradient, seed 0 failed: out of memory",)
    assert [one.recovered for one in judged(0.01, BARE, row(1), failed).above] == [1]


def test_a_failed_defence_does_not_make_the_control_count() -> None:
    failed = Row(0, Cell({**row(0).info, "failed": "out of memory"}, []))
    found = judged(0.5, BARE, failed)
    assert not found.counted
    assert not found.passed


def test_what_is_not_done_does_not_pass() -> None:
    found = judged(0.5, BARE, row(1), planned=4)
    assert not found.passed
    assert found.obstacles == ("2 of 4 cells are not done",)


def test_what_diverged_counts_as_if_it_had_succeeded() -> None:
    assert judged(0.1, BARE, diverged(1, 2)).passed
    found = judged(0.1, BARE, diverged(1, 3, trained=5))
    assert not found.above
    assert found.obstacles == (
        "ig against dgp, gradient, seed 0, after 5 rounds: 3 of 32 victims ended in divergence, and had they been "
        "recovered, the rate would be 12.5%",
    )
    above = judged(0.01, BARE, diverged(1, 3))
    assert above.above
    assert not above.obstacles
    assert judged(0.1, diverged(0, 32, defence="none"), row(0)).passed, "of a control nothing is asked"


def test_recorded_updates_count_whatever_is_believed_of_them() -> None:
    seen = {"observed": [], "recorded_defence": None}
    found = judged(0.5, row(32, defence="none", **seen), row(0, **seen))
    assert [(one.defence, one.recovered) for one in found.above] == [("none", 32)]


def test_without_the_truth_nothing_passes() -> None:
    blind = row(0, observed=[], unscored="no score")
    for record in blind.cell.records:
        del record["per_image"]
    found = judged(1, blind)
    assert not found.passed
    assert found.obstacles == ("ig against dgp, gradient, seed 0 has no score",)


def test_a_low_rate_that_shows_little_is_named() -> None:
    found = judged(0.5, BARE, row(0), row(0, defence="dp", belief="naive"), row(32, defence="clip"))
    assert found.unproven == ("dp (not tested)",)
