"""The catalogue of defences: names as papers and people use them, and the texts that name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any, Literal

from gradveil.core.chain import chain
from gradveil.core.errors import fail
from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.settings import BOUND, COUNT, KEPT, REQUIRED, SHARE, STRENGTH, Argument, Flag, TextValue
from gradveil.core.text_form import read
from gradveil.core.types import Transform
from gradveil.core.user_code import imported
from gradveil.defences.additive_noise import ON, Gaussian, Laplacian
from gradveil.defences.aligned import SELECTION, VOTERS, Aligned
from gradveil.defences.ats import HYBRID, Ats
from gradveil.defences.batch_defences import CAP, LEAST, MIX, MIXED, InstaHide, LabelSmoothing, Mixup
from gradveil.defences.composition import Defence
from gradveil.defences.compression import COMPRESSING
from gradveil.defences.dp import Clip, FadingClip, FadingNoise
from gradveil.defences.entry import DECOYS, DUAL, FEEDBACK, KNOWING, ORDERED, PLANTED, DefenceEntry, Slot
from gradveil.defences.error_feedback import Feedback
from gradveil.defences.feature_hiding import HIDING
from gradveil.defences.model_defences import (
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
from gradveil.defences.optimal import INFORMED
from gradveil.defences.pruning import SCOPE, Dual, Magnitude
from gradveil.defences.user_defence import own_defence


def _dp(clip: float, sigma: float, on: Literal["sum", "mean"]) -> Defence:
    """DP-SGD: clip each example's gradient to `clip`, then add noise of std sigma * clip on the sum (or mean)."""
    return Defence("dp", step=chain(clip=Clip(clip, per_example=True), noise=_scaled("dp", clip, sigma, on)))


def _fed_cdp(clip: float, sigma: float, decay: float) -> Defence:
    """Clip each tensor of each example's gradient, and add noise; both are multiplied by `decay` after every round.

    The authors' schedule could not be verified; this one keeps the noise multiplier, and so what is proven.
    """
    by_layer, noise = Clip(clip, per_example=True, scope="layer"), _scaled("fed-cdp", clip, sigma, "sum")
    if decay != 1:
        by_layer, noise = FadingClip(**_settings(by_layer), decay=decay), FadingNoise(**_settings(noise), decay=decay)
    return Defence("fed-cdp", step=chain(clip=by_layer, noise=noise))


def _user_dp(clip: float, sigma: float) -> Defence:
    return Defence("user-dp", send=chain(clip=Clip(clip), noise=_scaled("user-dp", clip, sigma, "mean")))


def _settings(transform: Clip | Gaussian) -> dict[str, Any]:
    return {field.name: getattr(transform, field.name) for field in fields(transform)}


def _scaled(name: str, clip: float, sigma: float, on: Literal["sum", "mean"]) -> Gaussian:
    if sigma and clip == float("inf"):
        raise fail(f"{name}.clip", "is infinite, and the noise is sigma times as large", "give a finite norm")
    return Gaussian(sigma * clip if sigma else 0.0, on, scaled_to=clip)


PRIVATE = (
    DefenceEntry(
        name="dp",
        factory=_dp,
        description="DP-SGD: clip each example's gradient, add normal noise of sigma times the clip norm",
        changes=("step",),
        guarantee="differential privacy of examples; epsilon follows from sigma, sampling rate and steps",
        cost="2 gradients; all bytes",
        citation="Abadi et al. 2016, Deep Learning with Differential Privacy",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 20.0), Argument("sigma", STRENGTH, 1e-3), Argument("on", ON, "sum")),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="fed-cdp",
        factory=_fed_cdp,
        description="Fed-CDP: clip each example's gradient layer by layer, add normal noise of sigma times the norm",
        changes=("step",),
        guarantee="differential privacy of examples; over L parameter tensors the sensitivity is clip sqrt(L)",
        cost="about 2 gradients; all bytes",
        citation="Wei et al. 2021, Gradient-Leakage Resilient Federated Learning (ICDCS)",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 4.0), Argument("sigma", STRENGTH, 6.0), Argument("decay", KEPT, 1.0)),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="user-dp",
        factory=_user_dp,
        description="Clip the whole update that a client sends, add normal noise of sigma times the norm",
        changes=("send",),
        guarantee="differential privacy of clients, towards whoever sees one update or a sum of them",
        cost="a random number an entry; all bytes",
        citation="McMahan et al. 2018, Learning Differentially Private Recurrent Language Models (ICLR)",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 1.0), Argument("sigma", STRENGTH, 1.0)),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
)
"""Entries of the table `gradveil.defences.DEFENCES`, after its noise."""


POLICY = TextValue(f'policies of numbered transforms in quotes, as "3-1-7" or "{HYBRID}"')
"""Which of the 50 transforms, in which order."""
SEARCHING = ("cdia(rounds=all, restarts=4, lr=0.1)", "learned")
"""Coefficients, signs and choices are optimised with the images; what cannot be is guessed anew by each restart.

All of them lie between -1 and 1, where the step of 1 that suits images would jump from end to end."""
UNVEILING = (
    "rob(bins=512, undo=true)",
    "rob(bins=512, sparse=true, undo=true)",
    "curious(rows=1024, share=0.03, undo=true)",
    "fishing(simulated_client=full)",
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


def _plugged(plugin: Plugin) -> DefenceEntry:
    """Make the entry of a defence that a package has: its own entry, a defence, or what returns one."""
    found = imported(plugin.path, plugin.path)
    if isinstance(found, DefenceEntry):
        return replace(found, name=plugin.name)
    own = own_defence(plugin.path)
    ready = all(argument.default is not REQUIRED for argument in own.arguments)
    made: Defence | None = own() if ready else None
    slots: tuple[Slot, ...] = ("model", "batch", "step", "send")
    return DefenceEntry(
        name=plugin.name,
        factory=own,
        description=own.description,
        citation="",
        arguments=own.arguments,
        changes=tuple(slot for slot in slots if made is None or getattr(made, slot)),
        guarantee="no formal guarantee: the package says none",
        cost="the package does not say",
        adaptive=KNOWING,
    )


ALL_DEFENCES: Catalogue[DefenceEntry] = Catalogue("defences", "defence", DEFENCES, _plugged)
"""`DEFENCES`, and those of installed packages."""


def parse(text: str, table: Mapping[str, DefenceEntry] = ALL_DEFENCES, own: bool = False) -> Defence:
    """Read a defence; every mistake in the text is reported at once, each with its place.

    The name of the result is its canonical text: reading it gives the same defence. `own=True` reads `pkg.module:name`
    too, by importing it: for texts that say what code to run, such as a run file of one's own, never for a stranger's.

    >>> parse("prune(.5)+dp( clip = 20.0, sigma=1e-4 )").name
    'prune(ratio=0.5) + dp(sigma=0.0001)'
    """
    built = Defence("none")
    for _, part in read(text, table, "defence", own_defence if own else None):
        built = built + part
    return built


def entries(text: str, table: Mapping[str, DefenceEntry] = ALL_DEFENCES) -> list[DefenceEntry]:
    """Look up what a defence is made of: descriptions, guarantees, citations. No import path is followed for it.

    >>> [entry.name for entry in entries("dp(sigma=1) + dropout")]
    ['dp', 'dropout']
    """
    return [entry for entry, _ in read(text, table, "defence")]
