"""Quality against budget: what the strongest attackers would have answered after fewer iterations, and is that all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gradveil.audit.health import examine
from gradveil.audit.rows import Row, Setting, Spent
from gradveil.audit.verdict import Verdict
from gradveil.core.words import listing, number, percent
from gradveil.report.plots import series

RISING = 0.02
"""A curve that gained more mean SSIM than this in its last doubling is still rising."""


@dataclass(frozen=True)
class Chart:
    """The curves of one setting: of every defence the strongest attacker that iterates."""

    setting: Setting
    rows: tuple[Row, ...]
    passed_over: tuple[Verdict, ...]
    """Defences whose strongest attacker does not iterate."""
    short: tuple[Row, ...]
    """Curves of attacks that ended above the objective of the true images."""

    @property
    def advice(self) -> str:
        """Say where more iterations would likely help, and where not."""
        rising = [(row, gain) for row in self.rows if (gain := row.last_doubling) is not None and gain > RISING]
        level = [row for row in self.rows if all(row is not other for other, _ in rising)]
        stuck = [row for row in level if any(row is other for other in self.short)]
        other = "; restarts or another attack may" if stuck else ""
        if len(level) > len(stuck) > 0:
            other += f" {_where(stuck)}"
        if not rising:
            flat = f"no mean SSIM rose by more than {RISING} in the last doubling"
            return f"More iterations would hardly help: {flat}{other}."
        who = _where([row for row, _ in rising])
        gains = listing(number(gain, 2) for _, gain in rising)
        rest = f", but hardly {_where(level)}{other}" if level else ""
        return f"More iterations would likely help {who} (mean SSIM rose by {gains} in the last doubling){rest}."

    @property
    def note(self) -> str:
        """Say for which defences the curve is not that of the strongest attacker."""
        if not self.passed_over:
            return ""
        attacks = listing(dict.fromkeys(verdict.best.attack for verdict in self.passed_over))
        where = _where([verdict.best for verdict in self.passed_over])
        return f"The strongest attack {where} ({attacks}) does not iterate: the next strongest stands here."

    @property
    def table(self) -> list[tuple[Row, list[Spent | None]]]:
        """The same as numbers: every curve at the shares of its budget that any curve was noted at."""
        width = max(len(row.curve) for row in self.rows)
        return [(row, [None] * (width - len(row.curve)) + list(row.curve)) for row in self.rows]

    @property
    def shares(self) -> list[str]:
        """Head the columns of the table: every point is at half the budget of the next."""
        width = max(len(row.curve) for row in self.rows)
        return [str(Fraction(1, 2**halving)) for halving in reversed(range(width))]


def charts(judged: Sequence[Verdict]) -> list[Chart]:
    """Choose the curves: a chart a setting, none where no attack iterated."""
    found = []
    for setting in dict.fromkeys(verdict.setting for verdict in judged):
        here = [verdict for verdict in judged if verdict.setting == setting]
        best = [(verdict, next((row for row in verdict.judged if row.curve), None)) for verdict in here]
        rows = tuple(row for _, row in best if row is not None)
        if rows:
            over = tuple(verdict for verdict, row in best if row is not None and row is not verdict.best)
            every = [row for verdict in here for row in verdict.rows]
            short = tuple(row for row in rows if examine(row, every).state == "under-optimised")
            found.append(Chart(setting, rows, over, short))
    return found


def curves(found: Sequence[Chart], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Describe the charts for the page's script; a defence has the colour that it has in the other plots."""
    places = series(rows)
    return [
        {
            "floor": {"asr": _floor(chart.rows, "asr"), "ssim": _floor(chart.rows, "ssim_mean")},
            "lines": [
                {
                    "series": places[row.defence],
                    "name": row.defence_name,
                    "attack": row.attack,
                    "points": [{**spot._asdict(), "lines": list(_told(row, spot))} for spot in row.curve],
                }
                for row in chart.rows
            ],
        }
        for chart in found
    ]


def _told(row: Row, spot: Spent) -> Iterator[str]:
    whole = row.curve[-1].iterations
    yield f"after {spot.iterations:,} iterations" + ("" if spot.iterations == whole else f" of {whole:,}")
    yield f"mean SSIM {number(spot.ssim)} · {percent(spot.asr)} recovered"


def _floor(rows: Sequence[Row], score: str) -> float | None:
    found = [row.floor_of(score) for row in rows]
    return max((value for value in found if value is not None), default=None)


def _where(rows: Sequence[Row]) -> str:
    bare = ["without a defence"] if any(row.undefended for row in rows) else []
    names = [row.defence for row in rows if not row.undefended]
    return listing([*bare, f"against {listing(names)}"] if names else bare)
