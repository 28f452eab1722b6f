"""A verdict in one sentence per defence, and everything that has to stand beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradveil.audit.attacker import ATTACKERS
from gradveil.audit.health import Health, coincidence, examine, guesses
from gradveil.audit.rows import Row, Setting
from gradveil.audit.threat import unknown_to_all
from gradveil.core.words import interval, listing, percent, plural
from gradveil.metrics import wilson
from gradveil.report.price import Price, price

Level = Literal["exposed", "leaks", "held", "unproven", "unclear"]
"""What a verdict comes to; `LEVELS` has the words."""

LEVELS: dict[Level, tuple[str, str, str]] = {
    "exposed": ("✕", "Exposed", "at least half of the images were recovered, beyond what guessing gives"),
    "leaks": ("!", "Leaks", "some images were recovered, beyond what guessing from public data gives"),
    "held": ("✓", "Held", "nothing beyond guessing, by an attacker who knows the defence and whose attack works"),
    "unproven": (
        "?",
        "Unproven",
        "no attacker who makes use of knowing the defence was run, and the others prove no leak",
    ),
    "unclear": ("~", "Unclear", "nothing beyond guessing, but the attack may simply be broken"),
}
"""Icon, label and meaning of every level. A level never rests on its colour alone."""

_RANK: list[Level] = ["exposed", "leaks", "unclear", "unproven", "held"]


@dataclass(frozen=True)
class Union:
    """The per-victim union over attackers: an upper bound, since nobody tells the attacker which result is right."""

    recovered: int
    images: int
    attackers: int
    low: float
    high: float

    def sentence(self) -> str:
        """Say it in words."""
        return (
            f"at least one of the {self.attackers} attackers recovers {self.recovered} of "
            f"{plural(self.images, 'image')} ({percent(self.recovered / self.images)}, 95% CI "
            f"{interval(self.low, self.high)}). Only the truth says which one to trust."
        )


@dataclass(frozen=True)
class Verdict:
    """What is said about one defence in one setting."""

    setting: Setting
    best: Row
    """The cell that the sentence quotes: the strongest eligible attacker on the worst seed."""
    rows: tuple[Row, ...]
    """All cells of this defence: those that are judged, who shows most first, then the upper bounds."""
    level: Level
    sentence: str
    notes: tuple[str, ...]
    """Said visibly beside the sentence: what the number does not show."""
    warning: str
    """What has to be done before the number means anything; empty where nothing is missing."""
    seeds: tuple[tuple[int, Row], ...]
    """The strongest eligible attacker of each seed; seeds repeat the same victims and are never added up."""
    union: Union | None
    price: Price
    """What the defence costs, on the quoted seed: with the honest model, if anybody attacked that."""
    health: Health
    """Whether the quoted attack worked as an attack."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why a low rate may come from a broken attack."""
        return self.health.doubts

    @property
    def undefended(self) -> bool:
        """Whether there is no defence to judge."""
        return self.best.undefended

    @property
    def judged(self) -> tuple[Row, ...]:
        """The cells that the verdict is over: no upper bounds, unless there is nothing else."""
        return eligible(self.rows)


