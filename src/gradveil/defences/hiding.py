"""The table's defences of each local step that choose by the data where to hide it: Soteria, Outpost."""

from __future__ import annotations

from typing import Literal

from gradveil.core.allowed import STRENGTH
from gradveil.core.arguments import Argument
from gradveil.defences.base import Defence, chain
from gradveil.defences.entry import PRUNED, DefenceEntry
from gradveil.defences.outpost import PERCENT, Outpost
from gradveil.defences.soteria import DELTA, PERCENTILE, VARIANT, Soteria


def _soteria(percentile: float, delta: float, variant: Literal["paper", "published_code"]) -> Defence:
    return Defence("soteria", step=chain(soteria=Soteria(percentile, delta, variant)))


def _outpost(scale: float, prune: float, phi: float, beta: float) -> Defence:
    return Defence("outpost", step=chain(outpost=Outpost(scale, prune, phi, beta)))


HIDING = (
    DefenceEntry(
        name="soteria",
        factory=_soteria,
        description="Zero the classifier's columns of the features that depend most on the inputs for their size",
        changes=("step",),
        guarantee=Soteria.guarantee,
        cost="a backward pass for every feature: 55 gradients of a small CNN; all bytes but the classifier's columns",
        citation="Sun et al. 2021, Soteria: Provable Defense against Privacy Leakage in Federated Learning (CVPR)",
        adaptive=PRUNED,
        arguments=(
            Argument("percentile", PERCENTILE, 60.0),
            Argument("delta", DELTA, 0.1),
            Argument("variant", VARIANT, "paper"),
        ),
        identity={"percentile": 0.0},
    ),
    DefenceEntry(
        name="outpost",
        factory=_outpost,
        description="Zero small entries and add noise where gradients are large, ever more seldom as training goes on",
        changes=("step",),
        guarantee=Outpost.guarantee,
        cost="a few passes and a random number an entry in each step; 45% of the bytes at first, later more often all",
        citation="Wang, Hugh, Li 2023, More than Enough is Too Much: Adaptive Defenses against Gradient Leakage",
        adaptive=PRUNED,
        arguments=(
            Argument("scale", STRENGTH, 0.8),
            Argument("prune", PERCENTILE, 80.0),
            Argument("phi", PERCENT, 40.0),
            Argument("beta", STRENGTH, 0.125),
        ),
        identity={"prune": 0.0, "scale": 0.0},
    ),
)
"""Entries of the table `gradveil.defences.DEFENCES`, apart from its pruning."""
