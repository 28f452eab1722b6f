"""A gate for continuous integration: whether a run shows that every rate lies within a limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

from gradveil.audit.attack_check import unused_rounds
from gradveil.audit.baselines import Test, expected_of
from gradveil.audit.findings import Findings, Gap, findings
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.run_directory import Run
from gradveil.audit.verdict import ENOUGH, LEVELS, Verdict
from gradveil.core.formatting import percent, plural
from gradveil.metrics import wilson


class Accepted(StrEnum):
    """A way to weaken the gate."""

    FEW_IMAGES = "few-images"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not-tested"

    @property
    def meaning(self) -> str:
        """What passes then."""
        return {
            Accepted.FEW_IMAGES: "the measured rate counts, not the upper end of its 95% interval",
            Accepted.INCONCLUSIVE: "settings whose attacks show nothing pass by their rate",
            Accepted.NOT_TESTED: "settings that no adaptive attack was run on pass by their rate",
        }[self]


@dataclass(frozen=True)
class CountedSetting:
    """A setting that the gate counts, with the trial that hit most of its images."""

    verdict: Verdict
    row: Row
    hits: int
    """The images that count."""
    criterion: str = "recovered"
    """How they were hit: recovered; or by another criterion, where that is a leak and hits more."""
    parts: Test | None = None
    """The test of parts of examples, such as tokens, that counts instead: where a larger share of them leaks."""

    @property
    def of(self) -> int:
        """The number of images, or of parts."""
        return self.parts.images if self.parts else self.row.images

    @property
    def count(self) -> str:
        """What was hit, in words."""
        return self.parts.count if self.parts else f"{self.hits} of {self.row.counted(self.of)} {self.criterion}"

    @property
    def rate(self) -> float:
        """The share of images hit."""
        return self.hits / self.of

    @property
    def ends(self) -> tuple[float, float]:
        """Wilson's 95% interval of the rate; parts of an example are hit together, and count as one image."""
        return wilson(math.ceil(self.rate * self.row.images - 1e-9), self.row.images)

    @property
    def upper(self) -> float:
        """The upper end of the interval."""
        return self.ends[1]

    @property
    def leak(self) -> Test | None:
        """The test that rejects guessing most clearly, where the images that count are no leak; otherwise None."""
        leaking = [test for test in self.verdict.tests if test.leaks]
        if any(test.number == self.row.number and test.criterion == self.criterion for test in leaking):
            return None
        return min(leaking, key=lambda test: (test.number != self.row.number, test.adjusted), default=None)

    @property
    def baseline(self) -> float | None:
        """The share of images that the best guess is expected to hit; None where that is not known."""
        if self.parts:
            return self.parts.baseline
        expected = expected_of(self.row, self.criterion)
        return None if expected is None else expected / self.row.images


SHOWN, NOT_SHOWN, ABOVE = 0, 1, 3
"""Exit codes: every setting is within the limit, the run does not show it, and a setting is above it."""


class Obstacle(NamedTuple):
    """A reason why the run does not show that a setting lies within the limit."""

    text: str
    """The reason, and how to go on."""
    setting: TrialSetting | None = None
    """The setting that it is about; None for the whole run."""
    defence: str = ""
    """The defence that it is about."""


