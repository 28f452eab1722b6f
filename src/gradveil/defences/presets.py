"""The table of defences: names as papers and people use them, built from transforms and surgeries."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from gradveil.core.allowed import BOUND, COUNT, KEPT, SHARE, STRENGTH, Flag
from gradveil.core.arguments import Argument
from gradveil.core.types import Transform
from gradveil.defences.aligned import SELECTION, VOTERS, Aligned
from gradveil.defences.base import Defence, chain
from gradveil.defences.batching import BATCHING
from gradveil.defences.clip import Clip
from gradveil.defences.compressing import COMPRESSING
from gradveil.defences.entry import DECOYS, DUAL, FEEDBACK, KNOWING, ORDERED, PLANTED, DefenceEntry
from gradveil.defences.feedback import Feedback
from gradveil.defences.hiding import HIDING
from gradveil.defences.informed import INFORMED
from gradveil.defences.model import (
    ACT,
    KERNEL,
    KL,
    PATH,
    PATHS,
    WEIGHT,
    CvbSurgery,
    DropoutSurgery,
    KeyLockSurgery,
    PrecodeSurgery,
)
from gradveil.defences.noise import Gaussian, Laplacian
from gradveil.defences.private import PRIVATE
from gradveil.defences.prune import SCOPE, Dual, Magnitude


def _pruning(transform: Transform, feedback: bool) -> Defence:
    return Defence("prune", send=chain(prune=Feedback(transform) if feedback else transform))


def _topk(keep: float, feedback: bool) -> Defence:
    return _pruning(Magnitude(float(1 - Decimal(repr(float(keep))))), feedback)


def _none() -> Defence:
    return Defence("none")


def _clip(norm: float) -> Defence:
    return Defence("clip", send=chain(clip=Clip(norm)))


def _clip_example(norm: float) -> Defence:
    return Defence("clip-example", step=chain(clip=Clip(norm, per_example=True)))


def _gaussian(std: float) -> Defence:
    return Defence("gaussian", send=chain(noise=Gaussian(std)))


def _laplace(scale: float) -> Defence:
    return Defence("laplace", send=chain(noise=Laplacian(scale)))


def _prune(ratio: float, scope: Literal["layer", "global"], feedback: bool) -> Defence:
    return _pruning(Magnitude(ratio, scope), feedback)


def _dgp(top: float, bottom: float, feedback: bool) -> Defence:
    return _pruning(Dual(top, bottom), feedback)


def _adgp(
    keep: float, top: float, selection: Literal["broadcast", "vote", "previous"], voters: int, feedback: bool
) -> Defence:
    return _pruning(Aligned(keep, top, selection, voters), feedback)


def _dropout(p: float, where: str | None) -> Defence:
    return Defence("dropout", model=(DropoutSurgery(p, where),))


def _precode(k: int, beta: float, position: str | None) -> Defence:
    return Defence("precode", model=(PrecodeSurgery(k, beta, position),))


def _cvb(kernel: int | None, beta: float | None, position: str | None, kl: str) -> Defence:
    return Defence("cvb", model=(CvbSurgery(kernel, beta, position, kl),))


def _keylock(width: int, act: str, position: str | None) -> Defence:
    return Defence("keylock", model=(KeyLockSurgery(width, act, position),))


_ENTRIES = (
    DefenceEntry(
        name="none",
        factory=_none,
        description="No defence: the control of every comparison",
        changes=(),
        guarantee="no formal guarantee",
        cost="nothing; all bytes",
        citation="McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data",
        adaptive=("ig-scheliga",),
        identity={},
    ),
    DefenceEntry(
        name="clip",
        factory=_clip,
        description="Scale the update down to a norm",
        changes=("send",),
        guarantee=Clip.guarantee,
        cost="two passes over the update; all bytes",
        citation="Pascanu et al. 2013, On the difficulty of training recurrent neural networks",
        adaptive=KNOWING,
        arguments=(Argument("norm", BOUND),),
        identity={"norm": float("inf")},
    ),
    DefenceEntry(
        name="clip-example",
        factory=_clip_example,
        description="Scale each example's gradient down to a norm before averaging",
        changes=("step",),
        guarantee=Clip.guarantee,
        cost="about 2 gradients; all bytes",
        citation="Abadi et al. 2016, Deep Learning with Differential Privacy",
        adaptive=KNOWING,
        arguments=(Argument("norm", BOUND),),
        identity={"norm": float("inf")},
    ),
    DefenceEntry(
        name="gaussian",
        factory=_gaussian,
        description="Add normal noise to the update",
        changes=("send",),
        guarantee=Gaussian.guarantee,
        cost="a random number an entry: 1.1 to 1.3 gradients; all bytes",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        adaptive=KNOWING,
        arguments=(Argument("std", STRENGTH),),
        identity={"std": 0.0},
    ),
    DefenceEntry(
        name="laplace",
        factory=_laplace,
        description="Add Laplace noise to the update",
        changes=("send",),
        guarantee=Laplacian.guarantee,
        cost="a random number an entry; all bytes",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        adaptive=KNOWING,
        arguments=(Argument("scale", STRENGTH),),
        identity={"scale": 0.0},
    ),
    *PRIVATE,
    DefenceEntry(
        name="prune",
        factory=_prune,
        description="Send zeros in place of the smallest entries, per layer or over all layers",
        changes=("send",),
        guarantee=Magnitude.guarantee,
        cost="a few passes over the update; 22% of the bytes at ratio=0.8",
        citation="Zhu et al. 2019, Deep Leakage from Gradients",
        adaptive=ORDERED,
        arguments=(Argument("ratio", SHARE), Argument("scope", SCOPE, "layer"), FEEDBACK),
        identity={"ratio": 0.0},
    ),
    DefenceEntry(
        name="topk",
        factory=_topk,
        description="Send only the largest entries of each layer: prune with the share to keep",
        changes=("send",),
        guarantee=Magnitude.guarantee,
        cost="a few passes over the update: 1.1 to 1.3 gradients; 22% of the bytes at keep=0.2",
        citation="Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent",
        adaptive=ORDERED,
        arguments=(Argument("keep", KEPT), FEEDBACK),
        identity={"keep": 1.0},
    ),
    DefenceEntry(
        name="dgp",
        factory=_dgp,
        description="Dual gradient pruning: send zeros in place of each layer's largest and smallest entries",
        changes=("send",),
        guarantee=Dual.guarantee,
        cost="a few passes over the update: 1.1 to 1.4 gradients; 22% of the bytes",
        citation="Xue et al. 2024, Dual Gradient Pruning (AAAI)",
        adaptive=DUAL,
        malicious=(*PLANTED, *DECOYS),
        arguments=(Argument("top", SHARE, 0.05), Argument("bottom", SHARE, 0.75), FEEDBACK),
        identity={"top": 0.0, "bottom": 0.0},
    ),
    DefenceEntry(
        name="adgp",
        factory=_adgp,
        description="Aligned dual gradient pruning: within a public mask, send the largest entries but the very top",
        changes=("send",),
        guarantee=Aligned.guarantee,
        cost="a few passes over the update; 22% of the bytes, and a mask from who chooses it",
        citation="Aligned Dual Gradient Pruning (anonymous preprint), after Xue et al. 2024; two selections are ours",
        adaptive=DUAL,
        malicious=(*PLANTED, *DECOYS),
        arguments=(
            Argument("keep", KEPT, 0.2),
            Argument("top", SHARE, 0.05),
            Argument("selection", SELECTION, "broadcast"),
            Argument("voters", VOTERS, 5),
            Argument("feedback", Flag(), True),
        ),
        identity={"keep": 1.0, "top": 0.0},
    ),
    *COMPRESSING,
    *INFORMED,
    *HIDING,
    *BATCHING,
    DefenceEntry(
        name="dropout",
        factory=_dropout,
        description="Drop activations at random while the gradient is computed",
        changes=("model",),
        guarantee="no formal guarantee",
        cost="a random number for every activation behind it; all bytes",
        citation="Scheliga, Mäder, Seeland 2023, Dropout is NOT All You Need to Prevent Gradient Leakage (AAAI)",
        adaptive=(*KNOWING, "dia"),
        arguments=(Argument("p", SHARE, 0.25), Argument("where", PATHS, None)),
        identity={"p": 0.0},
    ),
    DefenceEntry(
        name="precode",
        factory=_precode,
        description="PRECODE: a variational bottleneck before the last linear layer",
        changes=("model",),
        guarantee="no formal guarantee",
        cost="two more linear layers; their bytes too: 1.7x the bytes of a small CNN",
        citation="Scheliga, Mäder, Seeland 2022, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage",
        adaptive=(*KNOWING, "pig"),
        arguments=(Argument("k", COUNT, 256), Argument("beta", STRENGTH, 1e-3), Argument("position", PATH, None)),
    ),
    DefenceEntry(
        name="cvb",
        factory=_cvb,
        description="CVB: a convolutional variational bottleneck after an early block",
        changes=("model",),
        guarantee="no formal guarantee",
        cost="three more convolutions; their bytes too: 1.1x the bytes of a small CNN",
        citation="Scheliga, Mäder, Seeland 2024, Privacy Preserving Federated Learning with Convolutional Variational "
        "Bottlenecks",
        adaptive=(*KNOWING, "pig"),
        arguments=(
            Argument("kernel", KERNEL, None),
            Argument("beta", WEIGHT, None),
            Argument("position", PATH, None),
            Argument("kl", KL, "exact"),
        ),
    ),
    DefenceEntry(
        name="keylock",
        factory=_keylock,
        description="FedKL: normalise after the first convolution, with scale and shift that each client keeps secret",
        changes=("model",),
        guarantee="no formal guarantee",
        cost="two linear layers more, which the client trains and keeps; all bytes",
        citation="Ren et al. 2023, Gradient Leakage Defense with Key-Lock Module for Federated Learning",
        adaptive=("cdia(rounds=all, lr=0.1)", "learned"),
        arguments=(Argument("width", COUNT, 1024), Argument("act", ACT, "sigmoid"), Argument("position", PATH, None)),
    ),
)

DEFENCES: dict[str, DefenceEntry] = {entry.name: entry for entry in _ENTRIES}
"""Every defence by name. `DEFENCES["dp"](clip=20, sigma=1e-4)` builds one; `gradveil.defences.parse` reads a text."""
