"""The outcome of a run as text: the verdict first, one table of defences, and what has to be known to read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.audit.display import result_table
from gradveil.audit.findings import Findings, Gap, explained
from gradveil.audit.health import coincidence
from gradveil.audit.rows import Row
from gradveil.audit.summary import summarise
from gradveil.audit.threat import scope, threat_model
from gradveil.audit.verdict import LEVELS, Level, Verdict
from gradveil.core.words import DASH, interval, listing, percent, size
from gradveil.defences.privacy import NOTHING

_STYLES: Mapping[Level, str] = {
    "broken": "bold red",
    "leaks": "bold yellow",
    "inconclusive": "yellow",
    "not tested": "yellow",
    "not broken": "green",
}


def print_outcome(
    console: Console, found: Findings, config: Mapping[str, Any], *, every: bool = False, explain: bool = False
) -> None:
    """Print verdict, tables and remarks. `config` is the run's resolved configuration."""
    console.print(Text(f"Verdict: {found.sentence}", style="bold"), soft_wrap=True)
    console.print()
    console.print(verdict_table(found))
    if every or (found.finished and not found.verdicts):
        console.print()
        console.print(result_table([row.cell for row in found.rows]))
    remarks = [*remarks_on(found, config), *(definitions(found, config) if explain else ())]
    more = [told for told, shown in (("Definitions: --explain.", explain), ("Every trial: --all.", every)) if not shown]
    remarks += [" ".join(more)] if more else []
    console.print()
    console.print("\n".join(remarks), style="dim", markup=False)


def verdict_table(found: Findings) -> Table:
    """Lay the verdicts out: one row per defence, at its strongest trial by an attacker that knows no client secrets."""
    rows = found.entries
    clients = len({each.setting.client for each in rows}) > 1
    trained = any(each.setting.trained is not None for each in rows)
    accuracy = trained and any(verdict.best.summary["accuracy"] is not None for verdict in found.verdicts)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("defence", *(("client",) if clients else ()), *(("round",) if trained else ())):
        table.add_column(title, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for title in ("identifiable", "95% CI", "baseline", "risk over baseline"):
        table.add_column(title, justify="right", no_wrap=title != "risk over baseline")
    table.add_column("strongest attack", overflow="fold")
    for title in (*(("accuracy",) if accuracy else ()), "bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in rows:
        where = [each.defence, *([each.setting.client] if clients else [])]
        where += [str(each.setting.trained)] if trained else []
        label = Text(LEVELS[each.level][0].upper(), style=_STYLES[each.level])
        if isinstance(each, Gap):
            table.add_row(*where, label, *[DASH] * (6 + accuracy))
        else:
            good = [percent(each.best.summary["accuracy"])] if accuracy else []
            table.add_row(*where, label, *headline(each), Text(strongest(each)), *good, size(each.price.sent))
    return table


def headline(verdict: Verdict) -> tuple[str, str, str, str]:
    """Write the numbers of a verdict: identifiable images, interval, baseline, risk."""
    risk = verdict.risk
    return (
        f"{verdict.identifiable}/{verdict.images} {percent(verdict.rate):>5}",
        interval(*verdict.interval),
        percent(verdict.baseline),
        f"{percent(risk.value)} ({interval(risk.low, risk.high)})",
    )


def strongest(verdict: Verdict) -> str:
    """Name the attack that a verdict quotes, and its attacker where there is a defence to know."""
    kind = verdict.best.attacker
    return verdict.best.attack if kind == "undefended" else f"{verdict.best.attack} [{kind}]"


def remarks_on(found: Findings, config: Mapping[str, Any]) -> Iterator[str]:
    """Collect what has to be known to read the table: undecided verdicts, the control, conditions, the scope."""
    yield from found.notes()
    yield from trained_on(found)
    if found.control:
        yield found.control
    yield from failures(found)
    yield from conditions(found.rows)
    yield scope([row for row in found.finished if not row.is_control], config)


def trained_on(found: Findings) -> Iterator[str]:
    """Report how many of the images that a batch defence made, and the client trained on, came back."""
    for verdict in found.verdicts:
        mine = [test for test in verdict.tests if test.criterion == "recovered as trained on"]
        if mine:
            most = max(mine, key=lambda test: test.observed)
            yield (
                f"{verdict.defence}: {most.observed} of {most.images} images recovered as the client trained on them "
                f"({most.attack}); guessing is expected to reach {most.expected:.2g}."
            )


def failures(found: Findings) -> Iterator[str]:
    """Name the trials that failed where others on the same defence did not: a gap names its own."""
    gaps = {(gap.setting, gap.defence) for gap in found.gaps}
    for row in found.rows:
        if row.cell.broken and not row.is_control and (row.setting, row.defence) not in gaps:
            yield f"{row.attack} against {row.defence}, seed {row.seed}, failed: {row.cell.failed}."


def conditions(every: Sequence[Row]) -> Iterator[str]:
    """Name what spoils or limits the results: guarantees, beliefs, warnings, changes in the model."""
    rows = [row for row in every if row.cell.failed is None]
    yield from (f"{row.attack} against {row.defence}: {alike}." for row in rows if (alike := coincidence(row)))
    for promise, names in _promises(rows).items():
        if promise in ("none", NOTHING):
            yield f"No formal guarantee: {listing(names)}."
        else:
            yield f"Formal guarantee of {listing(names)}: {promise}."
    yield from (f"Believed {row.defence}: {note}." for row, note in _notes(rows))
    doubts = dict.fromkeys(f"{row.defence}: {doubt}" for row in rows for doubt in row.info.get("suspicions", ()))
    yield from (f"Privacy warning: {doubt}." for doubt in doubts)
    diverged = sum(summarise(row.cell)["statuses"].get("diverged", 0) for row in rows)
    if diverged:
        whose = "1 victim's attack" if diverged == 1 else f"{diverged} victims' attacks"
        yield f"{whose} diverged and count{'s' if diverged == 1 else ''} as failed."
    changed = list(dict.fromkeys(change for row in every for change in row.info.get("prepared", ())))
    if changed:
        yield f"Changed in the model: {'; '.join(changed)}."


def definitions(found: Findings, config: Mapping[str, Any]) -> Iterator[str]:
    """Define the threat model and the words and columns of the tables."""
    rows = found.finished
    threshold = next((row.info["threshold"] for row in rows if "threshold" in row.info), 0.5)
    if rows:
        yield f"Threat model: {threat_model(rows, config)}"
    if any(row.images for row in rows):
        yield f"Recovered: SSIM to the true image above {threshold:g}."
    yield from explained(found)
    if any(row.attacker == "informed" for row in rows):
        yield "Rates of informed attackers are upper bounds, no part of a verdict."
    yield "Floor: the share of images that the best guess, which sees no update, recovers."
    yield "Distance: of the sent update to the same model's without noise, clipping and pruning, relative."
    if any(row.setting.trained is not None for row in rows):
        yield "Round: of the training, after which clients were attacked. Accuracy: the model's then."


def _notes(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """List what contradicts the belief in a defence, or had to be assumed of it, once each."""
    said = {(row.defence, note): row for row in rows for note in row.info.get("notes", ())}
    return [(row, note) for (_, note), row in said.items()]


def _promises(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Group the defences by what is proven of them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if not row.undefended and row.info.get("guarantee") and row.defence not in found.get(row.info["guarantee"], []):
            found.setdefault(str(row.info["guarantee"]), []).append(row.defence)
    return found
