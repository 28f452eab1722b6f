"""The table's defences of the batch: softened labels, mixed images."""

from __future__ import annotations

from typing import Literal

from gradveil.core.allowed import SHARE, STRENGTH, Text
from gradveil.core.arguments import Argument
from gradveil.defences.ats import HYBRID, Ats
from gradveil.defences.base import Defence
from gradveil.defences.batch import CAP, LEAST, MIX, MIXED, InstaHide, LabelSmoothing, Mixup
from gradveil.defences.entry import KNOWING, DefenceEntry

POLICY = Text(f'policies of numbered transforms in quotes, as "3-1-7" or "{HYBRID}"')
"""Which of the 50 transforms, in which order."""
SEARCHING = ("cdia(rounds=all, restarts=4, lr=0.1)", "learned")
"""Coefficients, signs and choices are optimised with the images; what cannot be is guessed anew by each restart.

All of them lie between -1 and 1, where the step of 1 that suits images would jump from end to end."""
UNVEILING = (
    "rob(bins=512, undo=true)",
    "rob(bins=512, sparse=true, undo=true)",
    "curious(rows=1024, share=0.03, undo=true)",
    "fishing(belief=full)",
)
"""Malicious servers that read off what the client trained on, and undo the public transforms."""


def _label_smoothing(alpha: float) -> Defence:
    return Defence("label-smoothing", batch=(LabelSmoothing(alpha),))


def _mixup(alpha: float) -> Defence:
    return Defence("mixup", batch=(Mixup(alpha),))


def _instahide(k: int, cap: float, mix: Literal["own", "public"], least: float) -> Defence:
    return Defence("instahide", batch=(InstaHide(k, cap, mix, least),))


def _ats(policy: str | None) -> Defence:
    return Defence("ats", batch=(Ats(policy or HYBRID),))


BATCHING = (
    DefenceEntry(
        name="label-smoothing",
        factory=_label_smoothing,
        description="Train on labels that give every class a little",
        changes=("batch",),
        guarantee="no formal guarantee",
        cost="nothing; all bytes",
        citation="Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision (CVPR)",
        adaptive=KNOWING,
        arguments=(Argument("alpha", SHARE, 0.1),),
        identity={"alpha": 0.0},
    ),
    DefenceEntry(
        name="mixup",
        factory=_mixup,
        description="Train on each image mixed with another of the batch, by one coefficient from Beta(alpha, alpha)",
        changes=("batch",),
        guarantee="no formal guarantee",
        cost="one pass over the images; all bytes",
        citation="Zhang, Cissé, Dauphin, Lopez-Paz 2018, mixup: Beyond Empirical Risk Minimization (ICLR)",
        adaptive=SEARCHING,
        arguments=(Argument("alpha", STRENGTH, 1.0),),
        identity={"alpha": 0.0},
    ),
    DefenceEntry(
        name="instahide",
        factory=_instahide,
        description="Mix k images, of the batch or two of it and public ones, and flip the pixels' signs at random",
        changes=("batch",),
        guarantee="no formal guarantee",
        cost="k passes over the images; all bytes",
        citation="Huang, Song, Li, Arora 2020, InstaHide: Instance-hiding Schemes for Private Distributed Learning",
        adaptive=SEARCHING,
        arguments=(
            Argument("k", MIXED, 4),
            Argument("cap", CAP, 0.65),
            Argument("mix", MIX, "own"),
            Argument("least", LEAST, 0.3),
        ),
    ),
    DefenceEntry(
        name="ats",
        factory=_ats,
        description="ATS: train on images transformed by a policy (shifts, colours, levels), or one of several",
        changes=("batch",),
        guarantee="no formal guarantee",
        cost="some passes over the images, one for each transform; all bytes",
        citation="Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search",
        adaptive=(*SEARCHING, "cdia(undo=true)"),
        malicious=UNVEILING,
        arguments=(Argument("policy", POLICY, HYBRID),),
    ),
)
"""Entries of the table `gradveil.defences.DEFENCES`."""
