"""The table of a paper: defences in rows, attacks in columns; as Markdown and LaTeX."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any, NamedTuple

from gradveil.audit.attack_check import examine
from gradveil.audit.defence_costs import Costs
from gradveil.audit.findings import Findings
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.run_directory import UNFIT, Run
from gradveil.audit.verdict import LEVELS, Verdict
from gradveil.core.errors import Problem, refuse
from gradveil.core.formatting import DASH, duration, interval, listing, percent, plural
from gradveil.core.space import ExampleWords
from gradveil.metrics import wilson
from gradveil.report.choices import ALL, Choices, TableChoices
from gradveil.report.setting_titles import distinct_titles, file_digests


class PlacedText(NamedTuple):
    """The text of one table cell."""

    text: str
    rest: str = ""
    """The text after it, never bold."""
    bold: bool = False
    code: bool = False
    """Whether it is a setting as users write it in a run file or on the command line."""
    math: bool = False
    """Whether LaTeX between dollar signs stays as it is."""


@dataclass(frozen=True)
class PaperTable:
    """A table: the first column names the rows."""

    caption: str
    columns: Sequence[PlacedText]
    rows: Sequence[Sequence[PlacedText]]
    notes: Sequence[tuple[str, str]] = ()
    """Marks with their meanings."""


def as_markdown(sheets: Sequence[PaperTable]) -> str:
    """Write tables as Markdown, the notes below each."""
    return "\n".join(_markdown(sheet) for sheet in sheets)


def _markdown(sheet: PaperTable) -> str:
    def line(texts: Sequence[PlacedText]) -> str:
        return "| " + " | ".join(cell(text).replace("|", "\\|") for text in texts) + " |"

    def cell(placed: PlacedText) -> str:
        text = f"`{placed.text}`" if placed.code else placed.text
        return (f"**{text}**" if placed.bold else text) + placed.rest

    ruler = "|---" * len(sheet.columns) + "|"
    lines = [f"{sheet.caption}\n", line(sheet.columns), ruler, *map(line, sheet.rows)]
    notes = [f"{mark} {meaning}" for mark, meaning in sheet.notes]
    return "\n".join(lines) + "\n" + (f"\n{'; '.join(notes)}.\n" if notes else "")


def as_latex(sheets: Sequence[PaperTable]) -> str:
    """Write tables as LaTeX."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(sheet) for sheet in sheets)


def _latex(sheet: PaperTable) -> str:
    def line(texts: Sequence[PlacedText]) -> str:
        return " & ".join(map(cell, texts)) + " \\\\"

    def cell(placed: PlacedText) -> str:
        text, rest = _with_math(placed.text) if placed.math else _escaped(placed.text), _escaped(placed.rest)
        return (f"\\textbf{{{text}}}" if placed.bold else text) + rest

    notes = [f"{_escaped(mark)} {_escaped(meaning)}." for mark, meaning in sheet.notes]
    top = ["\\begin{table}", f"\\caption{{{' '.join([_escaped(sheet.caption), *notes])}}}"]
    top += [f"\\begin{{tabular}}{{{'l' * len(sheet.columns)}}}", "\\toprule", line(sheet.columns), "\\midrule"]
    return "\n".join([*top, *map(line, sheet.rows), "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$"},
    "|": "\\textbar{}",
    **{
        "†": "$^\\dagger$",
        "‡": "$^\\ddagger$",
        "§": "$^\\S$",
        DASH: "--",
        '"': "''",
        "“": "``",
        "”": "''",
        "±": "$\\pm$",
        "−": "$-$",
    },
    **{"≠": "$\\neq$", "×": "$\\times$", "·": "$\\cdot$", "≤": "$\\leq$", "≥": "$\\geq$", "≈": "$\\approx$"},
    **{"→": "$\\rightarrow$", "∞": "$\\infty$", "…": "\\ldots{}", "—": "---", "²": "$^2$", "½": "$\\frac12$"},
    **{"α": "$\\alpha$", "β": "$\\beta$", "γ": "$\\gamma$", "δ": "$\\delta$", "ε": "$\\varepsilon$"},
    **{"λ": "$\\lambda$", "μ": "$\\mu$", "σ": "$\\sigma$", "τ": "$\\tau$", "Δ": "$\\Delta$", "√": "$\\surd$"},
}


def _escaped(text: str) -> str:
    r"""Escape the characters that are commands in LaTeX.

    >>> print(_escaped("dp(sigma=1e-4)_{x} 5–10%"))
    dp(sigma=1e-4)\_\{x\} 5--10\%
    >>> print(_escaped('portfolio(objective="cosine") ≠ ig'))
    portfolio(objective=``cosine'') $\neq$ ig
    """
    return "".join(_LATEX.get(character, character) for character in re.sub('"([^"]*)"', r"“\1”", text))


