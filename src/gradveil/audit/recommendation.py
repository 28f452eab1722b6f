"""The recommendation of a run: the defence to use and what it costs, or what to try next."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gradveil.audit.attack_check import PLAIN
from gradveil.audit.attack_selection import canonical
from gradveil.audit.attackers.attacker_table import is_unknown
from gradveil.audit.defence_costs import Costs, DefenceCost, largest_epsilon_of
from gradveil.audit.verdict import ENOUGH, LEVELS, Level, Verdict
from gradveil.core.formatting import interval, listing, number, plural
from gradveil.data import DATASETS
from gradveil.defences.privacy_warnings import reservation
from gradveil.federated.training_config import UNNAMED

_COST = " ".join(
    [f"--set cost.rounds={UNNAMED['rounds']}", *(f"--set cost.local.{key}={n}" for key, n in UNNAMED["local"].items())]
)
"""Options of `gradveil audit` that measure accuracy next to the attacks."""
_OPTIONS = {
    "own": ("--attack adaptive --attack module:Name", 'attacks=["adaptive", yours]'),
    "adaptive": ("--attack adaptive", 'attacks=["adaptive"]'),
    "batch": ("--set client.batch={}", "client_batch={}"),
    "budget": ("--budget none (all iterations)", "budget=None (all iterations)"),
    "clients": (f"--target-clients {ENOUGH}", f"{ENOUGH} target clients"),
    "defence": ('--defence "{}"', 'the defence "{}"'),
    "iterations": ("more --iterations", "more iterations"),
    "none": ("--defence none", 'the defence "none"'),
}
"""What to change, as options of the command line and as arguments in Python."""
_WORST: list[Level] = ["broken", "leaks", "inconclusive", "not tested", "not broken"]


@dataclass(frozen=True)
class Recommendation:
    """What a run recommends, in sentences and as plain values."""

    defence: str | None
    """The defence to use; None where none can be recommended."""
    sentences: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The numbers behind the sentences: recovery, accuracy, bytes and time."""

    @property
    def text(self) -> str:
        """The sentences as one text."""
        return " ".join(self.sentences)

    def as_object(self) -> dict[str, Any]:
        """Return defence, text and numbers as plain values."""
        return {"defence": self.defence, "text": self.text, **self.facts}


@dataclass(frozen=True)
class MissingVerdict:
    """A defence in a setting without a score."""

    defence: str
    level: Level
    undefended: bool


