"""Defences of the update that ask how strongly each coordinate depends on the inputs."""

from __future__ import annotations

from typing import Literal

from gradveil.core.allowed import BOUND, COUNT, SHARE, STRENGTH, Flag
from gradveil.core.arguments import Argument
from gradveil.defences.base import Defence, chain
from gradveil.defences.entry import FEEDBACK, KNOWING, PRUNED, DefenceEntry
from gradveil.defences.feedback import Feedback
from gradveil.defences.fitted import FORM
from gradveil.defences.optimal import OptimalNoise, OptimalPruning
from gradveil.defences.probed import OF
from gradveil.defences.prune import SCOPE


def _optimal_noise(
    std: float,
    probes: int,
    layerwise: bool,
    clamp: float,
    of: Literal["batch", "example"],
    every: int,
    memory: float,
    form: Literal["local", "global"],
    batches: int,
) -> Defence:
    transform = OptimalNoise(std, probes, layerwise, clamp, of, every, memory, form, batches)
    return Defence("optimal-noise", send=chain(noise=transform))


def _optimal_prune(
    ratio: float,
    scope: Literal["layer", "global"],
    probes: int,
    mixed: bool,
    std: float,
    of: Literal["batch", "example"],
    every: int,
    memory: float,
    feedback: bool,
    form: Literal["local", "global"],
    batches: int,
) -> Defence:
    transform = OptimalPruning(ratio, scope, probes, mixed, std, of, every, memory, form, batches)
    return Defence("prune", send=chain(prune=Feedback(transform) if feedback else transform))


CHEAPER = (Argument("of", OF, "batch"), Argument("every", COUNT, 1), Argument("memory", SHARE, 0.0))
"""Arguments that save directions."""
GLOBAL = (Argument("form", FORM, "local"), Argument("batches", COUNT, 16))
"""Arguments that fit a defence to public images."""

INFORMED = (
    DefenceEntry(
        name="optimal-noise",
        factory=_optimal_noise,
        description="Add normal noise of mean variance std^2, most where it hides most for what it costs",
        changes=("send",),
        guarantee=OptimalNoise.guarantee,
        cost="10 forward-mode passes: 16 to 31 gradients, with cheaper settings 2 to 4, of public images 15 a batch; "
        "all bytes",
        citation="Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        adaptive=(*KNOWING, "cdia(rounds=all, whiten=true)"),
        arguments=(
            Argument("std", STRENGTH),
            Argument("probes", COUNT, 10),
            Argument("layerwise", Flag(), False),
            Argument("clamp", BOUND, float("inf")),
            *CHEAPER,
            *GLOBAL,
        ),
        identity={"std": 0.0},
    ),
    DefenceEntry(
        name="optimal-prune",
        factory=_optimal_prune,
        description="Send zeros in place of the entries that are smallest for what they tell of the inputs",
        changes=("send",),
        guarantee=OptimalPruning.guarantee,
        cost="10 forward-mode passes, 16 gradients, with the cheaper settings of optimal-noise 2 to 4, of public "
        "images 15 a batch; 22% of the bytes at ratio=0.8",
        citation="Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        adaptive=PRUNED,
        arguments=(
            Argument("ratio", SHARE),
            Argument("scope", SCOPE, "global"),
            Argument("probes", COUNT, 10),
            Argument("mixed", Flag(), False),
            Argument("std", STRENGTH, 0.0),
            *CHEAPER,
            FEEDBACK,
            *GLOBAL,
        ),
        identity={"ratio": 0.0},
    ),
)
