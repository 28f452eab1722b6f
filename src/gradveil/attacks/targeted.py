"""Attacks that aim at a defence: the belief simulates it, and the knowledge says what becomes of its randomness.

They are one descent (`ig_scheliga`) with different knowledge, after Scheliga, Mäder, Seeland, "Combining Stochastic
Defenses to Resist Gradient Inversion" and "Dropout is NOT All You Need to Prevent Gradient Leakage".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradveil.attacks.inversion import Inversion
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample
from gradveil.attacks.optimise import Descent, Plateau
from gradveil.attacks.steps import Adam

OWN_DRAWS: dict[str, How] = {"model.*.lock.*": Sample(every_iteration=False), "model.*": Sample()}
"""Who sends the parameters knows the architecture, not its noise: a naive attacker draws it as a client would.

A lock is drawn once, since a client keeps it."""
MASKS: dict[str, How] = {"send.*mask.*": Infer(), "step.*mask.*": Infer()}
"""Masks of pruned entries, read off the zeros of what was sent."""
BORDERS: dict[str, How] = {"send.*border.*": Infer(), "step.*border.*": Infer()}
"""The order of magnitudes: a pruned entry lies beyond the smallest (or largest) that was sent. Charged where broken."""
BATCHES: dict[str, How] = {
    "batch.*.partner": Sample(every_iteration=False),
    "batch.*.choice": Sample(every_iteration=False),
    "batch.*.public": Sample(every_iteration=False),
    "batch.*": Optimise(),
}
"""What was done to the batch: its numbers are optimised; who is mixed with whom and with which public images, and by
which policy an image was transformed, is guessed once in each restart."""
WHITENED: dict[str, How] = {"*.probe": Sample(every_iteration=False), "*.normal.*": Neutral()}
"""Who whitens finds out with directions of his own how much noise an entry was given, and takes the noise as zero."""
INTERVALS: dict[str, How] = {"*.sent.*": Infer()}
"""What was rounded is known to an interval, and only what lies outside of it counts."""
_DROPPED: dict[str, How] = {"model.*.mask": Optimise(weight=1e-4)}


def ig_scheliga() -> Inversion:
    """Inverting gradients as set in "Combining Stochastic Defenses": TV 0.01, plateau 400, at most 20,000 steps."""
    return Inversion(
        "ig-scheliga",
        objective="cosine",
        tv=0.01,
        descent=Descent(
            Adam(lr=1.0, sign="signed"), Plateau(patience=400), iterations=20_000, tolerance=1e-5, patience=4000
        ),
        knowledge=OWN_DRAWS,
    )


def wiig() -> Inversion:
    """WIIG: an attacker who is told every random tensor. Granted knowledge: an upper bound, not a threat."""
    return _targeted("wiig", {**MASKS, "*border.*": Neutral(), "*.sent.*": Neutral(), "*": Known()})


def gpia() -> Inversion:
    """GPIA: the dummy gradient is multiplied by the mask that the sent update's zeros show."""
    return _targeted("gpia", {**MASKS, **OWN_DRAWS})


def vbia() -> Inversion:
    """VBIA: a bottleneck's noise is optimised together with the inputs, from a draw of its law."""
    return _targeted("vbia", {"model.*.eps": Optimise(), **OWN_DRAWS})


def dpia() -> Inversion:
    """DPIA: additive noise is optimised together with the inputs and held to its law by its negative log density."""
    return _targeted("dpia", {**OWN_DRAWS, "step.*": Optimise(weight=1e-6), "send.*": Optimise(weight=1e-6)})


def pig() -> Inversion:
    """PIG: layers that a bottleneck's noise reaches (its decoder and all after it) are left out of the distance."""
    return replace(_targeted("pig", OWN_DRAWS), belief="naive", ignore="stochastic")


def dia() -> Inversion:
    """DIA: one mask a dropout layer is optimised together with the inputs, kept in [0, 1] and near its rate."""
    descent = Descent(
        Adam(lr=0.1, sign="signed"), Plateau(patience=800), iterations=20_000, tolerance=1e-5, patience=4000
    )
    return replace(_targeted("dia", {**_DROPPED, **OWN_DRAWS}), tv=1e-5, descent=descent)


def cdia() -> Inversion:
    """CDIA, the combined targeted attack: what the defence hides is read off the update, else optimised.

    Masks of pruned entries come from the zeros; dropout masks (kept near their rate) and bottleneck noise are optimised
    with the inputs, and so are the numbers by which images are mixed or transformed; additive noise is taken as zero,
    its mean. Against an undefended client this is `ig-scheliga`.
    """
    return _targeted("cdia", {**_DROPPED, "model.*": Optimise(), **BATCHES, **MASKS})


def _targeted(name: str, knowledge: Mapping[str, How]) -> Inversion:
    return replace(ig_scheliga(), name=name, belief="full", knowledge=dict(knowledge))
