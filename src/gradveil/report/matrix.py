"""Defences down, attackers across: the table of a paper, from one run or several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from gradveil.audit.findings import Findings
from gradveil.audit.health import examine
from gradveil.audit.rows import Row, Setting
from gradveil.audit.store import UNFIT, Run
from gradveil.audit.verdict import LEVELS, Verdict
from gradveil.core.errors import Problem, refuse
from gradveil.core.words import DASH, interval, listing, percent, plural
from gradveil.metrics import wilson
from gradveil.report.settings import contents, told_apart
from gradveil.report.sheet import Sheet, Text

DOUBTFUL, TOLD, CHANGED = "†", "‡", "§"
"""Marks of an attack that may simply have failed, of one that was told secrets, of one that changed the model."""
_MARKS = {
    DOUBTFUL: "the attack is under-optimised or suspect: no proof of protection",
    TOLD: "knows secrets of the client: an upper bound, no threat",
    CHANGED: "a malicious server, which changes the model that it sends",
}


@dataclass(frozen=True)
class Entry:
    """What one attacker got of one defence, over all seeds."""

    rows: tuple[Row, ...]
    failed: bool
    """Whether a seed's cell failed: the others are no whole answer."""
    unfit: bool
    """Whether the attack does not apply there."""
    doubtful: bool

    @cached_property
    def images(self) -> int:
        """How many images were attacked, by all seeds together."""
        return sum(row.images for row in self.rows)

    @cached_property
    def identifiable(self) -> int:
        """How many of them were recovered and identified."""
        return sum(row.identifiable for row in self.rows)

    @cached_property
    def rate(self) -> float | None:
        """The share that is identifiable: the headline."""
        return self.identifiable / self.images if self.images else None

    @cached_property
    def ssim(self) -> float | None:
        """The mean SSIM of all images."""
        found = [value for row in self.rows for value in row.ssims]
        return fmean(found) if found else None

    @property
    def told(self) -> bool:
        """Whether the attacker was told secrets."""
        return any(row.attacker == "informed" for row in self.rows)

    @property
    def marks(self) -> str:
        """The marks that its number carries."""
        changed = any(row.planted for row in self.rows)
        return (DOUBTFUL if self.doubtful else "") + (TOLD if self.told else "") + (CHANGED if changed else "")


@dataclass(frozen=True)
class Matrix:
    """The entries of one setting by (defence, attack)."""

    setting: Setting
    title: str
    threshold: float
    seeds: int
    defences: tuple[str, ...]
    attacks: tuple[str, ...]
    entries: dict[tuple[str, str], Entry]
    found: Findings
    """The verdicts, the baseline and the control."""

    @cached_property
    def usual(self) -> int:
        """How many images most entries have."""
        counts = Counter(entry.images for entry in self.entries.values() if entry.images)
        return counts.most_common(1)[0][0] if counts else 0

    def strongest(self, defence: str) -> str | None:
        """Name the attack with the highest rate that was told no secrets; by mean SSIM where several have it."""
        rated = [(attack, self.entries.get((defence, attack))) for attack in self.attacks]
        open_ones = [(e.rate, e.ssim or 0.0, attack) for attack, e in rated if e and e.rate is not None and not e.told]
        return max(open_ones, key=lambda one: one[:2])[2] if len(open_ones) > 1 else None

    def caption(self) -> str:
        """Say what is shown."""
        seeds = f" over {self.seeds} seeds, each attack counted as one of its own," if self.seeds > 1 else ""
        what = f"images identifiable (recovered, with an SSIM above {self.threshold:g}, and identified)"
        count = f"{plural(self.usual, 'image')}{seeds} unless said otherwise"
        told = [
            f"{self.title}: share of {what} with its 95% interval, and mean SSIM; {count}.",
            "Bold: the strongest attacker.",
            *filter(None, (self.found.guess, self.found.control)),
        ]
        return " ".join(told)

    def notes(self) -> Iterator[tuple[str, str]]:
        """Explain the marks that occur."""
        used = "".join(entry.marks for entry in self.entries.values())
        return ((mark, meaning) for mark, meaning in _MARKS.items() if mark in used)

    def sheet(self) -> Sheet:
        """Lay it out."""
        columns = [Text("defence"), Text("verdict"), *(Text(attack, code=True) for attack in self.attacks)]
        rows = [[Text(name, code=True), Text(self.verdict(name)), *self.line(name)] for name in self.defences]
        return Sheet(self.caption(), columns, rows, list(self.notes()))

    def verdict(self, defence: str) -> str:
        """Write the verdict on a defence, and the count that made it a leak where that is not the headline's."""
        (entry,) = (each for each in self.found.entries if each.defence == defence)
        leaked = entry.leaked if isinstance(entry, Verdict) else ""
        return LEVELS[entry.level][0].lower() + (f" ({leaked})" if leaked else "")

    def line(self, defence: str) -> list[Text]:
        """Write the entries of a defence, the strongest attacker's bold."""
        best = self.strongest(defence)
        return [self.text(defence, attack, bold=attack == best) for attack in self.attacks]

    def text(self, defence: str, attack: str, bold: bool = False) -> Text:
        """Write an entry: its rate, and what stands behind it."""
        entry = self.entries.get((defence, attack))
        if entry is None:
            return Text("")
        if entry.rate is None:
            return Text("failed" if entry.failed else UNFIT if entry.unfit else DASH)
        low, high = wilson(entry.identifiable, entry.images)
        rest = f"{entry.marks} ({interval(low, high)})"
        rest += f", {entry.ssim:.2f}" if entry.ssim is not None else ""
        rest += f", {plural(entry.images, 'image')}" if entry.images != self.usual else ""
        return Text(percent(entry.rate), rest + (", a seed failed" if entry.failed else ""), bold)


