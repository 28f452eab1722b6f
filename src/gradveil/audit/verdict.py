"""The verdict on each defence in each setting: its level, the reasons for it, its numbers and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradveil.audit.attack_check import PASSED, Health, coincidence, examine, guesses, unused_rounds
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.attackers.attacker_table import is_unknown
from gradveil.audit.attackers.unknown_defences import basis, missing_evidence
from gradveil.audit.baselines import Test, baseline, expected_of, interval_of, risk_of, tests_by_trial
from gradveil.audit.result_rows import Row, TrialSetting, short_names
from gradveil.audit.run_directory import NEEDLESS
from gradveil.audit.threat_model import unknown_to_all
from gradveil.core.formatting import interval, listing, number, percent, plural, size
from gradveil.metrics import Risk, wilson


@dataclass(frozen=True)
class Price:
    """The cost of one update."""

    sent: float | None
    """Bytes of the defended update."""
    plain: float | None
    """Bytes of the same client's update without the defence; None where the run does not tell."""
    distance: float | None
    """How far the update moved, relative to its length without noise, clipping and pruning."""
    own: bool
    """The defence changes the model: the distance is to the changed model's own update, its noise switched off."""

    @property
    def share(self) -> float | None:
        """The bytes as a share of those without the defence."""
        return self.sent / self.plain if self.sent is not None and self.plain else None

    @property
    def order(self) -> tuple[float, float]:
        """Sort by bytes, then by distance; what is not known is dear."""
        sent, distance = (math.inf if value is None else float(value) for value in (self.sent, self.distance))
        return sent, distance

    def detail(self) -> str:
        """Say what the bytes are to be held against."""
        told = []
        if self.share is not None:
            told.append(f"{percent(self.share)} of the {size(self.plain)} without a defence")
        elif self.sent is not None:
            told.append("this run has no client without a defence to compare with")
        if self.distance is not None:
            noise = ", by the noise in the changed model" if self.own else ""
            told.append(f"update moved by {number(self.distance)}{noise}")
        return " · ".join(told)


def price(row: Row, rows: Sequence[Row]) -> Price:
    """Compare a defended client with the undefended one of the same setting and seed, who was sent the same model.

    Where the run has none, a defence that leaves the model alone is held against its own update, every entry sent.
    """
    bare = [r for r in rows if r.undefended and (r.setting, r.seed) == (row.setting, row.seed)]
    # Blocks of the same words take other bytes: most of the gradient is zero where each row is one bin.
    bare = [r for r in bare if (r.attack == row.attack if row.planted else not r.planted)]
    dense = None if "model" in row.changes else row.info.get("bytes_dense")
    plain = bare[0].info.get("bytes_sent") if bare else dense
    return Price(row.info.get("bytes_sent"), plain, row.info.get("distance"), "model" in row.changes)


Level = Literal["broken", "leaks", "not broken", "inconclusive", "not tested"]
"""The levels of a verdict; `LEVELS` has the words."""

LEVELS: dict[Level, tuple[str, str]] = {
    "broken": (
        "Broken",
        "the update leaks, and at least half of the examples are identifiable, or recovered where that is the leak",
    ),
    "leaks": (
        "Leaks",
        "an attacker recovers or identifies more examples than guessing explains, or more tokens of texts",
    ),
    "not broken": (
        "Not broken",
        "no leak was found by an adaptive attack that passed the attack check, on at least 8 examples",
    ),
    "inconclusive": ("Inconclusive", "no leak was found, but the attacks do not show that there is none"),
    "not tested": ("Not tested", "no leak was found, and no adaptive attack was run"),
}
"""Label and meaning of every level, the worst first."""

ENOUGH = 8
"""Fewer images than this never show that a defence is not broken."""

UNKNOWN = (
    "The baseline of recovery is unknown, because the run has no auxiliary data: recovery is not tested, and the "
    "mismatch control stands in for the baseline in the risk."
)

WHERE = "recovered where that is the leak"
RARE = "there are fewer than two public images of a class, so that a guess is taken to pass for all of them"
"""Why recovery cannot be tested for images of a rare class, or of a batch with one."""

_RANK: list[Level] = ["broken", "leaks", "inconclusive", "not tested", "not broken"]


