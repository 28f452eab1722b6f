"""Tests of an attack's successes against an attacker that only guesses, and the baseline and risk of the headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from gradveil.audit.rows import Row
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.metrics import Risk, risk, wilson
from gradveil.metrics.chance import added, beta_binomial, bootstrap_maximum, holm, matches, upper_tail

LEVEL = 0.05
"""The probability, at most, of calling attackers that only guess a leak, per defence and setting."""


class Criterion(NamedTuple):
    """One way in which an image can leak: the field of an image's score, and those of its chance by a guess."""

    flag: str
    expected: str
    control: str
    size: str
    """The number of images behind the chance."""


CRITERIA = {
    "recovered": Criterion("success", "expected", "recovered", "public"),
    "recovered almost exactly": Criterion("exact", "expected", "exact", "public_exact"),
    "identified": Criterion("identified", "expected", "identified", "gallery"),
    "recovered as trained on": Criterion("success_transformed", "expected_transformed", "recovered", "public"),
    "identified as trained on": Criterion("identified_transformed", "expected_transformed", "identified", "gallery"),
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
    def hits_half(self) -> bool:
        """Whether at least half of the images were recovered."""
        return self.criterion.startswith("recovered") and 2 * self.observed >= self.images

    @property
    def baseline(self) -> float:
        """The share of images that the best guess is expected to hit."""
        return self.expected / self.images

    def plain(self) -> dict[str, Any]:
        """Return it as one plain object, its p-value corrected for all attackers and criteria."""
        counts = {"criterion": self.criterion, "observed": self.observed, "images": self.images}
        return counts | {"baseline": self.baseline, "p": self.adjusted}

    @property
    def leaks(self) -> bool:
        """Whether guessing is rejected at 5%."""
        return self.adjusted <= LEVEL


def tests_by_trial(rows: Sequence[Row]) -> list[tuple[Test, ...]]:
    """Test each trial by each criterion that it has, corrected for all of them (Holm)."""
    found = [[test for name in CRITERIA if (test := _test(row, name)) is not None] for row in rows]
    adjusted = iter(holm([test.p for tests in found for test in tests]))
    return [tuple(replace(test, adjusted=next(adjusted)) for test in tests) for tests in found]


def tests_of(rows: Sequence[Row]) -> tuple[Test, ...]:
    """Test all trials of a verdict together."""
    return tuple(test for tests in tests_by_trial(rows) for test in tests)


def leaks(row: Row) -> bool:
    """Report whether one trial alone hits more images than guessing explains, by any criterion."""
    return any(test.leaks for test in tests_of([row]))


def identifies(row: Row) -> bool:
    """Report whether one trial alone identifies more images than guessing explains."""
    return any(test.leaks and test.criterion.startswith("identified") for test in tests_of([row]))


def expected_of(row: Row, criterion: str) -> float | None:
    """Compute how many images of a trial the best guess hits on average; None where that is not known."""
    test = _test(row, criterion)
    return None if test is None else test.expected


def _test(row: Row, name: str) -> Test | None:
    """Test one trial by one criterion; None where the criterion or its chance is not there."""
    criterion = CRITERIA[name]
    images = [image for image in _images(row) if image.scores.get(criterion.flag) is not None]
    chances = [_chance(row, image.scores, criterion) for image in images]
    known = [chance for chance in chances if chance is not None]
    if not images or len(known) < len(images):
        return None
    counts = _identified if criterion.control == "identified" else _recovered
    mass = added(counts(images, known))
    observed = sum(bool(image.scores[criterion.flag]) for image in images)
    expected = sum(count * share for count, share in enumerate(mass))
    p = upper_tail(mass, observed)
    return Test(row.attack, row.number, name, observed, len(images), expected, p, p)


class _Image(NamedTuple):
    client: int
    label: int
    scores: Mapping[str, Any]


class _Chance(NamedTuple):
    share: float
    images: int | None
    """The number of images behind the share; None where it is known exactly, or an upper bound."""


def _images(row: Row) -> Iterator[_Image]:
    for record in row.cell.records:
        scores = record.get("per_image", ())
        labels = record.get("label") or [0] * len(scores)
        for label, each in zip(labels, scores, strict=True):
            yield _Image(int(record["victim"]), int(label), each)


def _chance(row: Row, scores: Mapping[str, Any], criterion: Criterion) -> _Chance | None:
    """Look up the probability that a guess hits one image."""
    expected = scores.get(criterion.expected) or {}
    if criterion.control in expected:
        return _Chance(float(expected[criterion.control]), expected.get(criterion.size) or None)
    if expected or criterion.expected != "expected" or criterion.control == "exact":
        return None
    # An earlier version recorded one draw of each guess.
    floor = row.floor if criterion.control == "recovered" else row.floor_of("identified")
    return None if floor is None else _Chance(floor, None)


def _recovered(images: Sequence[_Image], chances: Sequence[_Chance]) -> Iterator[tuple[float, ...]]:
    """Yield the distributions of the number of images that guesses pass for, one per class.

    Images of a class share one chance, which is known from the auxiliary data only.
    """
    groups = Counter((image.label, chance) for image, chance in zip(images, chances, strict=True))
    for (_, chance), count in groups.items():
        yield beta_binomial(count, chance.share, chance.images)


def _identified(images: Sequence[_Image], chances: Sequence[_Chance]) -> Iterator[tuple[float, ...]]:
    """Yield the distributions of the number of images that guesses single out, one per class.

    Given its class, an image is as likely to be any of the gallery's. Different guesses at one class point at different
    images of it, which exclude each other or come together: the counts are no sum of independent ones.
    """
    groups: dict[tuple[int, int | None], Counter[int]] = {}
    for image, chance in zip(images, chances, strict=True):
        groups.setdefault((image.label, chance.images), Counter())[image.client] += 1
    for (_, gallery), clients in groups.items():
        if gallery is not None and clients.total() <= gallery:
            yield matches(tuple(sorted(clients.values())), gallery)
    rest = Counter(
        chance.share
        for image, chance in zip(images, chances, strict=True)
        if chance.images is None or groups[image.label, chance.images].total() > chance.images
    )
    yield from (beta_binomial(count, share, None) for share, count in rest.items())


def baseline(row: Row) -> float:
    """Compute the rate of recovered and identified images that the best guess is expected to reach."""
    each = [_headline(row, scores) for _, _, scores in row.scores()]
    return fmean(each) if each else 0.0


def _headline(row: Row, scores: Mapping[str, Any]) -> float:
    expected = scores.get("expected") or {}
    if "identifiable" in expected:
        return float(expected["identifiable"])
    chances = [_chance(row, scores, CRITERIA[name]) for name in ("recovered", "identified")]
    return min((chance.share for chance in chances if chance is not None), default=0.0)


def risk_of(row: Row) -> Risk:
    """Compute the risk of the headline over the larger of baseline and mismatch control."""
    return risk(row.identifiable, row.images, max(baseline(row), row.control("wrong_victim", "identifiable") or 0.0))


def interval_of(best: Row, judged: Sequence[Row]) -> tuple[float, float]:
    """Compute the 95% interval of the headline: Wilson's, or wider where it is the maximum over several attackers.

    The lower end of the highest of k rates is Wilson's at 1 - 0.05 / k: the highest rate is partly luck. Clients are
    also drawn with replacement, the same ones for all attackers, with the maximum taken in each draw (bootstrap); the
    wider of the two counts.
    """
    same = [row for row in judged if row.singled_out.keys() == best.singled_out.keys()]
    low, high = wilson(best.identifiable, best.images)
    if len(same) < 2:
        return low, high
    clients = sorted({client for client, _ in best.singled_out})
    sizes = Counter(client for client, _ in best.singled_out)
    hits = [Counter(client for (client, _), hit in row.singled_out.items() if hit) for row in same]
    counts = [[one[client] for client in clients] for one in hits]
    drawn = bootstrap_maximum(counts, [sizes[client] for client in clients], Key(0, (Stream.BOOTSTRAP,)))
    careful, _ = wilson(best.identifiable, best.images, 1 - LEVEL / len(same))
    return min(careful, drawn[0]), max(high, drawn[1])
