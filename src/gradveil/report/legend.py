"""The legend of an audit's page: definitions of the labels that occur on it, and of no others."""

from __future__ import annotations

from collections.abc import Sequence

from gradveil.audit.attack_check import STATES, examine
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.findings import Findings
from gradveil.audit.result_rows import BASELINES, Row, window_note
from gradveil.audit.verdict import LEVELS
from gradveil.core.formatting import number
from gradveil.core.space import ExampleWords
from gradveil.report.identical_trials import KINDS

Terms = list[tuple[str, str]]
"""Labels with their definitions."""


def legend(result: Findings, thresholds: Sequence[float]) -> list[tuple[str, Terms]]:
    """Group the definitions: verdicts, outcomes and controls, attack checks, attackers."""
    rows = [row for row in result.finished if row.trial.unscored is None]
    levels = {entry.level for entry in result.entries}
    states = {examine(row, result.finished).state for row in result.finished}
    kinds = {row.attacker for row in result.finished} - {"undefended"}
    words = result.finished[0].words if result.finished else ExampleWords()
    groups: list[tuple[str, Terms]] = [
        ("Verdicts", [(label, f"{meaning}.") for level, (label, meaning) in LEVELS.items() if level in levels]),
        ("Scores", _scores(thresholds, rows[0]) if rows else []),
        (
            "Attack checks",
            [(label, f"{words.told(told)}.") for state, (label, told) in STATES.items() if state in states],
        ),
        ("Attackers", [(KINDS[kind], ": ".join(ATTACKERS[kind]) + ".") for kind in KINDS if kind in kinds]),
    ]
    return [(title, terms) for title, terms in groups if terms]


def _scores(thresholds: Sequence[float], row: Row) -> Terms:
    words = row.words
    limit = " or ".join(number(each) for each in thresholds)
    guesses = words.told(", ".join(meaning for _, meaning in BASELINES.values()))
    return [
        (
            "Recovered",
            f"the SSIM of a reconstruction to its private image is above {limit}{window_note(row.info)}."
            if words.drawn
            else " or ".join(words.recovered(each) for each in thresholds) + ".",
        ),
        (
            "Identified",
            f"of all private {words.plural}, its own is the nearest to the reconstruction ({words.nearest}).",
        ),
        ("Identifiable", "recovered and identified. The interval is at 95% confidence."),
        (
            "Baseline",
            f"the share of identifiable {words.plural} that the best guess, which sees no update, is expected to "
            f"reach. Guesses are {guesses}.",
        ),
        (
            "Mismatch control",
            f"the share recovered when reconstructions are scored against another client's {words.plural}.",
        ),
        (
            "Risk over baseline",
            "the rate beyond baseline and mismatch control, as a share of the largest possible gain.",
        ),
    ]
