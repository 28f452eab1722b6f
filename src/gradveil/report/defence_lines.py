"""The table of defences: verdict, leak, cost and guarantee of each, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.audit.defence_costs import DefenceCost, largest_epsilon_of
from gradveil.audit.findings import Findings, Gap
from gradveil.audit.result_rows import Row, TrialSetting
from gradveil.audit.verdict import Verdict
from gradveil.core.formatting import DASH, percent, plural, size
from gradveil.defences.guarantees import NOTHING
from gradveil.defences.privacy_warnings import reservation
from gradveil.federated.training_groups import proven
from gradveil.report.exhibits import Exhibit

_MARKS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class DefenceLine:
    """A defence in the table. A gap has reasons in place of numbers."""

    name: str
    level: str
    anchor: str = ""
    verdict: Verdict | None = None
    attack: str = ""
    accuracy: str = DASH
    sent: str = DASH
    share: str = ""
    guarantee: str = DASH
    notes: tuple[str, ...] = ()
    """The marks of its footnotes."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class DefenceTable:
    """The table of one setting."""

    setting: TrialSetting
    lines: tuple[DefenceLine, ...]
    footnotes: tuple[tuple[str, str], ...]
    """Mark and text."""

    @property
    def has_accuracy(self) -> bool:
        """Whether any accuracy is known."""
        return any(line.accuracy != DASH for line in self.lines)


def defence_tables(shown: Sequence[Exhibit], result: Findings) -> list[DefenceTable]:
    """Build the table of every setting: verdicts first, then the defences that no trial has a score of."""
    settings = dict.fromkeys([each.verdict.setting for each in shown] + [gap.setting for gap in result.gaps])
    return [
        _table(
            setting,
            [(each, result.cost(each.verdict.defence)) for each in shown if each.verdict.setting == setting],
            [gap for gap in result.gaps if gap.setting == setting],
        )
        for setting in settings
    ]


def _table(
    setting: TrialSetting, here: Sequence[tuple[Exhibit, DefenceCost | None]], gaps: Sequence[Gap]
) -> DefenceTable:
    marks: dict[str, str] = {}
    lines = [_line(each, cost, marks) for each, cost in here]
    lines += [DefenceLine(gap.defence, gap.level, reasons=gap.reasons) for gap in gaps]
    return DefenceTable(setting, tuple(lines), tuple((mark, text) for text, mark in marks.items()))


def _line(exhibit: Exhibit, cost: DefenceCost | None, marks: dict[str, str]) -> DefenceLine:
    verdict = exhibit.verdict
    notes = [_mark(text, marks) for text in _footnotes(verdict, cost)]
    share = verdict.price.share
    return DefenceLine(
        exhibit.name,
        verdict.level,
        f"run-{verdict.best.number}",
        verdict,
        exhibit.attack,
        cost.accuracy_words if cost and verdict.setting.trained is None else percent(accuracy_of(verdict.best)),
        size(verdict.price.sent),
        "" if share is None or verdict.undefended else times(share),
        DASH if verdict.undefended else guarantee_of(verdict.best.info, cost),
        tuple(notes),
    )


def _mark(text: str, marks: dict[str, str]) -> str:
    count = len(marks)
    return marks.setdefault(text, _MARKS[count % 26] * (1 + count // 26))


def _footnotes(verdict: Verdict, cost: DefenceCost | None) -> list[str]:
    """List what the guarantee of a defence takes, and what makes it void."""
    info = verdict.best.info
    if verdict.undefended or guarantee_of(info, cost) == "none":
        return []
    weak = [f"{doubt.capitalize()}."] if (doubt := reservation(largest_epsilon_of(info, cost))) else []
    if cost is not None and cost.proof:
        whole = f"{cost.proof}, for the {plural(cost.rounds, 'round')} of training behind the accuracy."
        return [whole[0].upper() + whole[1:], *weak]
    training = info.get("training") or {}
    planned = bool(info.get("epsilon")) or not training.get("epsilon")
    text = str(info.get("guarantee") if planned else training.get("guarantee"))
    whole = [] if text == guarantee_of(info) else [text[0].upper() + text[1:] + "."]
    return whole + weak + [f"{warning[0].upper()}{warning[1:]}." for warning in info.get("suspicions", ())]


def guarantee_of(info: Mapping[str, Any], cost: DefenceCost | None = None) -> str:
    """Write the guarantee of a trial in a few words, without the reason where there is none.

    The epsilon that goes with a measured accuracy is that of the same training.

    >>> guarantee_of({"guarantee": "no formal guarantee: 'a' looks at data"}), guarantee_of({"epsilon": {"client": 2}})
    ('none', 'epsilon 2 of each client')
    """
    text = cost.proven if cost and cost.proof else proven(info)
    return "none" if text.startswith(NOTHING) else text


def accuracy_of(row: Row) -> float | None:
    """Look up the accuracy at the end of the training, or when the clients were attacked."""
    final = row.summary.get("final_accuracy")
    return row.summary.get("accuracy") if final is None else final


def times(share: float) -> str:
    """Write a ratio.

    >>> times(2.234), times(0.032), times(1.0)
    ('2.2 ×', '0.032 ×', '1 ×')
    """
    return f"{share:.2g} ×"
