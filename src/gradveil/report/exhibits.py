"""The rows of pictures: one per defence, at its strongest attack, with the same private images under each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.verdict import Verdict
from gradveil.core.formatting import interval, percent
from gradveil.report.identical_trials import identical, named
from gradveil.report.pictures import Picture, TrialPictures

BAND = 8
"""Private images next to each other."""
ROWS = 3
"""Defences on the first screen, at most."""


@dataclass(frozen=True)
class Exhibit:
    """A defence with the pictures of its strongest attack."""

    verdict: Verdict
    row: Row
    """The trial of the pictures: the one that the verdict quotes, unless that attacked other images."""
    attack: str
    pictures: TrialPictures | None

    @property
    def name(self) -> str:
        """The name of the defence."""
        return self.verdict.best.defence_name

    @property
    def count(self) -> str:
        """The headline as a count."""
        return f"{self.verdict.identifiable} of {self.verdict.images}"

    @property
    def ends(self) -> str:
        """The 95% interval of the headline."""
        return interval(*self.verdict.interval)

    @property
    def rate(self) -> str:
        """The headline as a percentage."""
        return percent(self.verdict.rate)

    @property
    def other_seed(self) -> int | None:
        """The seed of the pictures, where the verdict quotes another one."""
        return None if self.row.seed == self.verdict.best.seed else self.row.seed


@dataclass(frozen=True)
class Hall:
    """Exhibits of the same private images."""

    setting: TrialSetting
    truths: tuple[Picture, ...]
    images: int
    """How many images were attacked; the page may show fewer."""
    exhibits: tuple[Exhibit, ...]

    @property
    def is_partial(self) -> bool:
        """Whether the page shows fewer images than were attacked."""
        return len(self.truths) < self.images

    @property
    def bands(self) -> list[range]:
        """The positions of the images, a band each."""
        return [range(start, min(start + BAND, len(self.truths))) for start in range(0, len(self.truths), BAND)]


def exhibits(
    judged: Sequence[Verdict], pictures: Mapping[int, TrialPictures], names: Mapping[str, str]
) -> list[Exhibit]:
    """Choose a trial for each verdict: of equal private images where possible, so that pictures can be compared."""
    digests = Counter(pictures[v.best.number].truth_digest for v in judged if v.best.number in pictures)
    usual = digests.most_common(1)[0][0] if digests else ""
    chosen = list[Exhibit]()
    for verdict in judged:
        same = (r for r in verdict.judged if r.number in pictures and pictures[r.number].truth_digest == usual)
        mine = pictures.get(verdict.best.number)
        row = verdict.best if mine and mine.truth_digest == usual else next(same, verdict.best)
        group = next(group for group in identical(verdict.rows, pictures) if row in group)
        chosen.append(Exhibit(verdict, row, named(group, names), pictures.get(row.number)))
    return chosen


def halls(shown: Sequence[Exhibit]) -> list[Hall]:
    """Group exhibits with pictures by setting and private images."""
    groups: dict[tuple[TrialSetting, str], list[Exhibit]] = {}
    for exhibit in shown:
        if exhibit.pictures is not None:
            groups.setdefault((exhibit.verdict.setting, exhibit.pictures.truth_digest), []).append(exhibit)
    return [
        Hall(setting, first.truths, first.images, tuple(group))
        for (setting, _), group in groups.items()
        if (first := group[0].pictures) is not None
    ]


def leading_setting(judged: Sequence[Verdict]) -> TrialSetting | None:
    """Choose the setting of the first screen: the one that leaks most without a defence, or else with one."""
    worst = max(judged, key=lambda v: (v.undefended, v.rate), default=None)
    return worst and worst.setting


def most_telling(shown: Sequence[Exhibit], recommended: str | None = None) -> list[Exhibit]:
    """Choose the rows of the first screen, by leak: no defence, the worst broken one, the recommended or best one.

    Without a recommendation, the best is the cheapest of those with the lowest rate, not broken ones first.
    """
    if len(shown) <= ROWS:
        return [*shown]
    bare = [each for each in shown if each.verdict.undefended][:1]
    defended = [each for each in shown if not each.verdict.undefended]
    wanted = [each for each in defended if each.verdict.defence == recommended]
    best = wanted[0] if wanted else min(defended, key=_merit)
    worst = next(each for each in defended if each is not best)
    chosen = [*bare, worst, best]
    return [each for each in shown if any(each is one for one in chosen)]


def _merit(exhibit: Exhibit) -> tuple[bool, float, tuple[float, float]]:
    verdict = exhibit.verdict
    return verdict.level != "not broken", verdict.rate, verdict.price.order
