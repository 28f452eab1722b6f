"""Attacks that search among the images that a generator can draw, as settings of the one loop."""

from __future__ import annotations

from gradveil.attacks.evolve import CMAES
from gradveil.attacks.images import Trained, Untrained
from gradveil.attacks.inversion import Inversion
from gradveil.attacks.knowledge import Known
from gradveil.attacks.optimise import Descent
from gradveil.attacks.steps import Adam, RMSprop
from gradveil.attacks.targeted import MASKS, OWN_DRAWS


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
        belief="full",
        knowledge={"public": Known(), **MASKS, **OWN_DRAWS},
    )
