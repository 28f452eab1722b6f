"""The attack check: whether a low rate can be blamed on the defence, or comes from a broken attack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradveil.audit.baselines import expected_of, identifies, leaks
from gradveil.audit.observe import plain_name
from gradveil.audit.result_rows import Row
from gradveil.core.formatting import number, percent, plural

FELL = 0.9
"""An objective that ends above this share of its start did not fall."""
SOUND = 0.5
"""An attack that recovers fewer undefended images than this is no measure of a defence."""

WORSE = 1e-3
"""An answer fits the median layer worse than an exact truth does if it is this far from the update (1 - cosine)."""

CLEAR = 4.0
"""The truth is clearly likelier than an answer if the log-likelihood of the whole update is so many spreads larger."""

_ORDERS = frozenset({"schedule", "inclusion"})
"""The tensors that say which examples were in which local step."""

State = Literal["effective", "converged", "ambiguous", "under-optimised", "suspect", "no ground truth"]
"""The outcomes of an attack check; `STATES` has the words."""

STATES: dict[State, tuple[str, str]] = {
    "effective": (
        "effective",
        "it recovers at least half of the images, or identifies some, beyond what guessing explains",
    ),
    "converged": ("converged", "it recovers few images, or those that a guess does, and nothing points to a fault"),
    "ambiguous": ("ambiguous", "other images fit the update as well as the true ones: more iterations do not help"),
    "under-optimised": (
        "under-optimised",
        "it stopped above the objective of the true images, fits noise where they fit better what has less of it, or "
        "cannot tell while another attack shows that they explain the update better: a low rate does not show "
        "protection",
    ),
    "suspect": (
        "suspect",
        "it diverged, does no better without a defence, fits the update worse than the true images do, takes "
        "noise that values share for independent noise, or is custom and cannot tell its objective at the true images "
        "(has no `evaluate`): "
        "a low rate does not show protection",
    ),
    "no ground truth": (
        "no ground truth",
        "the true images were not recorded: see how far the objective fell, and look at the images",
    ),
}
"""Label and meaning of every outcome of an attack check."""

PASSED = frozenset[State]({"effective", "converged", "ambiguous"})
"""The outcomes where a low rate can be blamed on the defence."""

PLAIN = frozenset[State]({"effective", "converged"})
"""The outcomes that need no explanation next to a low rate."""


@dataclass(frozen=True)
class Health:
    """The outcome of an attack check, with its reasons."""

    state: State
    reasons: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The state in a word or two."""
        return STATES[self.state][0]

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons why a low rate may not be the defence's doing."""
        return self.reasons if self.state in ("under-optimised", "suspect") else ()

    @property
    def words(self) -> str:
        """The state with the first clause of its first reason."""
        return f"{self.label}, {_clause(self.reasons[0])}" if self.doubts else self.label


def _clause(reason: str) -> str:
    """Cut a reason after its first clause, which says what happened; the rest has numbers and advice.

    >>> _clause("its objective did not fall (1 at the start, 0.9 at the end), which strong noise can cause too")
    'its objective did not fall'
    """
    return _END_OF_CLAUSE.split(reason, maxsplit=1)[0]


_END_OF_CLAUSE = re.compile(r": | \(|, so ")


def examine(row: Row, rows: Sequence[Row]) -> Health:
    """Check the attack of a trial against the other trials of its run; reasons are in the words of its examples."""
    found = _examined(row, rows)
    return Health(found.state, tuple(map(row.words.told, found.reasons)))