@dataclass(frozen=True)
class Union:
    """The images that at least one attacker recovers: an upper bound, since no attacker knows which result is right."""

    recovered: int
    images: int
    attackers: int
    low: float
    high: float
    noun: str = "image"

    def sentence(self) -> str:
        """Return it as a sentence."""
        return (
            f"at least one of the {self.attackers} attackers recovers {self.recovered} of "
            f"{plural(self.images, self.noun)} ({percent(self.recovered / self.images)}, 95% CI "
            f"{interval(self.low, self.high)}). Only the ground truth shows which one to trust."
        )


@dataclass(frozen=True, repr=False)
class Verdict:
    """The finding on one defence in one setting."""

    setting: TrialSetting
    defence: str
    """The defence's canonical text."""
    level: Level
    reasons: tuple[str, ...]
    """Why it is this level, in sentences."""
    best: Row
    """The trial that is quoted: the strongest attacker that knows no client secrets, on the worst seed."""
    rows: tuple[Row, ...]
    """All trials on this defence: those that are judged, the strongest first, then the upper bounds."""
    seeds: tuple[tuple[int, Row], ...]
    """The strongest eligible trial of each seed; seeds repeat the same target clients and are never added up."""
    tests: tuple[Test, ...]
    """The tests of all judged trials against guessing, corrected for their number."""
    interval: tuple[float, float]
    """The 95% interval of the rate of identifiable images."""
    baseline: float
    """The rate of identifiable images that the best guess is expected to reach."""
    risk: Risk
    """The rate beyond baseline and mismatch control, as a share of what was left to gain."""
    health: Health
    """The attack check of the quoted trial."""
    passed: tuple[str, ...]
    """The adaptive attacks that passed the attack check, and used every round that was watched."""
    basis: tuple[str, ...]
    """What shows that attacks of the user's own undo a defence that Gradveil does not know; in the reasons too."""
    sentence: str
    notes: tuple[str, ...]
    """What the number does not show; to be printed next to the sentence."""
    warning: str
    """What has to be done before the number means anything; empty where nothing is missing."""
    union: Union | None
    price: Price
    """What the defence costs, on the quoted seed: with the honest model, if a trial attacked that."""

    def __repr__(self) -> str:
        """Name the defence, its level and its counts in a line."""
        return f"Verdict({self.defence!r}, {self.level!r}, {self.identifiable} of {self.images} identifiable)"

    @property
    def images(self) -> int:
        """The number of images that the quoted trial attacked."""
        return self.best.images

    @property
    def recovered(self) -> int:
        """The number of images that the quoted trial recovered."""
        return self.best.recovered

    @property
    def identified(self) -> int:
        """The number of images that the quoted trial identified."""
        return self.best.identified

    @property
    def identifiable(self) -> int:
        """The headline: the number of images that the quoted trial recovered and identified."""
        return self.best.identifiable

    @property
    def rate(self) -> float:
        """The headline as a share of the images."""
        return self.identifiable / self.images

    @property
    def leak(self) -> Test | None:
        """The test of the quoted trial that rejects guessing most clearly; None where none does."""
        mine = [test for test in self.tests if test.number == self.best.number and test.leaks]
        return min(mine, key=lambda test: (test.adjusted, -test.observed), default=None)

    @property
    def leaked(self) -> str:
        """The count that made it a leak, where that is another number than the headline's; otherwise empty."""
        test = self.leak
        return "" if test is None or (test.observed == self.identifiable and not test.of_parts) else test.count

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why a low rate may come from a broken attack."""
        return self.health.doubts

    @property
    def limited(self) -> bool:
        """Whether "not broken" holds within a budget: it stopped an attack before the iterations that it has itself."""
        return self.level == "not broken" and any(row.budget_share is not None for row in self.judged)

    @property
    def undefended(self) -> bool:
        """Whether there is no defence to judge."""
        return self.best.undefended

    @property
    def judged(self) -> tuple[Row, ...]:
        """The trials that the verdict is over: no upper bounds, unless there is nothing else."""
        return eligible(self.rows)


def eligible(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Choose the trials that a verdict is over: those of attackers that know no client secrets.

    Where no other was run, upper bounds are quoted, and the verdict is "not tested".
    """
    return tuple(row for row in rows if row.attacker != "informed") or tuple(rows)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Judge every defence in every setting: settings in the run's order, the worst defence first.

    A control vouches for attacks, and is not judged itself. Of the rows without examples only those count whose attack
    does not apply: behind a defence that Gradveil does not know, they say that nothing was left out.
    """
    settings = list(dict.fromkeys(row.setting for row in rows if row.images))
    found = []
    for setting in settings:
        here = [row for row in rows if row.setting == setting and row.images]
        unfit = [row for row in rows if row.setting == setting and row.trial.unfit and not _needless(row)]
        asked = dict.fromkeys(row.defence for row in here if not row.is_control)
        judged = [_judge(setting, name, here, unfit) for name in asked]
        found += sorted(judged, key=_order)
    return found


def _needless(row: Row) -> bool:
    """Report whether a trial was left out because others break the defence, and not because its attack is unfit."""
    return str(row.trial.failed).startswith(NEEDLESS)


def _order(verdict: Verdict) -> tuple[bool, int, float, float, float]:
    best = verdict.best
    rank = _RANK.index(verdict.level)
    return not verdict.undefended, rank, -verdict.rate, -best.asr, -(best.headline or 0)


def strength(row: Row) -> tuple[float, bool, float]:
    """Order attackers: by success rate; of equal ones an adaptive attacker comes first, then the higher mean SSIM."""
    mean = row.headline
    return row.asr, row.attacker == "adaptive", -1.0 if mean is None else mean


def _judge(setting: TrialSetting, defence: str, here: Sequence[Row], unfit: Sequence[Row]) -> Verdict:
    rows = [row for row in here if row.defence == defence and not row.is_control]
    tested = [row for row in rows if row.attacker != "informed"]
    by_trial = tests_by_trial(tested)
    found = {id(row): tests for row, tests in zip(tested, by_trial, strict=True)}

    def shows(row: Row) -> tuple[int, float, tuple[float, bool, float]]:
        return _weight(row, found.get(id(row), ())), row.identifiable / row.images, strength(row)

    mine = sorted(sorted(rows, key=shows, reverse=True), key=lambda row: row.attacker == "informed")
    judged = eligible(mine)
    strongest = [
        (seed, max((r for r in judged if r.seed == seed), key=shows)) for seed in sorted({r.seed for r in judged})
    ]
    best = max((row for _, row in strongest), key=shows)
    tests = tuple(test for each in by_trial for test in each)
    vouching = [row for row in _adaptive(judged) if _passed(row, here) and not unused_rounds(row)]
    level, reasons = _level(judged, here, unfit, tests, max(map(_weight, tested, by_trial), default=0))
    rests = tuple(basis(vouching, here, unfit)) if level == "not broken" and is_unknown(defence) else ()
    reasons = (*reasons, *rests)
    if expected_of(best, "recovered") is None:
        reasons = (*reasons, UNKNOWN)
    if rare := sum((scores.get("expected") or {}).get("public") == 0 for _, _, scores in best.scores()):
        count = f"{rare} of {best.counted(best.images)}"
        reasons = (*reasons, f"{count} cannot be tested for recovery: {RARE}.")
    return Verdict(
        setting=setting,
        defence=defence,
        level=level,
        reasons=reasons,
        best=best,
        rows=tuple(mine),
        seeds=tuple(strongest),
        tests=tests,
        interval=interval_of(best, judged),
        baseline=baseline(best),
        risk=risk_of(best),
        health=examine(best, here),
        passed=tuple(dict.fromkeys(row.attack for row in vouching)),
        basis=rests,
        sentence=_sentence(best, judged, len(strongest), found.get(id(best), ())),
        notes=tuple(_notes(best, mine, strongest)),
        warning=unknown_to_all(mine),
        union=_union([row for row in judged if row.seed == best.seed]),
        price=price(next((row for row in mine if row.seed == best.seed and not row.planted), best), here),
    )


def _weight(row: Row, tests: Sequence[Test]) -> Literal[0, 1, 2]:
    """Weigh a trial by its tests: 1 for a leak, 2 for one that breaks the defence.

    At least half of the images are then identifiable, or were recovered (as private images, or as a batch defence made
    them) where that recovery is a leak itself.
    """
    leaking = [test for test in tests if test.leaks]
    if not leaking:
        return 0
    return 2 if 2 * row.identifiable >= row.images or any(test.hits_half for test in leaking) else 1


def _level(
    judged: Sequence[Row], here: Sequence[Row], unfit: Sequence[Row], tests: Sequence[Test], weight: int
) -> tuple[Level, tuple[str, ...]]:
    """Decide the level and give the reasons."""
    if all(row.attacker == "informed" for row in judged):
        return "not tested", ("Only oracle attackers were run: they know client secrets and never count.",)
    if weight:
        leaking = sorted((test for test in tests if test.leaks), key=lambda test: test.adjusted)
        reasons = tuple(_words(test) for test in leaking)
        return (
            ("broken", (*reasons, f"At least half of the {judged[0].words.plural} are identifiable, or {WHERE}."))
            if weight > 1
            else ("leaks", reasons)
        )
    adaptive = _adaptive(judged)
    if not adaptive:
        return "not tested", ("No adaptive attack was run: none of the attackers simulates the whole defence.",)
    passed = [row for row in adaptive if _passed(row, here)]
    if (open_seeds := _without(passed, judged)) is not None:
        tried = [row for row in adaptive if row.seed in open_seeds]
        checks = _checks(tried, here) or "none finished"
        who = "attack on the undefended client" if adaptive[0].undefended else "adaptive attack"
        when = f" on seed {listing(map(str, open_seeds))}" if passed else ""
        return "inconclusive", (f"No {who} shows that it would find a leak{when} ({checks}).",)
    whole = [row for row in passed if not unused_rounds(row)]
    if _without(whole, judged) is not None:
        left = [f"{row.attack}: {unused_rounds(row)}." for row in passed if unused_rounds(row)]
        return "inconclusive", tuple(dict.fromkeys(left))
    passed = whole
    if (most := max(row.distinct for row in passed)) < ENOUGH:
        noun = passed[0].words.noun
        what = noun if most == max(row.images for row in passed) else f"different {noun}"
        return "inconclusive", (f"Only {plural(most, what)} attacked: at least {ENOUGH} are needed.",)
    if not tests:
        return "inconclusive", (
            f"Nothing could be tested: neither auxiliary data nor a second private {passed[0].words.noun} is there.",
        )
    seeds = {row.seed for row in judged}
    if is_unknown(passed[0].defence) and (missing := tuple(missing_evidence(passed, seeds, here, unfit))):
        return "inconclusive", missing
    names = listing(dict.fromkeys(row.attack for row in passed))
    stopped = [f"The budget stopped {row.attack} at {percent(row.budget_share)}." for row in passed if row.budget_share]
    least = min(test.adjusted for test in tests)
    return "not broken", (
        f"No leak beyond guessing (smallest corrected p-value {number(least)}).",
        f"Passed the attack check: {names}.",
        *dict.fromkeys(stopped),
    )


def _checks(tried: Sequence[Row], here: Sequence[Row]) -> str:
    """Name the attack check of each attack, those with the same outcome together."""
    names, found = short_names(row.attack for row in here), dict[str, list[str]]()
    for row in tried:
        found.setdefault(examine(row, here).words, []).append(names[row.attack])
    return "; ".join(f"{listing(dict.fromkeys(some))}: {words}" for words, some in found.items())


def _without(passed: Sequence[Row], judged: Sequence[Row]) -> list[int] | None:
    """List the seeds on which no attack passed: what one shows of a seed says nothing of another; None where none."""
    return sorted({row.seed for row in judged} - {row.seed for row in passed}) or None


def _adaptive(judged: Sequence[Row]) -> list[Row]:
    """Return the trials that can show a defence to hold: of attackers that know it, and search what it draws."""
    return [row for row in judged if row.undefended or (row.attacker == "adaptive" and not guesses(row))]


def _passed(row: Row, here: Sequence[Row]) -> bool:
    """Report whether a low rate of this trial can be blamed on the defence."""
    state = examine(row, here).state
    # Without a defence only an objective that other images satisfy as well shows that the attack did all it could.
    return state == "ambiguous" if row.undefended else state in PASSED


def _words(test: Test) -> str:
    hit = f"{test.observed} of {plural(test.images, test.noun)} {test.criterion}"
    chance = f"guessing is expected to reach {number(test.expected, 2)} (corrected p = {number(test.adjusted, 2)})"
    return f"{test.attack}: {hit}; {chance}."


def _sentence(best: Row, judged: Sequence[Row], seeds: int, tests: Sequence[Test]) -> str:
    who = {
        "undefended": "An attacker recovers",
        "naive": "An attacker who ignores this defence recovers",
        "aware": "An attacker who knows this defence's architecture recovers",
        "adaptive": "An attacker who knows this defence recovers",
        "active": "A malicious server, which changes the model that it sends, recovers",
        "informed": "An attacker who knows the client's secrets recovers",
    }[best.attacker]
    who = f"Without a defence, {who[0].lower()}{who[1:]}" if best.undefended else who
    worst = f" on the worst of {seeds} seeds" if seeds > 1 else ""
    rate = f"{percent(best.identifiable / best.images)}, 95% CI {interval(*interval_of(best, judged))}"
    count = f"{best.recovered} of {best.counted(best.images)}{worst}"
    more = f" It identifies {best.identified} of {best.images}." if best.identified > best.identifiable else ""
    parts = [test.count for test in tests if test.of_parts and test.leaks and 2 * best.identifiable < best.images]
    more += f" It has {listing(parts)}." if parts else ""
    return f"{who} {count}, {best.identifiable} of them identifiable ({rate}).{more}"


def _notes(best: Row, mine: Sequence[Row], strongest: Sequence[tuple[int, Row]]) -> list[str]:
    notes = []
    knowing_rows = [row for row in mine if row.attacker == "adaptive"]
    if knowing_rows and all(guesses(row) for row in knowing_rows):
        notes.append(
            "The adaptive attackers here draw the random values of this defence again instead of searching for them, "
            "so a low number is not evidence of safety."
        )
    if best.attacker in ("naive", "aware") and knowing_rows:
        knowing = max(knowing_rows, key=strength)
        notes.append(
            f"The strongest attacker who knows the defence recovers {knowing.recovered} of {knowing.images}: less than "
            f"one who {ATTACKERS[best.attacker][0]}, so the adaptive attack is not the better one here."
        )
    if best.attacker == "informed":
        notes.append("Only attackers that know the client's secrets were run: this is an upper bound.")
    if best.recovered and (guess := expected_of(best, "recovered")) is not None and guess >= best.recovered:
        notes.append(f"The best guess from auxiliary data alone is expected to recover {number(guess)}.")
    if alike := coincidence(best):
        notes.append(f"{alike[0].upper()}{alike[1:]}.")
    if len(strongest) > 1:
        each = [f"{row.recovered} of {row.images} (seed {seed})" for seed, row in strongest]
        notes.append(f"Strongest attacker of each seed: {listing(each)}. Seeds are not added up.")
    if best.attacker == "active":
        notes += _of_malice(best, mine)
    informed = [row for row in mine if row.attacker == "informed" and row is not best]
    if informed and best.attacker != "informed":
        top = max(informed, key=strength)
        notes.append(
            f"Upper bound, no part of the verdict: an attacker that knows the client's secrets ({top.attack}) recovers "
            f"{top.recovered} of {top.images}."
        )
    return notes


def _of_malice(best: Row, mine: Sequence[Row]) -> Iterator[str]:
    """Describe what a malicious server changed, what a guard reports of it, and what a curious server recovers."""
    found = listing(best.info.get("guard") or ())
    seen = f"finds it: {found}" if found else "finds nothing in it"
    yield f"The server put {best.info['planted']} into the model; a client's guard {seen}."
    if best.setting.batch > 1 and 0 < best.recovered < best.images:
        clients = plural(len(best.trial.records), "target client")
        yield f"It recovers at least one {best.words.noun} of {best.exposed} of {clients}."
    if curious := [row for row in mine if row.attacker not in ("active", "informed")]:
        most = max(curious, key=strength)
        count = f"{most.recovered} of {most.images}"
        yield f"A server that leaves the model as it is recovers {count} at most ({most.attack})."


def _union(rows: Sequence[Row]) -> Union | None:
    if len(rows) < 2:
        return None
    won: dict[tuple[int, int], bool] = {}
    for row in rows:
        for image, success in row.successes.items():
            won[image] = won.get(image, False) or success
    recovered = sum(won.values())
    return Union(recovered, len(won), len(rows), *wilson(recovered, len(won)))