def _with_math(text: str) -> str:
    r"""Escape the text outside of dollar signs.

    >>> print(_with_math(r"DP & $\sigma=0.1$"), _with_math("5$"))
    DP \& $\sigma=0.1$ 5\$
    """
    parts = text.split("$")
    if len(parts) % 2 == 0:
        return _escaped(text)
    return "".join(f"${part}$" if place % 2 else _escaped(part) for place, part in enumerate(parts))


def named_text(choices: Choices, name: str) -> PlacedText:
    """Return the cell of a defence or an attack: its label, or its text as code."""
    label = choices.label(name)
    return PlacedText(name, code=True) if label == name else PlacedText(label, math=True)


RATES = {"identifiable": "identifiable", "recovered": "recovered", "identified": "identified"}
SCORES = {"ssim": ("SSIM", 2), "psnr": ("PSNR in dB", 1), "mse": ("MSE", 4), "lpips": ("LPIPS", 3)}
"""Scores with their names and decimals."""
METRICS = ("verdict", *RATES, *SCORES, "images", "seconds")
"""What the table of an audit can show."""
_USUAL = ("verdict", "identifiable", "ssim")


DOUBTFUL, INFORMED, CHANGED = "†", "‡", "§"
"""Marks of an attack that may have failed, of one that knows client secrets, and of one that changed the model."""
_MARKS = {
    DOUBTFUL: "the attack is under-optimised or suspect: no proof of protection",
    INFORMED: "knows secrets of the client: an upper bound, no threat",
    CHANGED: "a malicious server, which changes the model that it sends",
}


