"""Tests of an attack's successes against an attacker that only guesses, and the baseline and risk of the headline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from gradveil.audit.rows import Row
from gradveil.core.noise import Key
from gradveil.metrics import Risk, risk, wilson
from gradveil.metrics.chance import bootstrap_maximum, holm, poisson_binomial, upper_tail

LEVEL = 0.05
"""The share of defences that only guesses were tried on and that may be called a leak."""


class Criterion(NamedTuple):
    """One way in which an image can leak: the field of an image's score, and that of its chance by a guess."""

    flag: str
    expected: str
    control: str


CRITERIA = {
    "recovered": Criterion("success", "expected", "recovered"),
    "identified": Criterion("identified", "expected", "identified"),
    "recovered as trained on": Criterion("success_transformed", "expected_transformed", "recovered"),
    "identified as trained on": Criterion("identified_transformed", "expected_transformed", "identified"),
}
"""Criteria of a leak: of the private images, and of what a batch defence made of them, where one was used."""


@dataclass(frozen=True)
class Test:
    """A one-sided exact test of the number of images hit against an attacker that only guesses."""

    attack: str
    """The attack's canonical text."""
    number: int
    """The trial's place in the run."""
    criterion: str
    observed: int
    images: int
    expected: float
    """The number of images that the best guess hits on average."""
    p: float
    adjusted: float
    """The p-value after Holm's correction for all attackers and criteria of the verdict."""

    @property
    def leaks(self) -> bool:
        """Whether guessing is rejected at 5%."""
        return self.adjusted <= LEVEL


def tests_of(rows: Sequence[Row]) -> tuple[Test, ...]:
    """Test each trial by each criterion that it has, corrected for all of them (Holm)."""
    found = [test for row in rows for name in CRITERIA if (test := _test(row, name)) is not None]
    adjusted = holm([test.p for test in found])
    return tuple(replace(test, adjusted=value) for test, value in zip(found, adjusted, strict=True))


def leaks(row: Row) -> bool:
    """Report whether one trial alone hits more images than guessing explains, by any criterion."""
    return any(test.leaks for test in tests_of([row]))


def expected_of(row: Row, criterion: str) -> float | None:
    """Compute how many images of a trial the best guess hits on average; None where that is not known."""
    test = _test(row, criterion)
    return None if test is None else test.expected


def _test(row: Row, name: str) -> Test | None:
    criterion = CRITERIA[name]
    images = [scores for _, _, scores in row.scores() if scores.get(criterion.flag) is not None]
    chances = [_chance(row, scores, criterion) for scores in images]
    known = [chance for chance in chances if chance is not None]
    if not images or len(known) < len(images):
        return None
    observed = sum(bool(scores[criterion.flag]) for scores in images)
    p = upper_tail(poisson_binomial(known), observed)
    return Test(row.attack, row.number, name, observed, len(images), sum(known), p, p)


def _chance(row: Row, scores: Mapping[str, Any], criterion: Criterion) -> float | None:
    """Look up the probability that a guess hits one image."""
    expected = scores.get(criterion.expected) or {}
    if criterion.control in expected:
        return float(expected[criterion.control])
    if criterion.flag == "success":
        return max(row.floor or 0.0, row.control("wrong_victim") or 0.0)
    return row.floor_of("identified") if criterion.flag == "identified" else None


def baseline(row: Row) -> float:
    """Compute the rate of recovered and identified images that the best guess is expected to reach."""
    each = [_headline(row, scores) for _, _, scores in row.scores()]
    return fmean(each) if each else 0.0


def _headline(row: Row, scores: Mapping[str, Any]) -> float:
    expected = scores.get("expected") or {}
    if "identifiable" in expected:
        return float(expected["identifiable"])
    chances = [_chance(row, scores, CRITERIA[name]) for name in ("recovered", "identified")]
    return min((chance for chance in chances if chance is not None), default=0.0)


def risk_of(row: Row) -> Risk:
    """Compute the risk of the headline over the larger of baseline and mismatch control."""
    return risk(row.identifiable, row.images, max(baseline(row), row.control("wrong_victim", "identifiable") or 0.0))


def interval_of(best: Row, judged: Sequence[Row]) -> tuple[float, float]:
    """Compute the 95% interval of the headline: Wilson's, or wider where it is the maximum over several attackers.

    Several attackers on the same target clients: those are drawn with replacement, and the maximum is taken in each
    draw.
    """
    low, high = wilson(best.identifiable, best.images)
    same = [row for row in judged if row.singled_out.keys() == best.singled_out.keys() and row.seed == best.seed]
    if len(same) < 2:
        return low, high
    clients = sorted({client for client, _ in best.singled_out})
    sizes = [sum(client == one for client, _ in best.singled_out) for one in clients]
    counts = [
        [sum(hit for (client, _), hit in row.singled_out.items() if client == one) for one in clients] for row in same
    ]
    drawn = bootstrap_maximum(counts, sizes, Key(0, ("verdict", "bootstrap")))
    return min(low, drawn[0]), max(high, drawn[1])
