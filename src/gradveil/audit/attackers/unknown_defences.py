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
from gradveil.core.formatting import listing
from gradveil.core.text_form import bare

_LEFT_OUT = (
    "Gradveil does not know what this defence does, and not all general attacks were made on it to the end. "
    "Left out or stopped early: {}. --attack adaptive makes all; --iterations and --budget say how long."
)
_UNOPPOSED = (
    "Gradveil does not know what this defence does, and general attacks miss what its author could undo: attack it "
    "with code that is written against it (--attack module:Name), and in the same run a weaker setting of the defence, "
    "behind which that code finds the examples and searches find none."
)
_UNSHOWN = (
    "Gradveil does not know what this defence does, and nothing shows that the code which is written against it undoes "
    "it: that takes a weaker setting of the defence in the same run, behind which that code finds at least half of the "
    "examples and the searches of adaptive, which undo nothing, find none: quiet noise hides nothing from these."
)


def unopposed(passed: Sequence[Row], seeds: set[int], here: Sequence[Row], unfit: Sequence[Row]) -> Iterator[str]:
    """Say which attacks are missing on an unknown defence: general ones, and one that is shown to undo something.

    `passed` are its adaptive trials that passed the attack check, `seeds` those that are judged, `here` all trials of
    the setting, `unfit` those whose attack does not apply.
    """
    if missing := list(dict.fromkeys(text for row in passed for text in left_out(row, here, unfit))):
        yield _LEFT_OUT.format(listing(missing))
    own = [row for row in passed if row.info.get("custom")]
    if {row.seed for row in own if _works(row, here, unfit)} != seeds:
        yield _UNSHOWN if {row.seed for row in own} == seeds else _UNOPPOSED


def left_out(row: Row, here: Sequence[Row], unfit: Sequence[Row]) -> list[str]:
    """List the attacks of `adaptive` on the defence of a row, whatever the update is, that its seed lacks.

    A search that stopped early shows nothing. What learns seldom reaches the objective of the true examples, however
    long it learns.
    """
    made = [each for each in _general(row, here) if each.method != "search" or not _stopped_early(each, here)]
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
    return examine(row, here).state == "under-optimised"


def _settings(attack: str) -> dict[str, str]:
    """Split an attack's text into its settings, and its name under an empty one.

    >>> _settings("portfolio(undo_entries=true, iterations=9)")
    {'': 'portfolio', 'undo_entries': 'true', 'iterations': '9'}
    """
    name, _, inner = attack.partition("(")
    pairs = (each.partition("=") for each in inner.removesuffix(")").split(", ") if each)
    return {"": name} | {key: value for key, _, value in pairs}


def _works(own: Row, here: Sequence[Row], unfit: Sequence[Row]) -> bool:
    """Report whether an attack of the user's own undoes another setting of the same defence, on the same seed.

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
            return True
    return False


def _undoes(row: Row) -> bool:
    """Report whether a general attack reads the defence backwards."""
    return "undo_entries" in _settings(row.attack)