@dataclass(frozen=True)
class AttackerResult:
    """Result of one attack on one defence, over all seeds."""

    rows: tuple[Row, ...]
    failed: bool
    """Whether the trial of a seed failed, so that the result is incomplete."""
    unfit: bool
    """Whether the attack does not apply to the defence."""
    doubtful: bool

    @cached_property
    def images(self) -> int:
        """Number of attacked images, over all seeds."""
        return sum(row.images for row in self.rows)

    @cached_property
    def identifiable(self) -> int:
        """Number of images recovered and identified."""
        return sum(row.identifiable for row in self.rows)

    @cached_property
    def rate(self) -> float | None:
        """Share of identifiable images, the headline."""
        return self.identifiable / self.images if self.images else None

    @cached_property
    def ssim(self) -> float | None:
        """The mean SSIM of all images."""
        values = self.scores("ssim")
        return fmean(values) if values else None

    def scores(self, name: str) -> list[float]:
        """Return a score of every image that has it."""
        named = [(row.words.headline if name == "ssim" else name, row) for row in self.rows]
        values = (scores.get(key) for key, row in named for _, _, scores in row.scores())
        return [float(value) for value in values if value is not None]

    def hits(self, metric: str) -> int:
        """Count the images that are identifiable, recovered or identified."""
        return sum(getattr(row, metric) for row in self.rows)

    @property
    def informed(self) -> bool:
        """Whether the attacker knows client secrets."""
        return any(row.attacker == "informed" for row in self.rows)

    @property
    def marks(self) -> str:
        """The marks next to its rate."""
        changed = any(row.planted for row in self.rows)
        return (DOUBTFUL if self.doubtful else "") + (INFORMED if self.informed else "") + (CHANGED if changed else "")


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
    findings: Findings
    """The verdicts, the baseline, the control, and what trainings say of costs."""
    choices: TableChoices = ALL

    @property
    def metrics(self) -> Sequence[str]:
        """The metrics that are shown, in order."""
        return self.choices.metrics or _USUAL

    @property
    def costed(self) -> bool:
        """Whether trainings add a column of accuracies."""
        return bool(self.findings.costs) and not self.choices.metrics

    @cached_property
    def usual(self) -> int:
        """Number of images of most entries."""
        counts = Counter(entry.images for entry in self.entries.values() if entry.images)
        return counts.most_common(1)[0][0] if counts else 0

    def strongest(self, defence: str) -> str | None:
        """Return the attack with the highest rate that knows no client secrets; mean SSIM breaks ties."""
        rated = [(attack, self.entries.get((defence, attack))) for attack in self.attacks]
        scores = [
            (entry.rate, entry.ssim or 0.0, attack)
            for attack, entry in rated
            if entry and entry.rate is not None and not entry.informed
        ]
        return max(scores, key=lambda score: score[:2])[2] if len(scores) > 1 else None

    def caption(self) -> str:
        """Describe the numbers of the table; a caption of one's own keeps the threshold, the count and the baseline."""
        seeds = f" over {self.seeds} seeds, each attack run counted separately," if self.seeds > 1 else ""
        count = f"{plural(self.usual, 'image')}{seeds} unless noted"
        shown = listing(text for metric in self.metrics if (text := self._meaning(metric)))
        words = next((row.words for entry in self.entries.values() for row in entry.rows), ExampleWords())
        rates = {*self.metrics} & {*RATES}
        if own := self.choices.headers.get("caption"):
            rule = f"Recovered: an SSIM above {self.threshold:g}; " if rates else ""
            return " ".join([own, words.told(f"{rule}{count}. {self.findings.guess if rates else ''}".rstrip())])
        sentences = [
            f"{self.title}: {shown}; {count}." if shown else f"{self.title}.",
            "Bold: the strongest attacker." if shown else "",
            "Accuracy: of the model in training, with its 95% interval." if self.costed else "",
            self.findings.no_progress if self.costed else "",
            *((self.findings.guess, self.findings.control) if rates else ()),
        ]
        return words.told(" ".join(filter(None, sentences)))

    def _meaning(self, metric: str) -> str:
        """Describe a metric in the caption."""
        if metric == "identifiable":
            rule = f"recovered, with an SSIM above {self.threshold:g}, and identified"
            return f"share of images identifiable ({rule}) with its 95% interval"
        if metric in RATES:
            return f"share of images {metric} with its 95% interval"
        if metric in SCORES:
            return f"mean {SCORES[metric][0]} with its standard deviation over images"
        return {"images": "number of images", "seconds": "working time of the attack"}.get(metric, "")

    def notes(self) -> Iterator[tuple[str, str]]:
        """Explain the marks in the table."""
        used = "".join(entry.marks for entry in self.entries.values())
        return ((mark, meaning) for mark, meaning in _MARKS.items() if mark in used)

    def sheet(self) -> PaperTable:
        """Arrange the entries as a table."""
        header = self.choices.headers.get
        judged = "verdict" in self.metrics
        columns = [
            PlacedText(header("defence", "defence"), math=True),
            *([PlacedText(header("verdict", "verdict"), math=True)] if judged else []),
            *([PlacedText("accuracy")] if self.costed else []),
            *(named_text(self.choices, attack) for attack in self.attacks),
        ]
        rows = [
            [
                named_text(self.choices, name),
                *([PlacedText(self.verdict(name))] if judged else []),
                *self.accuracy(name),
                *(self.line(name) if {*self.metrics} - {"verdict"} else []),
            ]
            for name in self.defences
        ]
        return PaperTable(self.caption(), columns[: len(rows[0])], rows, list(self.notes()))

    def verdict(self, defence: str) -> str:
        """Return the verdict on a defence, with the count behind it where that is not the headline's."""
        (entry,) = (each for each in self.findings.entries if each.defence == defence)
        leaked = entry.leaked if isinstance(entry, Verdict) else ""
        return LEVELS[entry.level][0].lower() + (f" ({leaked})" if leaked else "")

    def accuracy(self, defence: str) -> list[PlacedText]:
        """Return the accuracy in training with a defence; nothing where no training measured any."""
        cost = self.findings.cost(defence)
        return [PlacedText(cost.accuracy_words if cost else "")] if self.costed else []

    def line(self, defence: str) -> list[PlacedText]:
        """Return the entries of a defence, the strongest attack in bold."""
        best = self.strongest(defence)
        return [self.text(defence, attack, bold=attack == best) for attack in self.attacks]

    def text(self, defence: str, attack: str, bold: bool = False) -> PlacedText:
        """Return an entry: its rate, interval, mean SSIM and exceptions."""
        entry = self.entries.get((defence, attack))
        if entry is None:
            return PlacedText("")
        if entry.rate is None:
            return PlacedText("failed" if entry.failed else UNFIT if entry.unfit else DASH)
        (first, after), *others = (_part(entry, metric) for metric in self.metrics if metric != "verdict")
        rest = "".join(f", {text}{more}" for text, more in others if text)
        rest += (
            f", {plural(entry.images, 'image')}" if entry.images != self.usual and "images" not in self.metrics else ""
        )
        return PlacedText(first or DASH, entry.marks + after + rest + (", a seed failed" if entry.failed else ""), bold)