def _examined(row: Row, rows: Sequence[Row]) -> Health:
    """Check the attack of a trial.

    A rate that is high was not reached by a broken attack. A low one may be low because the attack is broken, because
    it stopped early, or because its objective prefers other images: then the update does not say enough. That takes
    images which fit the update as well as the true ones do: priors of the objective that outweigh a worse fit show
    nothing of the update.
    """
    if row.trial.unscored is not None:
        return Health("no ground truth", (row.trial.unscored,))
    if row.asr >= SOUND and leaks(row):
        return Health("effective")
    found = complaints(row, rows)
    short = [*([_short(row)] if _side(row) == "above" else ()), *_unlikely(row)]
    if short:
        return Health("under-optimised", (*short, *found))
    if not found and row.info.get("custom") and _side(row) == "unknown":
        found = [
            "it has no objective that can be computed at the true images, so nothing shows that it aims at this client"
        ]
    if found:
        return Health("suspect", tuple(found))
    if _side(row) == "unknown":
        if row.budget_share is not None:
            return Health("under-optimised", (f"{_stopped(row)}, and its objective at the true images is not known",))
        if beaten := _beaten_by_truth(row, rows):
            return Health("under-optimised", (beaten,))
    if identifies(row):  # the update singles images out, whatever else fits it
        return Health("effective")
    return Health("ambiguous", (_misled(row),)) if _side(row) == "below" else Health("converged")


def _side(row: Row) -> Literal["above", "below", "between", "unknown"]:
    """Say where the attack's final objective lies beside that of the true images."""
    end, truth = row.health("objective"), row.health("objective_truth")
    if end is None or truth is None:
        return "unknown"
    unit = _unit(row)
    # Within 5%, or within rounding where the true images have the objective 0.
    if end <= truth + 0.05 * abs(truth) + 1e-6 * unit:
        return "below"
    return "above" if _exceeds(end, truth, 1e-4 * unit) else "between"


def misses_truth(row: Row) -> bool:
    """Return whether an attack stopped above the objective of the true examples: a longer one may find them."""
    return _side(row) == "above"


def _unit(row: Row) -> float:
    start = row.health("objective_initial")
    return 1.0 if start is None else min(abs(start), 1.0)  # squares of short updates are small everywhere


def _exceeds(end: float, truth: float, least: float) -> bool:
    return end > truth + max(0.5 * abs(truth), least)


def _unexplained(row: Row) -> Iterator[str]:
    """List where the answer fits the update worse than the true images do, if not its objective says so already."""
    if _side(row) == "above" or _ignores(row):
        return
    known = _side(row) != "unknown"
    end, truth, others = (row.health(name) for name in ("match", "match_truth", "match_others"))
    # Where a defence adds the same to every update, all images are at tiny distances from it.
    unit = _unit(row) if others is None else min(_unit(row), others)
    if end is not None and truth is not None and _exceeds(end, truth, 1e-4 * unit):
        compared = f"the distance from the update is {number(end)} at the answer and {number(truth)} at the true images"
        if known:
            yield f"its prior decides, and not the update: without priors {compared}, so a weaker prior may do better"
        else:
            yield f"its answer explains the update worse than the true images do: {compared}, so a search may do better"
    end, truth, others = (row.health(name) for name in ("layers", "layers_truth", "layers_others"))
    if (
        end is not None
        and truth is not None
        and _exceeds(end, truth, WORSE * (1.0 if others is None else min(others, 1.0)))
    ):
        why = "few layers decide its objective" if known else "its answer explains few layers"
        yield (
            f"{why}: in the median layer the distance from the update is "
            f"{number(end)} at the answer and {number(truth)} at the true images (1 - cosine), "
            "so an attack that weighs the layers otherwise may do better"
        )


def _unlikely(row: Row) -> Iterator[str]:
    """Say where the true images explain the update better, once entries are weighed by the noise that is on them."""
    gap, spreads = row.health("truth_likelier"), row.health("truth_likelier_z")
    if gap is not None and spreads is not None and spreads > CLEAR and not _ignores(row):
        yield (
            "it fits the noise: given how much noise the client adds to each value, the log-likelihood of the update "
            f"is larger by {number(gap)} at the true images than at the answer ({number(spreads)} times its spread "
            "over the values), so an attack that weighs values by their noise may do better"
        )