@dataclass(frozen=True)
class _Candidate:
    """A defence over all settings of a run: its worst verdict, and its cost."""

    name: str
    level: Level
    worst: Verdict | None
    """The verdict with the highest rate; None where no trial has a score."""
    cost: DefenceCost | None
    undefended: bool = False
    limited: bool = False
    """Whether it is not broken within a budget only, which stopped an attack."""

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes relative to no defence: of a round of training, or else of one update."""
        if self.cost is not None and self.cost.bytes_ratio is not None:
            return self.cost.bytes_ratio
        return self.worst.price.share if self.worst else None

    @property
    def is_useless(self) -> bool:
        """Whether a training with it learned nothing, and one without a defence did."""
        return self.cost is not None and self.cost.plain is not None and not self.cost.learned

    @property
    def lost(self) -> float | None:
        """The accuracy lost; None where it is unknown."""
        return self.cost.lost.value if self.cost and self.cost.lost else None

    @property
    def point(self) -> tuple[float | None, ...]:
        """Recovery, accuracy lost, bytes and time, all to be small; None for what is unknown."""
        rate = self.worst.rate if self.worst else math.inf
        return rate, self.lost, self.bytes_ratio, self.cost.seconds_ratio if self.cost else None

    @property
    def order(self) -> tuple[float, ...]:
        """The order of preference: accuracy first where it is known, then recovery, bytes and update distortion."""
        unknown = math.inf
        lost, sent = self.lost, self.bytes_ratio
        moved = self.worst.price.distance if self.worst else None
        rate = self.worst.rate if self.worst else unknown
        return tuple(unknown if each is None else each for each in (lost, rate, sent, moved))


def recommend(
    judged: Sequence[Verdict],
    gaps: Sequence[MissingVerdict],
    costs: Costs = MappingProxyType({}),
    command: str = "",
    failed: Collection[str] = (),
    undone: int = 0,
) -> Recommendation | None:
    """Recommend a defence of a run, or what to try next; None for a run without a defence.

    Only a defence that an adaptive attack did not break, in every setting of a run that is done, is recommended, and
    none with which a training learned nothing. `gaps` are the defences without a score; `command` made the run;
    `failed` are the defences with a trial that failed, and `undone` counts the trials that are not done.
    """
    every = _candidates(judged, gaps, costs)
    defended = [each for each in every if not each.undefended]
    if not defended:
        return None
    bare = next((each for each in every if each.undefended), None)
    sound = sorted((each for each in defended if each.level == "not broken"), key=lambda each: each.order)
    whole = [each for each in sound if each.name not in failed]
    useful = [each for each in whole if not each.is_useless]
    if useful and not undone:
        return _use(useful[0], useful[1:], defended, command)
    steps: list[str] = []
    if sound and undone:
        steps.append(f"give the same command again: {plural(undone, 'trial')} {_is_are(undone)} not done")
    if left := [each.name for each in sound if each.name in failed]:
        steps.append(f"give the same command again: an attack on {listing(left)} failed")
    if useless := [each.name for each in whole if each.is_useless]:
        steps.append(f"train longer with {listing(useless)}, or weaken it: its training learned nothing")
    return _none(defended, bare, steps, command.startswith("gradveil.audit("))


def _is_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _candidates(judged: Sequence[Verdict], gaps: Sequence[MissingVerdict], costs: Costs) -> list[_Candidate]:
    names = dict.fromkeys([*(verdict.defence for verdict in judged), *(gap.defence for gap in gaps)])
    found: list[_Candidate] = []
    for name in names:
        mine = [verdict for verdict in judged if verdict.defence == name]
        missing = [gap for gap in gaps if gap.defence == name]
        levels: list[Level] = [each.level for each in (*mine, *missing)]
        bare, limited = any(each.undefended for each in (*mine, *missing)), any(each.limited for each in mine)
        worst = max(mine, key=lambda verdict: (verdict.rate, verdict.interval[1]), default=None)
        found.append(_Candidate(name, min(levels, key=_WORST.index), worst, costs.get(canonical(name)), bare, limited))
    return found


def _use(
    best: _Candidate,
    others: Sequence[_Candidate],
    defended: Sequence[_Candidate],
    command: str,
) -> Recommendation:
    worst = best.worst
    assert worst is not None  # "not broken" is the level of scored trials alone
    count = f"{worst.identifiable} of {worst.best.counted(worst.images)} (95% CI {interval(*worst.interval)})"
    within = "within the budget, " if best.limited else ""
    sentences = [f"Use {best.name}: {within}attackers recover and identify {count}.", *_costs(best, command)]
    if worst.doubts:
        quoted, others_passed = worst.best.attack, listing(worst.passed)
        sentences.append(
            f"The attack check of {quoted}, which is quoted, is {worst.health.label}; {others_passed} passed it."
        )
    elif worst.health.state not in PLAIN:
        sentences.append(f"Its attack check is {worst.health.label}.")
    if doubt := reservation(epsilon := largest_epsilon_of(worst.best.info, best.cost)):
        sentences.append(f"Its epsilon is {number(epsilon)}, {doubt}.")
    sentences.append(_compared(best, others, defended))
    facts = {
        "recovered": worst.identifiable,
        "images": worst.images,
        "ci": list(worst.interval),
        "within_budget": best.limited,
        "bytes_ratio": best.bytes_ratio,
        **(best.cost.as_object() if best.cost else {}),
    }
    return Recommendation(best.name, tuple(sentences), facts | {"bytes_ratio": best.bytes_ratio})


def _costs(best: _Candidate, command: str) -> Iterator[str]:
    """Say what a defence costs in accuracy, bytes and time, as far as it was measured."""
    cost, told = best.cost, list[str]()
    if cost is not None and cost.lost is not None and cost.plain is not None:
        points, error = round(100 * cost.lost.value), 100 * cost.lost.error
        change = " → ".join(f"{100 * each.value:.{each.decimals}f}%" for each in (cost.plain, cost.accuracy))
        word = "points" if abs(points) != 1 else "point"
        told.append(f"{points} {word} of accuracy ({change}, ± {error:.0f})")
    if best.bytes_ratio is not None:
        in_training = cost is not None and cost.bytes_ratio is not None
        what, ratio = "sent in training" if in_training else "of an update", number(best.bytes_ratio, 2)
        told.append(f"about the same bytes {what}" if ratio == "1" else f"{ratio} times the bytes {what}")
    if cost is not None and cost.seconds_ratio is not None:
        told.append(_time(cost.seconds_ratio, cost.spans["seconds"][0]))
    if told:
        yield f"It costs {listing(told)}."
    if cost is None or cost.lost is None:
        yield _unmeasured(best, command)


def _time(ratio: float, seconds: float) -> str:
    """Say how a client's time compares; timings of short trainings are noisy, so that small ratios come in steps.

    >>> _time(9.7, 0.0904), _time(1.6, 2.5)
    ("9.7 times the client's time (9.3 → 90 ms)", "up to twice the client's time (1.6 → 2.5 s)")
    """
    if 0.8 <= ratio <= 1.25:
        return "about the same client time"
    told = "up to twice the client's time" if 1.25 < ratio <= 2 else f"{number(ratio, 2)} times the client's time"
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    return f"{told} ({number(scale * seconds / ratio, 2)} → {number(scale * seconds, 2)} {unit})"


def _unmeasured(best: _Candidate, command: str) -> str:
    """Say why the cost in accuracy is unknown, and how to measure it."""
    data = best.worst.setting.data if best.worst else ""
    if data in DATASETS and not DATASETS[data].task:
        return f"Its cost in accuracy cannot be measured: the labels of {data} mean nothing."
    if best.cost is not None and best.cost.plain is None:
        return "Its cost in accuracy is unknown, because no training without a defence made progress."
    how = "gradveil train on the same data and model, then gradveil summary with both runs"
    if command.startswith("gradveil audit") and "--observed" not in command:
        how = f"{command} {_COST}"
    elif command.startswith("gradveil.audit"):
        how = "gradveil.train(...) with the same model and defences"
    return f"Its cost in accuracy was not measured. To measure it: {how}."


def _compared(best: _Candidate, others: Sequence[_Candidate], defended: Sequence[_Candidate]) -> str:
    """Compare a recommended defence with the others that were not broken."""
    if not others:
        return (
            "It is the only defence that was tested."
            if len(defended) == 1
            else (f"Of {plural(len(defended), 'defence')} it is the only one that was not broken.")
        )
    better = [each.name for each in others if _dominates(each, best)]
    if better:
        return f"Better in everything that was measured: {listing(better)}."
    names = listing(each.name for each in others)
    verb = "was" if len(others) == 1 else "were"
    return f"{names} {verb} not broken either; nothing that was tried is better in everything that was measured."


def _dominates(one: _Candidate, other: _Candidate) -> bool:
    """Return whether a defence is nowhere worse than another, and better somewhere; not if only one was measured."""
    pairs = [*zip(one.point, other.point, strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return all(a <= b for a, b in known) and any(a < b for a, b in known)


def _none(
    defended: Sequence[_Candidate], bare: _Candidate | None, first_steps: Sequence[str], python: bool
) -> Recommendation:
    option = {name: texts[python] for name, texts in _OPTIONS.items()}
    steps = list(first_steps)
    open_levels = [each for each in defended if each.level in ("inconclusive", "not tested")]
    if untested := [each.name for each in open_levels if each.level == "not tested"]:
        steps.append(f"attack {listing(untested)} with what knows it: {option['adaptive']}")
    undecided = [each for each in open_levels if each.level == "inconclusive"]
    if own := [each.name for each in undecided if is_unknown(each.name)]:
        steps.append(
            f"attack {listing(own)} with all general attacks and with code that is written against it, and a weaker "
            f"setting that only this code undoes: {option['own']}"
        )
    if vague := [each for each in undecided if each.name not in own]:
        steps.append(f"attack {listing(each.name for each in vague)} again with {_more(vague, option)}")
    leaking = [each for each in defended if each.level in ("broken", "leaks")]
    if leaking:
        steps.append(_stronger(leaking, option))
    elif bare is None and not steps:
        steps.append(f"add {option['none']}, which shows that the attacks work")
    first = "No tested defence protects this model." if leaking else "No defence can be recommended yet."
    if leaking and len(leaking) < len(defended):
        rest = [each for each in defended if each not in leaking]
        verdicts = listing(f"{each.name} ({LEVELS[each.level][0].lower()})" for each in rest)
        first = f"No tested defence is shown to protect this model; open: {verdicts}."
    return Recommendation(None, (first, f"Next: {'; '.join(steps)}."), {"next": steps})


_ITERATIONS = re.compile(r"\biterations=(\d+)")


def _more(vague: Sequence[_Candidate], option: Mapping[str, str]) -> str:
    """Name what an undecided attack needs more of: clients, iterations, or a budget."""
    judged = [each.worst for each in vague if each.worst is not None]
    few = any(verdict.best.distinct < ENOUGH for verdict in judged)
    short = any(verdict.health.state == "under-optimised" for verdict in judged)
    cut = any(row.budget_share is not None for verdict in judged for row in verdict.judged)
    longer = option["budget" if cut else "iterations"]
    # Iterations of the run do not count for an attack that sets its own.
    attacks = dict.fromkeys(verdict.best.attack for verdict in judged)
    if not cut and attacks and all(map(_ITERATIONS.search, attacks)):
        longer = listing(_ITERATIONS.sub(lambda own: f"iterations={4 * int(own[1])}", attack) for attack in attacks)
    words = [option["clients"]] * few + [longer] * (cut or short or not few)
    return " and ".join(words)


_NOISE = re.compile(r"\b((?:user-dp|fed-cdp|dp)\([^)]*?\bsigma\s*=\s*)([\d.eE+-]+)")


def _stronger(leaking: Sequence[_Candidate], option: Mapping[str, str]) -> str:
    """Suggest what protects more than these: differential privacy, or more of its noise, or larger batches."""
    private = [match for each in leaking if (match := _NOISE.search(each.name))]
    batch = max((4 * int(each.worst.best.info["batch"]) for each in leaking if each.worst), default=8)
    what, text = "noise with a guarantee", "dp(clip=1, sigma=2)"
    if private:
        match = max(private, key=lambda match: float(match[2]))
        text = f"{match[1]}{number(max(1.0, 2 * float(match[2])))}{match.string[match.end() :]}"
        what, text = "more noise", match.string[: match.start()] + text
    return f"{what}: {option['defence'].format(text)}, or larger batches: {option['batch'].format(max(8, batch))}"