def _part(entry: AttackerResult, metric: str) -> tuple[str, str]:
    """Return a metric of an entry and its interval or spread; empty where it was not computed."""
    if metric in RATES:
        count = entry.hits(metric)
        return percent(count / entry.images), f" ({interval(*wilson(count, entry.images))})"
    if metric in SCORES:
        values, digits = entry.scores(metric), SCORES[metric][1]
        if not values:
            return "", ""
        return _fixed(fmean(values), digits), f" ± {_fixed(pstdev(values), digits)}"
    if metric == "seconds":
        return duration(sum(row.info.get("seconds") or 0.0 for row in entry.rows)), ""
    return str(entry.images), ""


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def matrices(runs: Sequence[Run], choices: TableChoices = ALL, costs: Costs = MappingProxyType({})) -> list[Matrix]:
    """Make a table per setting of these runs; reject runs with two results for one trial, and choices without a hit.

    `costs` are of trainings with the same data and model.
    """
    rows = [Row(number, trial) for number, trial in enumerate(trial for run in runs for trial in run.trials)]
    owners = [run for run in runs for _ in run.trials]
    shared = {id(run): _shared(run) for run in runs}
    groups: dict[tuple[TrialSetting, str], list[tuple[Row, Run]]] = {}
    for row, owner in zip(rows, owners, strict=True):
        groups.setdefault((row.setting, json.dumps(shared[id(owner)], sort_keys=True)), []).append((row, owner))
    thresholds = {_threshold(row): str(owner.path) for row, owner in zip(rows, owners, strict=True)}
    problems: list[Problem] = []
    if len(thresholds) > 1:
        values = listing(f"{value:g} in {path}" for value, path in thresholds.items())
        problems.append(
            Problem("threshold", f"is {values}: rates above different SSIMs do not compare", "make a table of each")
        )
    refuse([*problems, *(problem for group in groups.values() for problem in _twice(group))])
    titles = distinct_titles(
        [setting.title() for setting, _ in groups], [shared[id(group[0][1])] for group in groups.values()]
    )
    every = zip(titles, groups.items(), strict=True)
    found = [_matrix(setting, title, [row for row, _ in group], costs) for title, ((setting, _), group) in every]
    defences, attacks = ([name for each in found for name in names(each)] for names in (_DEFENCES, _ATTACKS))
    wrong = [*choices.problems(defences, attacks), *choices.wrong_words(METRICS, ("defence", "verdict", "caption"))]
    refuse(wrong)
    kept = [_chosen(each, choices) for each in found]
    return [each for each in kept if each.defences and each.attacks]


_DEFENCES, _ATTACKS = attrgetter("defences"), attrgetter("attacks")


def _chosen(matrix: Matrix, choices: TableChoices) -> Matrix:
    """Select and sort the defences and attacks of a table."""
    defences = choices.sort(name for name in matrix.defences if choices.shows_defence(name))
    attacks = choices.sort(name for name in matrix.attacks if choices.shows_attack(name))
    return replace(matrix, defences=tuple(defences), attacks=tuple(attacks), choices=choices)


_SHARED = ("data", "model", "precision", "server_lr", "budget", "observed")
"""Settings of a run that apply to all of its trials."""
_SELECTION = {"rounds", "audit_at"}
"""Settings of a training that select trials without changing any."""


def _shared(run: Run) -> dict[str, Any]:
    config = run.info["config"]
    plan = {key: value for key, value in (config.get("train") or {}).items() if key not in _SELECTION}
    return {key: config.get(key) for key in _SHARED} | {"train": plan} | file_digests(run.info)


def _twice(group: Sequence[tuple[Row, Run]]) -> Iterator[Problem]:
    owners: dict[tuple[str, str, int], Run] = {}
    for row, owner in group:
        if row.is_control:
            continue
        first = owners.setdefault((row.defence, row.attack, row.seed), owner)
        if first is not owner:
            yield repeated(owner.path, f"'{row.attack}' against '{row.defence}' with seed {row.seed}", first.path)


def repeated(path: Path | None, trial: str, first: Path | None) -> Problem:
    """Return the problem of a run that repeats a trial of another run."""
    return Problem(str(path), f"has {trial}, and so has {first}", "leave one of them out, or make a table of each")


def _matrix(setting: TrialSetting, title: str, rows: Sequence[Row], costs: Costs) -> Matrix:
    finished = [row for row in rows if row.trial.failed is None]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in rows if not row.is_control):
        groups.setdefault((row.defence, row.attack), []).append(row)
    entries = {key: _entry(group, finished) for key, group in groups.items()}
    defences, attacks = (tuple(dict.fromkeys(key[axis] for key in groups)) for axis in (0, 1))
    seeds = len({row.seed for row in rows})
    return Matrix(setting, title, _threshold(rows[0]), seeds, defences, attacks, entries, Findings(tuple(rows), costs))


def _threshold(row: Row) -> float:
    return float(row.info.get("threshold", 0.5))


def _entry(group: Sequence[Row], others: Sequence[Row]) -> AttackerResult:
    finished = tuple(row for row in group if row.trial.failed is None)
    doubtful = any(examine(row, others).state in ("under-optimised", "suspect") for row in finished if row.images)
    broken, unfit = (any(flags) for flags in ((r.trial.broken for r in group), (r.trial.unfit for r in group)))
    return AttackerResult(finished, broken, unfit, doubtful)