def _beaten_by_truth(row: Row, rows: Sequence[Row]) -> str:
    """Name another attack on the same updates whose answers fit them worse than the true images; empty where none.

    An attack that cannot tell its objective at the true images may have missed what the updates say.
    """
    if row.undefended or _ignores(row):
        return ""
    for other in rows:
        same = (other.defence, other.setting, other.seed) == (row.defence, row.setting, row.seed)
        if not same or other.is_control or _ignores(other):
            continue
        if _side(other) == "above" or any(_unexplained(other)) or any(_unlikely(other)):
            return (
                f"its objective at the true images is not known, and they explain the update better than what "
                f"{other.attack} found: a search that finds them may exist"
            )
    return ""


def _shared(row: Row) -> Iterator[str]:
    """Say where noise is shared by entries, so that weighing each by itself shows nothing."""
    shared = row.health("noise_shared")
    if shared is not None and shared > 1 and not _ignores(row):
        yield (
            "its noise is shared by entries: sums or differences of values of the update may cancel it, or few guesses "
            "undo it, and neither the attack's objective nor its likelihood, which take each value by itself, try that"
        )


def _ignores(row: Row) -> bool:
    """Report whether the attack simulates a client without the defence, whose updates the true images need not fit."""
    return row.attacker in ("naive", "aware") and not row.undefended


def _compared(row: Row) -> str:
    return f"{number(row.health('objective'))} reached, {number(row.health('objective_truth'))} at the true images"


def _short(row: Row) -> str:
    if row.method == "closed form":  # without a search there is nothing to give more of
        more = "its equations do not hold for what was sent, or leave too much open: a search"
    else:
        more = "more epochs or public images" if row.method == "learned" else "more iterations or restarts"
    if row.budget_share is not None:
        return (
            f"{_stopped(row)}, before it reached the objective of the true images ({_compared(row)}): {more} may help"
        )
    return (
        f"it did not reach the objective that the true images have ({_compared(row)}): "
        f"{more} may do better, so do not read this as protection"
    )


def _stopped(row: Row) -> str:
    return f"the budget stopped it at {percent(row.budget_share)} of its iterations"


def _misled(row: Row) -> str:
    why = "the update does not say enough to single out the true ones"
    if row.method == "closed form" and row.local:
        why = "the closed form takes local steps for one gradient, and a search that simulates them may do better"
    elif row.info["in_parts"] and not _ORDERS & {plain_name(name) for name in row.secrets}:
        why = (
            "the attacker does not know which examples the client took in which local step, and the true images do not "
            "fit its assumption; order=drawn with restarts tries other orders, order=told measures what knowing it adds"
        )
    elif row.attacker in ("naive", "aware"):
        why = "they fit the client that the attack simulates, and an attacker who knows the defence may do better"
    return f"the attacker's objective is satisfied by other images ({_compared(row)}): {why}"


