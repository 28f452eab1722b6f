"""What has to be shown of a defence that Gradveil does not know, before it counts as not broken.

General attacks see structure of entries and few numbers. What mixes many entries can be undone by those who know how:
an attack of the user's own code has to be among those that failed, and the run has to show that it undoes something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradveil.attacks.learned import Learned
from gradveil.attacks.protocol import traits
from gradveil.audit.attack_check import SOUND, examine, guesses, misses_truth, unused_rounds
from gradveil.audit.attack_selection import built, general_attacks, is_same_attack
from gradveil.audit.baselines import expected_of, leaks
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import listing, number
from gradveil.core.text_form import bare

_LEFT_OUT = (
    "Gradveil does not know what this defence does, and not all general attacks were made on it to the end. Left out, "
    "failed or stopped early: {}. --attack adaptive makes all, or shows that one does not apply; --iterations and "
    "--budget say how long."
)
_UNOPPOSED = (
    "General attacks miss what the author of a defence that Gradveil does not know could undo: attack it with code "
    "that is written against it (--attack module:Name), and in the same run a weaker setting of the defence, behind "
    "which that code finds the examples and searches find none."
)
_UNSHOWN = (
    "Nothing shows that the code which is written against a defence that Gradveil does not know undoes it. That takes "
    "a weaker setting of the defence in the same run. Behind it that code finds at least half of the examples, and the "
    "general attacks of adaptive that undo nothing find none."
)
_CARRIED = (
    "The defence carries something from round to round, and general attacks do not compare rounds: what it repeats "
    "cancels in their differences. Audit one round (rounds = 1); nothing vouches for several."
)
_LEAST = 0.5
"""An attack that stopped before this share of its iterations or epochs does not count."""


def missing_evidence(
    passed: Sequence[Row], seeds: set[int], here: Sequence[Row], unfit: Sequence[Row]
) -> Iterator[str]:
    """Say which attacks are missing on an unknown defence: general ones, and one that is shown to undo something.

    `passed` are its adaptive trials that passed the attack check, `seeds` those that are judged, `here` all trials of
    the setting, `unfit` those whose attack does not apply.
    """
    if any(row.setting.round and row.info.get("carries") for row in passed):
        yield _CARRIED
    if missing := list(dict.fromkeys(text for row in passed for text in _left_out(row, here, unfit))):
        yield _LEFT_OUT.format(listing(missing))
    counting = _counting(passed, here)
    if {row.seed for row in counting} != seeds:
        yield _UNOPPOSED
        own = (row for row in here if row.defence == passed[0].defence and row.info.get("custom"))
        yield from dict.fromkeys(_doubted(row, here, len(seeds) > 1) for row in own if row not in counting)
    elif {row.seed for row in counting if _undone(row, here, unfit)} != seeds:
        yield _UNSHOWN
        yield from dict.fromkeys(words for row in counting for words in _shortcomings(row, here, unfit))


def basis(passed: Sequence[Row], here: Sequence[Row], unfit: Sequence[Row]) -> list[str]:
    """Say which attacks of the user's own a verdict rests on, and what shows that they undo something."""
    shown = ((row, _undone(row, here, unfit)) for row in _counting(passed, here))
    return list(
        dict.fromkeys(
            f"The verdict on {row.defence} rests on {row.attack}. It undoes {other.defence} "
            f"({max(other.recovered, other.identifiable)} of {other.counted(other.images)}); nothing checks that it "
            "undoes this setting too."
            for row, other in shown
            if other is not None
        )
    )


def _counting(passed: Sequence[Row], here: Sequence[Row]) -> list[Row]:
    """List the attacks of the user's own that count: their answers fit no worse than the true examples.

    Where these fit better, if by too little for the attack check to object, a longer or better search finds them.
    """
    own = (row for row in passed if row.info.get("custom") and not _cut(row))
    return [row for row in own if examine(row, here).state != "converged"]


