"""Defences down, attackers across: the table of a paper, from one run or several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from gradveil.audit.health import examine
from gradveil.audit.rows import Row, Setting
from gradveil.audit.store import UNFIT, Run
from gradveil.core.errors import Problem, refuse
from gradveil.core.words import DASH, interval, listing, percent, plural
from gradveil.metrics import wilson
from gradveil.report.settings import contents, told_apart
from gradveil.report.sheet import Sheet, Text

DOUBTFUL, TOLD, CHANGED = "†", "‡", "§"
"""Marks of an attack that may simply have failed, of one that was told secrets, of one that changed the model."""
_MARKS = {
    DOUBTFUL: "the attack fell short of the true images' objective, or may be broken: no proof of protection",
    TOLD: "told secrets of the client: an upper bound, no threat",
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
    def asr(self) -> float | None:
        """The share that was recovered."""
        return sum(row.recovered for row in self.rows) / self.images if self.images else None

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

    @cached_property
    def usual(self) -> int:
        """How many images most entries have."""
        counts = Counter(entry.images for entry in self.entries.values() if entry.images)
        return counts.most_common(1)[0][0] if counts else 0

    def strongest(self, defence: str) -> str | None:
        """Name the attack on a defence that recovers most without being told secrets; by SSIM where several do."""
        rated = [(attack, self.entries.get((defence, attack))) for attack in self.attacks]
        open_ones = [(e.asr, e.ssim or 0.0, attack) for attack, e in rated if e and e.asr is not None and not e.told]
        return max(open_ones, key=lambda one: one[:2])[2] if len(open_ones) > 1 else None

    def caption(self) -> str:
        """Say what is shown."""
        seeds = f" over {self.seeds} seeds, each attack counted as one of its own," if self.seeds > 1 else ""
        guesses = sorted({row.floor for entry in self.entries.values() for row in entry.rows if row.floor is not None})
        floor = " to ".join(dict.fromkeys(percent(one) for one in (*guesses[:1], *guesses[-1:])))
        return (
            f"{self.title}: share of images recovered (SSIM above {self.threshold:g}) with its 95% interval, "
            f"and mean SSIM; {plural(self.usual, 'image')}{seeds} unless said otherwise. Bold: the strongest attacker."
            + (f" A guess that sees no update: {floor}." if floor else "")
        )

    def notes(self) -> Iterator[tuple[str, str]]:
        """Explain the marks that occur."""
        used = "".join(entry.marks for entry in self.entries.values())
        return ((mark, meaning) for mark, meaning in _MARKS.items() if mark in used)

    def sheet(self) -> Sheet:
        """Lay it out."""
        columns = [Text("defence"), *(Text(attack, code=True) for attack in self.attacks)]
        rows = [[Text(defence, code=True), *self.line(defence)] for defence in self.defences]
        return Sheet(self.caption(), columns, rows, list(self.notes()))

    def line(self, defence: str) -> list[Text]:
        """Write the entries of a defence, the strongest attacker's bold."""
        best = self.strongest(defence)
        return [self.text(defence, attack, bold=attack == best) for attack in self.attacks]

    def text(self, defence: str, attack: str, bold: bool = False) -> Text:
        """Write an entry: its rate, and what stands behind it."""
        entry = self.entries.get((defence, attack))
        if entry is None:
            return Text("")
        if entry.asr is None:
            return Text("failed" if entry.failed else UNFIT if entry.unfit else DASH)
        low, high = wilson(round(entry.asr * entry.images), entry.images)
        rest = f"{entry.marks} ({interval(low, high)})"
        rest += f", {entry.ssim:.2f}" if entry.ssim is not None else ""
        rest += f", {plural(entry.images, 'image')}" if entry.images != self.usual else ""
        return Text(percent(entry.asr), rest + (", a seed failed" if entry.failed else ""), bold)


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
        first = answers.setdefault((row.defence, row.attack, row.seed), owner)
        if first is not owner:
            what = f"has '{row.attack}' against '{row.defence}' with seed {row.seed}, and so has {first.path}"
            yield Problem(str(owner.path), what, "leave one of them out, or make a table of each")


def _matrix(setting: Setting, title: str, rows: Sequence[Row]) -> Matrix:
    sound = [row for row in rows if row.cell.failed is None]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.defence, row.attack), []).append(row)
    entries = {place: _entry(group, sound) for place, group in groups.items()}
    defences, attacks = (tuple(dict.fromkeys(place[side] for place in groups)) for side in (0, 1))
    return Matrix(setting, title, _threshold(rows[0]), len({row.seed for row in rows}), defences, attacks, entries)


def _threshold(row: Row) -> float:
    return float(row.info.get("threshold", 0.5))


def _entry(group: Sequence[Row], beside: Sequence[Row]) -> Entry:
    finished = tuple(row for row in group if row.cell.failed is None)
    doubtful = any(examine(row, beside).state in ("under-optimised", "suspect") for row in finished if row.images)
    broken, unfit = (any(flags) for flags in ((r.cell.broken for r in group), (r.cell.unfit for r in group)))
    return Entry(finished, broken, unfit, doubtful)