def controls_of(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Find the attacks on the undefended update to hold a trial against: the same attack if it was run, else all.

    The same attack may have run with another simulated client, which makes no difference without a defence.
    """
    bare = [r for r in _undefended(row, rows) if r.planted == row.planted]
    exact = [r for r in bare if r.attack == row.attack]
    if row.info.get("custom"):  # nothing else is known to be like it
        return exact
    # What an attacker achieves who was told secrets says nothing of those who were not; nor what a malicious server
    # reads off its own model of those who search.
    return exact or [r for r in bare if r.preset == row.preset] or [r for r in bare if r.attacker != "informed"]


def _undefended(row: Row, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r.undefended and r.setting == row.setting and r.seed == row.seed]


def complaints(row: Row, rows: Sequence[Row]) -> list[str]:
    """List the reasons to distrust a low success rate of this trial, in words; none for an attack in good health."""
    found = [*_unexplained(row), *_shared(row)]
    start, end = row.health("objective_initial"), row.health("objective")
    # Where noise drowns the update, even the true images have nearly the objective of random ones.
    if start is not None and end is not None and end > FELL * start and _side(row) != "below":
        found.append(
            f"its objective did not fall ({number(start)} at the start, {number(end)} at the end), "
            "which strong noise can cause too"
        )
    if end is None and row.images:
        found.append("no restart ended with a finite objective")
    diverged = row.health("diverged")
    if diverged is not None and diverged >= 0.5:
        found.append(f"{percent(diverged)} of its runs diverged")
    if not row.undefended:
        controls = controls_of(row, rows)
        if not controls:
            who = " by such an attacker" if _undefended(row, rows) else ""
            what = f"the undefended update was not attacked{who} in this run"
            found.append(f"{what}, so nothing shows that the attack works")
        elif (best := max(controls, key=lambda r: (r.asr >= SOUND and leaks(r), r.asr))).asr < SOUND:
            found.append(f"it recovers only {best.recovered} of {best.images} images without any defence")
        elif not leaks(best):
            found.append(
                f"it recovers {best.recovered} of {best.images} images without any defence, but {_guess(best)}"
            )
    elif row.asr >= SOUND and not leaks(row):
        found.append(_guess(row))
    return found


def _guess(row: Row) -> str:
    guess = (expected_of(row, "recovered") or 0.0) / row.images
    return f"that is no more than guessing explains (the best guess is expected to recover {percent(guess)})"


def coincidence(row: Row) -> str:
    """Say that the wrong target clients are recovered as often as the right ones; empty where they are not."""
    wrong = row.control("wrong_target_client")
    if wrong is None or not 0 < row.asr <= wrong:
        return ""
    return f"scored against other target clients, the same reconstructions pass as often ({percent(wrong)}): " + (
        "these images are alike, and the rate singles nobody out"
    )


def unused_rounds(row: Row) -> str:
    """Say which of the rounds that the server watched an attack left out, and how to use them; empty where none.

    Such an attack may pass its attack check, but shows nothing of what all rounds together tell.
    """
    used, watched = row.rounds_used, row.setting.round + 1
    if used is None:
        words = f"nothing says which of the {watched} rounds it used, so it shows nothing of all of them"
        return f'{words}: if it uses all, give it the attribute rounds = "all"'
    if not (left := watched - len(used)):
        return ""
    others = f"the other {plural(left, 'round')} {'was' if left == 1 else 'were'} not used"
    remedy = "let it use all of them" if row.info.get("custom") else "--attack 'portfolio' or averaging"
    return f"{others}: {remedy}"


def guesses(row: Row) -> bool:
    """Report whether an adaptive attack leaves to chance what the defence randomises inside the client's model.

    Masks and bottleneck samples can be searched for, and a network can be trained on what every draw of them does to an
    update. An attack that draws them again, or takes them to be off, does no better than a non-adaptive one.
    """
    if row.attacker != "adaptive" or row.method == "learned":
        return False
    drawn: dict[str, str] = row.info.get("drawn") or {}  # a defence given as an object does not name its slots
    searched = {"optimise", "infer"}
    if any(name.startswith("model.") and how not in searched for name, how in drawn.items()):
        return True
    inside = {"model", "batch"} & {*(row.changes or ()), *(name.partition(".")[0] for name in drawn)}
    ways = {how for name, how in row.info["knowledge"].items() if name.startswith(("model.", "batch.", "*"))}
    return bool(inside) and not ways & searched


def descent(row: Row) -> str:
    """Say how far the objective fell from the random images that the attack started at, and where the truth lies."""
    start, end, truth = (row.health(name) for name in ("objective_initial", "objective", "objective_truth"))
    if start is None and end is None:
        return ""
    aim = "" if truth is None else f", true {row.words.plural} {number(truth)}"
    return f"objective {number(start)} → {number(end)}{aim}"
