"""The optimisation attack: one loop, of which the papers' attacks are settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.attacks.inversion.cma_es import CMAES
    from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau, StepSchedule
    from gradveil.attacks.inversion.distances import OBJECTIVES
    from gradveil.attacks.inversion.generators import Generator
    from gradveil.attacks.inversion.image_sources import Canvas, Drawing, Pixels, Trained, Untrained
    from gradveil.attacks.inversion.inversion import Inversion
    from gradveil.attacks.inversion.optimisers import LBFGS, Adam, RMSprop
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Adam": "gradveil.attacks.inversion.optimisers",
            "CMAES": "gradveil.attacks.inversion.cma_es",
            "Canvas": "gradveil.attacks.inversion.image_sources",
            "Cosine": "gradveil.attacks.inversion.descent",
            "Descent": "gradveil.attacks.inversion.descent",
            "Drawing": "gradveil.attacks.inversion.image_sources",
            "Generator": "gradveil.attacks.inversion.generators",
            "Inversion": "gradveil.attacks.inversion.inversion",
            "LBFGS": "gradveil.attacks.inversion.optimisers",
            "OBJECTIVES": "gradveil.attacks.inversion.distances",
            "Pixels": "gradveil.attacks.inversion.image_sources",
            "Plateau": "gradveil.attacks.inversion.descent",
            "RMSprop": "gradveil.attacks.inversion.optimisers",
            "StepSchedule": "gradveil.attacks.inversion.descent",
            "Trained": "gradveil.attacks.inversion.image_sources",
            "Untrained": "gradveil.attacks.inversion.image_sources",
        },
    )

__all__ = [
    "CMAES",
    "LBFGS",
    "OBJECTIVES",
    "Adam",
    "Canvas",
    "Cosine",
    "Descent",
    "Drawing",
    "Generator",
    "Inversion",
    "Pixels",
    "Plateau",
    "RMSprop",
    "StepSchedule",
    "Trained",
    "Untrained",
]