def eligible(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Choose the cells that a verdict is over: the worst case of all attackers who were told no secrets.

    Handed-over randomness is an upper bound; it decides only where nothing else was run.
    """
    return tuple(row for row in rows if row.attacker != "informed") or tuple(rows)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Judge every defence in every setting: settings in the run's order, the worst defence first."""
    settings = list(dict.fromkeys(row.setting for row in rows if row.images))
    found = []
    for setting in settings:
        here = [row for row in rows if row.setting == setting and row.images]
        judged = [_judge(setting, name, here) for name in dict.fromkeys(row.defence for row in here)]
        found += sorted(judged, key=_order)
    return found


def _order(verdict: Verdict) -> tuple[bool, bool, float, int, float]:
    best = verdict.best
    shown = best.beyond_guessing
    return (not verdict.undefended, not shown, -best.asr, _RANK.index(verdict.level), -(best.mean("ssim") or 0))


def strength(row: Row) -> tuple[float, bool, float]:
    """Order attackers: by success rate; at equal rates he who knows the defence counts, then the mean SSIM."""
    mean = row.mean("ssim")
    return row.asr, row.attacker == "adaptive", -1.0 if mean is None else mean


def telling(row: Row) -> tuple[bool, float, bool, float]:
    """Order attackers by what they show: who recovers more by guessing shows less than who singles somebody out."""
    return row.beyond_guessing, *strength(row)


def _judge(setting: Setting, defence: str, here: Sequence[Row]) -> Verdict:
    mine = sorted((row for row in here if row.defence == defence), key=telling, reverse=True)
    mine.sort(key=lambda row: row.attacker == "informed")
    judged = eligible(mine)
    seeds = sorted({row.seed for row in judged})
    strongest = [(seed, max((r for r in judged if r.seed == seed), key=telling)) for seed in seeds]
    best = max((row for _, row in strongest), key=telling)
    health, level = examine(best, here), _level(best, judged, here)
    notes = _notes(best, mine, strongest)
    if level == "unclear" and not health.doubts and not best.undefended:
        notes.append("Every attack of those who know this defence is in doubt; its health stands with the runs below.")
    return Verdict(
        setting=setting,
        best=best,
        rows=tuple(mine),
        level=level,
        sentence=_sentence(best, len(strongest)),
        notes=tuple(notes),
        warning=unknown_to_all(mine),
        seeds=tuple(strongest),
        union=_union([row for row in judged if row.seed == best.seed]),
        price=price(next((row for row in mine if row.seed == best.seed and not row.planted), best), here),
        health=health,
    )


def _level(best: Row, judged: Sequence[Row], here: Sequence[Row]) -> Level:
    if best.attacker == "informed":
        return "unproven"
    # A guess such as the mean image can pass the threshold, but it singles nobody out.
    if best.beyond_guessing:
        return "exposed" if best.asr >= 0.5 else "leaks"
    if examine(best, here).doubts or best.undefended:
        return "unclear"
    knowing = [row for row in judged if row.attacker == "adaptive" and not guesses(row)]
    if not knowing:
        return "unproven"
    # A healthy attacker who ignores the defence does not vouch for one who knows it and whose attack is broken.
    return "held" if any(not examine(row, here).doubts for row in knowing) else "unclear"


def _sentence(best: Row, seeds: int) -> str:
    who = {
        "undefended": "An attacker recovers",
        "naive": "An attacker who ignores this defence recovers",
        "aware": "An attacker who knows this defence's architecture recovers",
        "adaptive": "An attacker who knows this defence recovers",
        "active": "A malicious server, which changes the model that it sends, recovers",
        "informed": f"An attacker who {ATTACKERS['informed'][0]} recovers",
    }[best.attacker]
    who = f"Without a defence, {who[0].lower()}{who[1:]}" if best.undefended else who
    worst = f" on the worst of {seeds} seeds" if seeds > 1 else ""
    return (
        f"{who} {best.recovered} of {plural(best.images, 'image')}{worst} "
        f"({percent(best.asr)}, 95% CI {interval(*best.bounds)})."
    )


def _notes(best: Row, mine: Sequence[Row], strongest: Sequence[tuple[int, Row]]) -> list[str]:
    notes = []
    knowing_rows = [row for row in mine if row.attacker == "adaptive"]
    if knowing_rows and all(guesses(row) for row in knowing_rows):
        notes.append(
            "Whoever knows this defence here draws its random values afresh instead of searching for them, "
            "so a low number is not evidence of safety."
        )
    if best.attacker in ("naive", "aware") and knowing_rows:
        knowing = max(knowing_rows, key=strength)
        notes.append(
            f"The strongest attacker who knows the defence recovers {knowing.recovered} of {knowing.images}: less than "
            f"one who {ATTACKERS[best.attacker][0]}, so the adaptive attack is not the better one here."
        )
    if best.attacker == "informed":
        notes.append("Only attackers who were told the client's secrets were run: this is an upper bound.")
    if best.asr > 0 and best.floor is not None and best.asr <= best.floor:
        closer = ""
        if best.beyond_guessing:
            many = f"{best.identified} of the recovered images resemble their victim more than any other image"
            closer = f", but {many}" if best.identified else ", but does not come as close"
        guessed = "as many" if best.asr == best.floor else "more"
        notes.append(f"Guessing from public data alone recovers {guessed} ({percent(best.floor)}){closer}.")
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
            f"Upper bound, no part of the verdict: an attacker who {ATTACKERS['informed'][0]} ({top.attack}) recovers "
            f"{top.recovered} of {top.images}."
        )
    return notes


def _of_malice(best: Row, mine: Sequence[Row]) -> Iterator[str]:
    """Say what a malicious server put into the model, who would see it, and what a curious one gets."""
    found = listing(best.info.get("guard") or ())
    seen = f"finds it: {found}" if found else "finds nothing in it"
    yield f"The server put {best.info['planted']} into the model; a client's guard {seen}."
    if best.setting.batch > 1 and 0 < best.recovered < best.images:
        yield f"It recovers at least one image of {best.exposed} of {plural(len(best.cell.records), 'victim')}."
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
