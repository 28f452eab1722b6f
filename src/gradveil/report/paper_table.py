"""The table of a paper: defences in rows, attacks in columns; as Markdown and LaTeX."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from gradveil.audit.attack_check import examine
from gradveil.audit.findings import Findings
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.run_directory import UNFIT, Run
from gradveil.audit.verdict import LEVELS, Verdict
from gradveil.core.errors import Problem, refuse
from gradveil.core.formatting import DASH, interval, listing, percent, plural
from gradveil.metrics import wilson
from gradveil.report.method import contents, told_apart


class PlacedText(NamedTuple):
    """What one place of a table says."""

    text: str
    rest: str = ""
    """What follows, never bold."""
    bold: bool = False
    code: bool = False
    """Whether it is what one writes in a run file or on the command line."""


@dataclass(frozen=True)
class PaperTable:
    """A table: the first column names the rows."""

    caption: str
    columns: Sequence[PlacedText]
    rows: Sequence[Sequence[PlacedText]]
    notes: Sequence[tuple[str, str]] = ()
    """Marks, and what each means."""


def as_markdown(sheets: Sequence[PaperTable]) -> str:
    """Write tables as Markdown, the notes below each."""
    return "\n".join(_markdown(sheet) for sheet in sheets)


def _markdown(sheet: PaperTable) -> str:
    def line(texts: Sequence[PlacedText]) -> str:
        return "| " + " | ".join(written(one).replace("|", "\\|") for one in texts) + " |"

    def written(one: PlacedText) -> str:
        shown = f"`{one.text}`" if one.code else one.text
        return (f"**{shown}**" if one.bold else shown) + one.rest

    ruler = "|---" * len(sheet.columns) + "|"
    lines = [f"{sheet.caption}\n", line(sheet.columns), ruler, *map(line, sheet.rows)]
    notes = [f"{mark} {meaning}" for mark, meaning in sheet.notes]
    return "\n".join(lines) + "\n" + (f"\n{'; '.join(notes)}.\n" if notes else "")


def as_latex(sheets: Sequence[PaperTable]) -> str:
    """Write tables as LaTeX."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(sheet) for sheet in sheets)


def _latex(sheet: PaperTable) -> str:
    def line(texts: Sequence[PlacedText]) -> str:
        return " & ".join(map(written, texts)) + " \\\\"

    def written(one: PlacedText) -> str:
        text, rest = _escaped(one.text), _escaped(one.rest)
        return (f"\\textbf{{{text}}}" if one.bold else text) + rest

    notes = [f"{_escaped(mark)} {_escaped(meaning)}." for mark, meaning in sheet.notes]
    top = ["\\begin{table}", f"\\caption{{{' '.join([_escaped(sheet.caption), *notes])}}}"]
    top += [f"\\begin{{tabular}}{{{'l' * len(sheet.columns)}}}", "\\toprule", line(sheet.columns), "\\midrule"]
    return "\n".join([*top, *map(line, sheet.rows), "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$"},
    "|": "\\textbar{}",
    **{"†": "$^\\dagger$", "‡": "$^\\ddagger$", "§": "$^\\S$", DASH: "--", '"': "''", "±": "$\\pm$", "−": "$-$"},
}


def _escaped(text: str) -> str:
    r"""Write what LaTeX would read as a command as the character that it is.

    >>> print(_escaped("dp(sigma=1e-4)_{x} 5–10%"))
    dp(sigma=1e-4)\_\{x\} 5--10\%
    """
    return "".join(_LATEX.get(character, character) for character in text)


DOUBTFUL, TOLD, CHANGED = "†", "‡", "§"
"""Marks of an attack that may simply have failed, of one that was told secrets, of one that changed the model."""
_MARKS = {
    DOUBTFUL: "the attack is under-optimised or suspect: no proof of protection",
    TOLD: "knows secrets of the client: an upper bound, no threat",
    CHANGED: "a malicious server, which changes the model that it sends",
}


@dataclass(frozen=True)
class AttackerResult:
    """What one attacker got of one defence, over all seeds."""

    rows: tuple[Row, ...]
    failed: bool
    """Whether a seed's trial failed: the others are no whole answer."""
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

    setting: TrialSetting
    title: str
    threshold: float
    seeds: int
    defences: tuple[str, ...]
    attacks: tuple[str, ...]
    entries: dict[tuple[str, str], AttackerResult]
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

    def sheet(self) -> PaperTable:
        """Lay it out."""
        columns = [
            PlacedText("defence"),
            PlacedText("verdict"),
            *(PlacedText(attack, code=True) for attack in self.attacks),
        ]
        rows = [
            [PlacedText(name, code=True), PlacedText(self.verdict(name)), *self.line(name)] for name in self.defences
        ]
        return PaperTable(self.caption(), columns, rows, list(self.notes()))

    def verdict(self, defence: str) -> str:
        """Write the verdict on a defence, and the count that made it a leak where that is not the headline's."""
        (entry,) = (each for each in self.found.entries if each.defence == defence)
        leaked = entry.leaked if isinstance(entry, Verdict) else ""
        return LEVELS[entry.level][0].lower() + (f" ({leaked})" if leaked else "")

    def line(self, defence: str) -> list[PlacedText]:
        """Write the entries of a defence, the strongest attacker's bold."""
        best = self.strongest(defence)
        return [self.text(defence, attack, bold=attack == best) for attack in self.attacks]

    def text(self, defence: str, attack: str, bold: bool = False) -> PlacedText:
        """Write an entry: its rate, and what stands behind it."""
        entry = self.entries.get((defence, attack))
        if entry is None:
            return PlacedText("")
        if entry.rate is None:
            return PlacedText("failed" if entry.failed else UNFIT if entry.unfit else DASH)
        low, high = wilson(entry.identifiable, entry.images)
        rest = f"{entry.marks} ({interval(low, high)})"
        rest += f", {entry.ssim:.2f}" if entry.ssim is not None else ""
        rest += f", {plural(entry.images, 'image')}" if entry.images != self.usual else ""
        return PlacedText(percent(entry.rate), rest + (", a seed failed" if entry.failed else ""), bold)


def matrices(runs: Sequence[Run]) -> list[Matrix]:
    """Make a table of each setting there is in these runs; runs with two answers to one question are refused."""
    rows = [Row(place, trial) for place, trial in enumerate(trial for run in runs for trial in run.trials)]
    owners = [run for run in runs for _ in run.trials]
    shared = {id(run): _shared(run) for run in runs}
    groups: dict[tuple[TrialSetting, str], list[tuple[Row, Run]]] = {}
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
"""Settings of a run that count for every one of its trials, beside what each trial says of itself."""
_OWN = {"rounds", "audit_at"}
"""Settings of a training that say which trials there are, and change none of them."""


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


def _matrix(setting: TrialSetting, title: str, rows: Sequence[Row]) -> Matrix:
    sound = [row for row in rows if row.trial.failed is None]
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


def _entry(group: Sequence[Row], beside: Sequence[Row]) -> AttackerResult:
    finished = tuple(row for row in group if row.trial.failed is None)
    doubtful = any(examine(row, beside).state in ("under-optimised", "suspect") for row in finished if row.images)
    broken, unfit = (any(flags) for flags in ((r.trial.broken for r in group), (r.trial.unfit for r in group)))
    return AttackerResult(finished, broken, unfit, doubtful)
