"""What has to be shown of a defence that Gradveil does not know, before it counts as not broken.

General attacks see structure of entries and few numbers. What mixes many entries can be undone by those who know how:
an attack of the user's own code has to be among those that failed, and the run has to show that it undoes something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradveil.audit.attack_check import SOUND, examine
from gradveil.audit.attack_selection import ADAPTIVE, attacks_against, make_name
from gradveil.audit.baselines import expected_of, leaks
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import listing, number
from gradveil.core.text_form import bare

_LEFT_OUT = (
    "Gradveil does not know what this defence does, and not all general attacks were made on it to the end. "
    "Left out or stopped early: {}. --attack adaptive makes all, or shows that one does not apply; --iterations and "
    "--budget say how long."
)
_UNOPPOSED = (
    "General attacks miss what the author of a defence that Gradveil does not know could undo: attack it with code "
    "that is written against it (--attack module:Name), and in the same run a weaker setting of the defence, behind "
    "which that code finds the examples and searches find none."
)
_UNSHOWN = (
    "Nothing shows that the code which is written against a defence that Gradveil does not know undoes it: that takes "
    "a weaker setting of the defence in the same run, behind which that code finds at least half of the examples and "
    "the searches of adaptive, which undo nothing, find none: quiet noise hides nothing from these."
)

_MOST = 0.5
"""The share of its iterations or epochs that a budget leaves an attack at least that counts as made."""


def unopposed(passed: Sequence[Row], seeds: set[int], here: Sequence[Row], unfit: Sequence[Row]) -> Iterator[str]:
    """Say which attacks are missing on an unknown defence: general ones, and one that is shown to undo something.

    `passed` are its adaptive trials that passed the attack check, `seeds` those that are judged, `here` all trials of
    the setting, `unfit` those whose attack does not apply.
    """
    if missing := list(dict.fromkeys(text for row in passed for text in left_out(row, here, unfit))):
        yield _LEFT_OUT.format(listing(missing))
    own = [row for row in passed if row.info.get("custom") and not _truth_fits_better(row, here)]
    if {row.seed for row in own} != seeds:
        yield _UNOPPOSED
        yield from dict.fromkeys(_doubted(row, here) for row in here if _is_own(row, passed[0]) and row not in own)
    elif {row.seed for row in own if _undone(row, here, unfit)} != seeds:
        yield _UNSHOWN


def basis(passed: Sequence[Row], here: Sequence[Row], unfit: Sequence[Row]) -> list[str]:
    """Say which attacks of the user's own a verdict rests on, and what shows that they undo something."""
    shown = ((row, _undone(row, here, unfit)) for row in passed if row.info.get("custom"))
    return list(
        dict.fromkeys(
            f"it rests on {row.attack}, which has to undo this setting as it undoes {other.defence} "
            f"({max(other.recovered, other.identifiable)} of {other.counted(other.images)})."
            for row, other in shown
            if other is not None
        )
    )


def _is_own(row: Row, judged: Row) -> bool:
    same = (row.defence, row.attacker) == (judged.defence, "adaptive")
    return same and bool(row.info.get("custom")) and not row.is_control


def _truth_fits_better(row: Row, here: Sequence[Row]) -> bool:
    """Report whether the true examples fit better than the answer, if by too little for the attack check to object.

    A longer or better search of the user's own would then find something else.
    """
    return examine(row, here).state == "converged"


def _doubted(row: Row, here: Sequence[Row]) -> str:
    """Say why an attack of the user's own does not count."""
    found = examine(row, here)
    end, truth = (number(row.health(name)) for name in ("objective", "objective_truth"))
    better = f"the true {row.words.plural} fit better ({truth}) than its answer ({end}): a longer search may find them"
    return f"{row.attack} does not count here: {better if found.state == 'converged' else found.words}."


def left_out(row: Row, here: Sequence[Row], unfit: Sequence[Row]) -> list[str]:
    """List the attacks of `adaptive` on the defence of a row, whatever the update is, that its seed lacks.

    What stopped early shows nothing.
    """
    made = [each for each in _general(row, here) if not _stopped_early(each, here)]
    done = [_settings(each.attack) for each in (*made, *_general(row, unfit))]
    learns = expected_of(row, "recovered") is not None  # without public examples there is nothing to learn from
    texts = map(make_name, attacks_against([ADAPTIVE], row.defence, public=learns, kind=row.words.kind))
    wanted = {text: _settings(text) for text in texts}
    telling = {setting for settings in wanted.values() for setting in settings}
    named = [{key: value for key, value in settings.items() if key in telling} for settings in done]
    return [text for text, settings in wanted.items() if settings not in named]


def _general(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Find the trials of general attacks on the same defence and seed, of attackers who know no client secrets."""
    beside = (each for each in rows if (each.defence, each.seed) == (row.defence, row.seed) and not each.is_control)
    # One that does not apply has no attacker.
    return [each for each in beside if not each.info.get("custom") and each.info.get("attacker") != "informed"]


def _stopped_early(row: Row, here: Sequence[Row]) -> bool:
    """Report whether a search did not reach the objective of the true examples, or a budget left an attack too little.

    What learns seldom reaches that objective, however long it learns.
    """
    short = row.method == "search" and examine(row, here).state == "under-optimised"
    return short or (row.budget_share or 1) < _MOST


def _settings(attack: str) -> dict[str, str]:
    """Split an attack's text into its settings, and its name under an empty one.

    >>> _settings("portfolio(undo_entries=true, iterations=9)")
    {'': 'portfolio', 'undo_entries': 'true', 'iterations': '9'}
    """
    name, _, inner = attack.partition("(")
    pairs = (each.partition("=") for each in inner.removesuffix(")").split(", ") if each)
    return {"": name} | {key: value for key, _, value in pairs}


def _undone(own: Row, here: Sequence[Row], unfit: Sequence[Row]) -> Row | None:
    """Find the trial in which an attack of the user's own undoes another setting of the same defence, on the same seed.

    It finds at least half of the examples there, and searches that undo nothing find none: behind quiet noise every
    search finds them.
    """
    for other in here:
        if (other.attack, other.seed) != (own.attack, own.seed) or other.is_control or other.defence == own.defence:
            continue
        if bare(other.defence) != bare(own.defence) or max(other.asr, other.identifiable / other.images) < SOUND:
            continue
        searches = [row for row in _general(other, here) if row.method == "search" and not _undoes(row)]
        if leaks(other) and not any(map(leaks, searches)) and not left_out(other, here, unfit):
            return other
    return None


def _undoes(row: Row) -> bool:
    """Report whether a general attack reads the defence backwards."""
    return "undo_entries" in _settings(row.attack)