def matrices(runs: Sequence[Run]) -> list[Matrix]:
    """Make a table of each setting there is in these runs; runs with two answers to one question are refused."""
    rows = [Row(place, cell) for place, cell in enumerate(cell for run in runs for cell in run.cells)]
    owners = [run for run in runs for _ in run.cells]
    shared = {id(run): _shared(run) for run in runs}
    groups: dict[tuple[Setting, str], list[tuple[Row, Run]]] = {}
    for row, owner in zip(rows, owners, strict=True):
        groups.setdefault((row.setting, json.dumps(shared[id(owner)], sort_keys=True)), []).append((row, owner))
    thresholds = {_threshold(row): str(owner.path) for row, owner in zip(rows, owners, strict=True)}
    problems: list[Problem] = []
    if len(thresholds) > 1:
        told = listing(f"{value:g} in {path}" for value, path in thresholds.items())
        problems.append(Problem("threshold", f"is {told}: rates above different SSIMs", "make a table of each"))
    refuse([*problems, *(problem for group in groups.values() for problem in _twice(group))])
    titles = told_apart(
        [setting.title() for setting, _ in groups], [shared[id(group[0][1])] for group in groups.values()]
    )
    every = zip(titles, groups.items(), strict=True)
    return [_matrix(setting, title, [row for row, _ in group]) for title, ((setting, _), group) in every]


_SHARED = ("data", "model", "precision", "server_lr", "budget", "observed")
"""Settings of a run that count for every one of its cells, beside what each cell says of itself."""
_OWN = {"rounds", "audit_at"}
"""Settings of a training that say which cells there are, and change none of them."""


def _shared(run: Run) -> dict[str, Any]:
    config = run.info["config"]
    plan = {key: value for key, value in (config.get("train") or {}).items() if key not in _OWN}
    return {key: config.get(key) for key in _SHARED} | {"train": plan} | contents(run.info)


def _twice(group: Sequence[tuple[Row, Run]]) -> Iterator[Problem]:
    answers: dict[tuple[str, str, int], Run] = {}
    for row, owner in group:
        if row.is_control:
            continue
        first = answers.setdefault((row.defence, row.attack, row.seed), owner)
        if first is not owner:
            what = f"has '{row.attack}' against '{row.defence}' with seed {row.seed}, and so has {first.path}"
            yield Problem(str(owner.path), what, "leave one of them out, or make a table of each")


def _matrix(setting: Setting, title: str, rows: Sequence[Row]) -> Matrix:
    sound = [row for row in rows if row.cell.failed is None]
    found = Findings(tuple(rows))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in rows if not row.is_control):
        groups.setdefault((row.defence, row.attack), []).append(row)
    entries = {place: _entry(group, sound) for place, group in groups.items()}
    defences, attacks = (tuple(dict.fromkeys(place[side] for place in groups)) for side in (0, 1))
    seeds = len({row.seed for row in rows})
    return Matrix(setting, title, _threshold(rows[0]), seeds, defences, attacks, entries, found)


def _threshold(row: Row) -> float:
    return float(row.info.get("threshold", 0.5))


def _entry(group: Sequence[Row], beside: Sequence[Row]) -> Entry:
    finished = tuple(row for row in group if row.cell.failed is None)
    doubtful = any(examine(row, beside).state in ("under-optimised", "suspect") for row in finished if row.images)
    broken, unfit = (any(flags) for flags in ((r.cell.broken for r in group), (r.cell.unfit for r in group)))
    return Entry(finished, broken, unfit, doubtful)
