"""A gate for continuous integration: whether a rate that counts is above a limit, and whether that can be said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradveil.audit.attacker import ATTACKERS
from gradveil.audit.rows import Row
from gradveil.audit.store import Run
from gradveil.audit.verdict import LEVELS, Verdict, strength, verdicts
from gradveil.core.words import percent, plural


@dataclass(frozen=True)
class Gate:
    """What a run comes to beside a limit on the attack success rate."""

    limit: float
    counted: tuple[Row, ...]
    """The cells that the verdicts on defences are over, highest rate first; or those on no defence."""
    obstacles: tuple[str, ...]
    """Why nobody can say that all rates stay within the limit: what failed, diverged, is missing or untested."""
    unproven: tuple[str, ...]
    """Defences whose low rate shows little, with what the verdict says of them."""

    @property
    def above(self) -> tuple[Row, ...]:
        """The cells above the limit, highest rate first."""
        return tuple(row for row in self.counted if row.asr > self.limit)

    @property
    def passed(self) -> bool:
        """Whether every rate that counts is known and within the limit."""
        return bool(self.counted) and not self.above and not self.obstacles


def gate(run: Run, limit: float) -> Gate:
    """Hold a run against a limit.

    The undefended update is a control, and counts only where nothing else was attacked. Attackers who were told secrets
    give upper bounds and never count.
    """
    every = [Row(place, cell) for place, cell in enumerate(run.cells)]
    rows = [row for row in every if not _control(row)] or every
    whole = [row for row in every if row.cell.failed is None and row.images]
    places = {row.number for row in rows}
    judged = [verdict for verdict in verdicts(whole) if verdict.best.number in places]
    counted = [row for verdict in judged if verdict.best.attacker != "informed" for row in verdict.judged]
    obstacles = [
        *_missing(run),
        *(f"{called(row)} failed: {row.cell.failed}" for row in every if row.cell.broken),
        *_unmet(every),
        *(f"{called(row)} has no score" for row in rows if row.cell.failed is None and not row.images),
        *(_untested(verdict) for verdict in judged if verdict.best.attacker == "informed"),
        *(_diverged(row) for row in counted if row.asr <= limit < _at_worst(row)),
    ]
    unproven = (
        f"{verdict.best.defence} ({LEVELS[verdict.level][0].lower()})"
        for verdict in judged
        if verdict.level in ("not tested", "inconclusive")
    )
    return Gate(
        limit,
        tuple(sorted(counted, key=strength, reverse=True)),
        tuple(obstacles),
        tuple(dict.fromkeys(unproven)),
    )


def called(row: Row) -> str:
    """Name a cell in a sentence."""
    info = row.info
    rounds = info.get("trained")
    when = "" if rounds is None else f", after {plural(rounds, 'round')}"
    return f"{row.attack} against {row.defence}, {info['client']}, seed {row.seed}{when}"


def _control(row: Row) -> bool:
    """Whether a cell only shows what an attack can do. Recorded updates are what they are, whatever is believed."""
    return row.undefended and "observed" not in row.info


def _missing(run: Run) -> Iterator[str]:
    there: set[str] = {str(cell.info.get("cell")) for cell in run.cells}
    planned = run.info["cells"]
    if missing := [name for name in planned if name not in there]:
        yield f"{len(missing)} of {plural(len(planned), 'cell')} {'is' if len(missing) == 1 else 'are'} not done"


def _unmet(every: Sequence[Row]) -> Iterator[str]:
    """Name each defence to which no attack of the run applies."""
    settings = {(row.setting, row.defence): row for row in every if row.cell.unfit}
    for row in every:
        if not row.cell.unfit:
            settings.pop((row.setting, row.defence), None)
    for row in settings.values():
        yield f"no attack of this run applies to {row.defence} ({row.info['client']}): add --attack adaptive"


def _untested(verdict: Verdict) -> str:
    remedy = "add an attack that is told none" if verdict.undefended else "add --attack adaptive"
    who = f"everybody who attacked {verdict.best.defence} ({verdict.setting.client})"
    return f"{who} {ATTACKERS['informed'][0]}, which gives upper bounds only: {remedy}"


def _lost(row: Row) -> int:
    """Count the images that an attack which diverged did not recover."""
    return sum(
        not image["success"]
        for record in row.cell.records
        if record["status"] == "diverged"
        for image in record.get("per_image", ())
    )


def _at_worst(row: Row) -> float:
    """Take what diverged for recovered: a run that broke shows no protection."""
    return (row.recovered + _lost(row)) / row.images


def _diverged(row: Row) -> str:
    count = row.statuses["diverged"]
    return (
        f"{called(row)}: {count} of {plural(len(row.cell.records), 'victim')} ended in divergence, and had they been "
        f"recovered, the rate would be {percent(_at_worst(row))}"
    )
