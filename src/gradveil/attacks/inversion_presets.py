"""Presets of the one loop: attacks that simulate a defence, and attacks that search the images of a generator.

They are one descent (`ig_scheliga`) with different knowledge, after Scheliga, Mäder, Seeland, "Combining Stochastic
Defenses to Resist Gradient Inversion" and "Dropout is NOT All You Need to Prevent Gradient Leakage".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import Descent, Plateau
from gradveil.attacks.inversion.image_sources import Trained, Untrained
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam, RMSprop
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample

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
    return replace(_targeted("pig", OWN_DRAWS), simulated_client="naive", ignore="stochastic")


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
    return replace(ig_scheliga(), name=name, simulated_client="full", knowledge=dict(knowledge))


def grnn() -> Inversion:
    """GRNN: a generator learns from each update alone to draw its images and labels, from numbers that stay.

    Squared distance and its root, total variation 1e-3, RMSprop of step size 1e-4 and momentum 0.99, 1,000 iterations.
    """
    return Inversion(
        "grnn",
        objective="l2-and-norm",
        tv=1e-3,
        descent=Descent(RMSprop(lr=1e-4, momentum=0.99), iterations=1000),
        labels="joint",
        images=Untrained(latent=128),
        knowledge=OWN_DRAWS,
    )


def gias() -> Inversion:
    """GIAS: what a generator draws from is searched, then each row's own weights of the generator."""
    return Inversion(
        "gias",
        objective="cosine",
        tv=1e-4,
        descent=Descent(Adam(lr=0.1), iterations=2000),
        restarts=4,
        images=Trained(tuned=0.5),
        knowledge={"public": Known(), **OWN_DRAWS},
    )


def ggl() -> Inversion:
    """GGL: what a generator draws from evolves (CMA-ES, 500 generations of 50), and the defence is simulated.

    Clips are those of the client, masks are read off the zeros, the label off the last layer.
    """
    return Inversion(
        "ggl",
        objective="l2",
        descent=Descent(CMAES(), iterations=500),
        restarts=50,
        images=Trained(),
        labels="idlg",
        simulated_client="full",
        knowledge={"public": Known(), **MASKS, **OWN_DRAWS},
    )