def _doubted(row: Row, here: Sequence[Row], several: bool) -> str:
    """Say why an attack of the user's own does not count."""
    found = examine(row, here)
    why = found.words
    if row.attacker != "adaptive":
        why = 'it says simulated_client="naive", so it counts as one that ignores the defence'
    elif guesses(row):
        why = "it draws the random values of the model again, instead of searching for them"
    elif left := unused_rounds(row):
        why = left
    elif _cut(row):
        why = "the budget stopped it before half of its iterations"
    elif found.state == "converged":
        end, truth = (number(row.health(name)) for name in ("objective", "objective_truth"))
        why = f"the true {row.words.plural} fit better ({truth}) than its answer ({end}): a longer search may find them"
    where = f" on seed {row.seed}" if several else ""
    return f"{row.attack} does not count here{where}: {why}."


def _left_out(row: Row, here: Sequence[Row], unfit: Sequence[Row]) -> list[str]:
    """List the general attacks on the defence of a row that its seed lacks. What stopped early shows nothing."""
    made = [each for each in _general(row, here) if not _stopped_early(each)]
    done = [each.attack for each in (*made, *_general(row, unfit))]
    public = expected_of(row, "recovered") is not None
    wanted = general_attacks(row.defence, public=public, kind=row.words.kind)
    return [text for text in wanted if not any(is_same_attack(text, other) for other in done)]


def _general(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Find the trials of general attacks on the same defence and seed, of attackers who know no client secrets."""
    beside = (each for each in rows if (each.defence, each.seed) == (row.defence, row.seed) and not each.is_control)
    # One that does not apply has no attacker.
    return [each for each in beside if not each.info.get("custom") and each.info.get("attacker") != "informed"]


def _stopped_early(row: Row) -> bool:
    """Report whether a general attack was not made to its end.

    A search did not reach the objective of the true examples, runs diverged, or a budget or the user left an attack too
    little. What learns seldom reaches that objective, however long it learns.
    """
    if row.method == "search" and misses_truth(row):
        return True
    attack = built(row.attack)
    if isinstance(attack, Learned) and attack.epochs < _LEAST * Learned().epochs:
        return True
    diverged = row.health("diverged") or 0.0
    return _cut(row) or diverged >= _LEAST or (row.method in ("search", "learned") and row.health("objective") is None)


def _cut(row: Row) -> bool:
    """Report whether a budget stopped an attack too early to count."""
    return row.budget_share is not None and row.budget_share < _LEAST


def _undone(own: Row, here: Sequence[Row], unfit: Sequence[Row]) -> Row | None:
    """Find the trial in which an attack of the user's own undoes another setting of the same defence, on the same seed.

    It finds at least half of the examples there, and general attacks that undo nothing find none: behind quiet noise
    every search finds them.
    """
    return next((each for each in _weaker(own, here) if not _shortcoming(each, here, unfit)), None)


def _shortcomings(own: Row, here: Sequence[Row], unfit: Sequence[Row]) -> Iterator[str]:
    """Say why no other setting shows that an attack of the user's own undoes the defence."""
    for other in _weaker(own, here):
        if why := _shortcoming(other, here, unfit):
            yield f"Behind {other.defence} {why}."


def _weaker(own: Row, here: Sequence[Row]) -> list[Row]:
    """List the trials of the same attack on other settings of the same defence."""
    same = (each for each in here if (each.attack, each.seed) == (own.attack, own.seed) and not each.is_control)
    return [each for each in same if each.defence != own.defence and bare(each.defence) == bare(own.defence)]


def _shortcoming(other: Row, here: Sequence[Row], unfit: Sequence[Row]) -> str:
    """Say why an attack of the user's own is not shown to undo this setting; empty where it is."""
    found = max(other.recovered, other.identifiable)
    if not leaks(other) or found < SOUND * other.images:
        return f"{other.attack} finds {found} of {other.counted(other.images)}"
    plain = [row for row in _general(other, here) if not _undoes(row)]
    if finders := [row.attack for row in plain if leaks(row)]:
        return f"{listing(finders)} {'find' if finders[1:] else 'finds'} them too, without undoing anything"
    if missing := _left_out(other, here, unfit):
        return f"these were left out, failed or stopped early: {listing(missing)}"
    return "" if plain else "no general attack was made"


def _undoes(row: Row) -> bool:
    """Report whether a general attack reads the defence backwards, or learns to."""
    return row.method == "learned" or traits(built(row.attack)).undo_entries