@dataclass(frozen=True)
class Gate:
    """A run held against a limit."""

    limit: float
    counted: tuple[CountedSetting, ...]
    """The defended settings, the highest rate first; undefended ones where nothing else was attacked."""
    open: tuple[Obstacle, ...]
    """Every obstacle, with its setting."""
    accepted: tuple[Accepted, ...] = ()

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why the run does not show that all rates lie within the limit, each once, with how to go on."""
        return tuple(dict.fromkeys(each.text for each in self.open))

    @property
    def above(self) -> tuple[CountedSetting, ...]:
        """The settings whose rate is above the limit."""
        return tuple(one for one in self.counted if one.rate > self.limit)

    @property
    def passed(self) -> bool:
        """Whether every setting is shown to lie within the limit."""
        return bool(self.counted) and not self.above and not self.open

    @property
    def exit_code(self) -> int:
        """The exit code of `--fail-above`."""
        return SHOWN if self.passed else ABOVE if self.above else NOT_SHOWN


def gate(run: Run, limit: float, accepted: Sequence[Accepted] = ()) -> Gate:
    """Hold a run against a limit on the share of images that an attacker recovers.

    Recovered images count, identifiable or not: the larger number is the cautious one. Where another share leaks, of
    identified images or of tokens of texts, and is larger, it counts. The undefended client, and the
    control, count only where nothing else was attacked; recorded updates always do. Attacks that know client secrets
    never count.
    """
    found = findings(run.trials)
    judged = _that_count(found)
    verdicts = [each for each in judged if isinstance(each, Verdict)]
    counted = [_most(verdict) for verdict in verdicts if verdict.best.attacker != "informed"]
    gaps = [each for each in judged if isinstance(each, Gap)]
    named = {(gap.setting, gap.defence) for gap in gaps}
    below = [one for one in counted if one.rate <= limit]
    obstacles = [
        *map(Obstacle, _missing(run)),
        *(_about(row, failure(row)) for row in found.broken if (row.setting, row.defence) not in named),
        *(_about(gap, _no_score(gap)) for gap in gaps),
        *(_about(each, _undecided(each)) for each in verdicts if _is_open(each, accepted)),
        *(_about(one.row, _too_few(one, limit)) for one in below if limit < _reach(one.rate, one.row, accepted)),
        *(_about(one.row, _few_clients(one)) for one in below if _of_few_clients(one.row, accepted)),
        *(_about(one.row, line) for one in counted for line in _diverged(one.verdict, limit, accepted)),
    ]
    counted.sort(key=lambda one: one.rate, reverse=True)
    return Gate(limit, tuple(counted), tuple(obstacles), tuple(accepted))


def _about(each: Row | Verdict | Gap, text: str) -> Obstacle:
    return Obstacle(text, each.setting, each.defence)


def images_needed(limit: float) -> int | None:
    """Count the images of which none may be recovered for Wilson's upper end to reach a limit; None for 0.

    >>> images_needed(0.1), images_needed(0.5), images_needed(1), images_needed(0)
    (35, 4, 1, None)
    """
    if limit <= 0:
        return None
    z = NormalDist().inv_cdf(0.975)
    return max(1, math.ceil(z * z * (1 - limit) / limit - 1e-9))


def called(row: Row) -> str:
    """Name a trial in a sentence."""
    info = row.info
    rounds = info.get("trained")
    when = "" if rounds is None else f", after {plural(rounds, 'round')}"
    return f"{row.attack} against {row.defence}, {info['client']}, seed {row.seed}{when}"


def _that_count(found: Findings) -> list[Verdict | Gap]:
    """Choose the settings that count. Recorded updates are what they are, whatever is believed of them."""
    every = found.entries
    recorded = any("observed" in row.info for row in found.rows)
    return [each for each in every if recorded or not each.undefended] or every


def _most(verdict: Verdict) -> CountedSetting:
    """Find the judged trial with the highest rate, whatever the seed."""
    return max((_counted(verdict, row) for row in verdict.judged), key=lambda one: one.rate)


def _counted(verdict: Verdict, row: Row) -> CountedSetting:
    """Count the images of a trial that were recovered, or hit by another criterion where that beats its baseline."""
    hits = [CountedSetting(verdict, row, row.recovered)]
    for test in verdict.tests:
        if test.leaks and test.number == row.number:
            hits.append(CountedSetting(verdict, row, test.observed, test.criterion, test if test.of_parts else None))
    return max(hits, key=lambda hit: hit.rate)


def _lost(row: Row) -> int:
    """Count the images that an attack which diverged did not recover."""
    return sum(
        not image["success"]
        for record in row.trial.records
        if record["status"] == "diverged"
        for image in record.get("per_image", ())
    )


def _reach(rate: float, row: Row, accepted: Sequence[Accepted]) -> float:
    """Compute how high a rate may be: the upper end of its interval, or itself where that is accepted.

    Exact copies of an image count as one: what recovers one of them recovers all.
    """
    if Accepted.FEW_IMAGES in accepted:
        return rate
    return wilson(math.ceil(rate * row.distinct - 1e-9), row.distinct)[1]


def _of_few_clients(row: Row, accepted: Sequence[Accepted]) -> bool:
    """Report whether fewer clients than it takes hold all images: what a defence drew once hides or shows a batch."""
    return Accepted.FEW_IMAGES not in accepted and len(row.trial.records) < ENOUGH


def _few_clients(one: CountedSetting) -> str:
    images, clients = one.row.counted(one.row.images), plural(len(one.row.trial.records), "client")
    return (
        f"{called(one.row)}: {images} of only {clients}, whose updates were each defended once. "
        f"Attack at least {ENOUGH} clients: --target-clients {ENOUGH}."
    )


def _missing(run: Run) -> Iterator[str]:
    there: set[str] = {str(trial.info.get("trial")) for trial in run.trials}
    planned = run.info["trials"]
    if missing := [name for name in planned if name not in there]:
        counted = f"{len(missing)} of {plural(len(planned), 'trial')} {'is' if len(missing) == 1 else 'are'} not done"
        yield f"{counted}: give the same command again."


def failure(row: Row) -> str:
    """Name a failed trial, and its error, in a sentence."""
    return f"{called(row)} failed: {row.trial.failed}."


def _no_score(gap: Gap) -> str:
    return f"{_named(gap)} is {LEVELS[gap.level][0].lower()}. {' '.join(gap.reasons)}"


def _named(each: Verdict | Gap) -> str:
    rounds = each.setting.trained
    when = "" if rounds is None else f", after {plural(rounds, 'round')}"
    return f"{each.defence} ({each.setting.client}{when})"


def _is_open(verdict: Verdict, accepted: Sequence[Accepted]) -> bool:
    """Whether a verdict decides nothing, and that is not accepted; an upper bound alone has no rate to pass by."""
    if verdict.best.attacker == "informed":
        return True
    return verdict.level in ("inconclusive", "not tested") and verdict.level.replace(" ", "-") not in accepted


def _undecided(verdict: Verdict) -> str:
    told = f"{_named(verdict)} is {LEVELS[verdict.level][0].lower()}."
    doubts = f" {verdict.best.attack}: {'; '.join(verdict.doubts)}." if verdict.doubts else ""
    return f"{told} {' '.join(verdict.reasons)}{doubts} {_remedy(verdict)}"


def _remedy(verdict: Verdict) -> str:
    if verdict.level == "not tested":
        return "Add an attack that knows no client secrets." if verdict.undefended else "Add --attack adaptive."
    if verdict.best.distinct < ENOUGH:
        return f"Attack at least {ENOUGH} images: --target-clients {ENOUGH}."
    if unused_rounds(verdict.best):
        return "Use every round that was watched."
    if verdict.health.state == "under-optimised":
        return "Give the attacks more iterations or restarts."
    return "Use an attack that works on undefended clients, and let the control show it."


def _too_few(one: CountedSetting, limit: float) -> str:
    """Explain that the images are too few to show a limit."""
    needed = images_needed(limit)
    enough = "No number of images shows a rate of 0."
    if needed is not None:
        enough = f"With none recovered, {needed} images show {percent(limit)}: --target-clients {needed}."
    return f"{called(one.row)}: {one.count}, and the 95% interval reaches {percent(one.upper)}. {enough}"


def _diverged(verdict: Verdict, limit: float, accepted: Sequence[Accepted]) -> Iterator[str]:
    """Take what diverged for recovered: a run that broke shows no protection."""
    for row in verdict.judged if verdict.best.attacker != "informed" else ():
        rate, lost = _counted(verdict, row).rate, _lost(row)
        worst = _reach(min(1.0, rate + lost / row.images), row, accepted)
        if lost and _reach(rate, row, accepted) <= limit < worst:
            count = row.statuses["diverged"]
            yield (
                f"{called(row)}: {count} of {plural(len(row.trial.records), 'target')} ended in divergence, and had "
                f"they been recovered, the rate would reach {percent(worst)}. Use other attacks, or smaller steps."
            )
