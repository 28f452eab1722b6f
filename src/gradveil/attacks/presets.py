"""The attacks by name: the papers' as settings of the one loop, closed forms, and those of a malicious server."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.fishing import SEARCHED, Fishing
from gradveil.attacks.generative import ggl, gias, grnn
from gradveil.attacks.imprint import Imprint
from gradveil.attacks.inversion import Inversion
from gradveil.attacks.knowledge import Known
from gradveil.attacks.learned import Learned
from gradveil.attacks.optimise import Cosine, Descent, Steps
from gradveil.attacks.pooled import Pooled
from gradveil.attacks.rgap import Recursive
from gradveil.attacks.settings import (
    EVOLVED,
    SETTINGS,
    TRAINED,
    UNTRAINED,
    AttackEntry,
    GenerativeEntry,
    InversionEntry,
)
from gradveil.attacks.steps import LBFGS, Adam
from gradveil.attacks.targeted import MASKS, OWN_DRAWS, cdia, dia, dpia, gpia, ig_scheliga, pig, vbia, wiig
from gradveil.attacks.trap import Trap
from gradveil.core.allowed import Choice, Flag, Range
from gradveil.core.arguments import Argument, Entry
from gradveil.core.errors import fail
from gradveil.core.grammar import read
from gradveil.core.own import own_entry


def dlg() -> Inversion:
    """Deep leakage from gradients: inputs and soft labels together, l2 distance, L-BFGS."""
    return Inversion(
        "dlg",
        objective="l2",
        descent=Descent(LBFGS(lr=1.0), iterations=15_000, tolerance=1e-6, patience=2000),
        restarts=4,
        box=False,
        labels="joint",
        knowledge=OWN_DRAWS,
    )


def idlg() -> Inversion:
    """Improved DLG: the label is read off the last layer, then the inputs are optimised."""
    return replace(dlg(), name="idlg", labels="idlg")


def ig() -> Inversion:
    """Inverting gradients: cosine distance, total variation, signed Adam in the box, steps at 3/8, 5/8, 7/8."""
    return Inversion(
        "ig",
        objective="cosine",
        tv=1e-4,
        descent=Descent(Adam(lr=0.1, sign="signed"), Steps(), iterations=24_000),
        knowledge=OWN_DRAWS,
    )


def fishing() -> Fishing:
    """Fishing for one class by the last layer, then IG; each round that is watched fishes for another class."""
    own = {field.name: getattr(ig(), field.name) for field in fields(Inversion)}
    knowledge = {**MASKS, **OWN_DRAWS}  # with belief=full
    return Fishing(**{**own, "name": "fishing", "labels": "restore", "rounds": "all", "knowledge": knowledge})


def averaging() -> Pooled:
    """IG on the mean of what was sent in all rounds: noise of mean zero, sampling and rounding are averaged away."""
    own = {field.name: getattr(ig_scheliga(), field.name) for field in fields(Inversion)}
    return Pooled(**{**own, "name": "averaging", "rounds": "all"})


def glaus() -> Pooled:
    """GLAUS: magnitudes by how often an entry was sampled, signs by what was seen; then IG, where the paper has DLG."""
    knowledge = {**OWN_DRAWS, "public": Known()}
    return replace(averaging(), name="glaus", belief="full", estimate="ranks", knowledge=knowledge)


def sapag() -> Inversion:
    """SAPAG: a Gaussian kernel over each layer's difference, L-BFGS."""
    return Inversion(
        "sapag",
        objective="sapag",
        descent=Descent(LBFGS(lr=1.0), iterations=2000, tolerance=1e-9, patience=500),
        restarts=4,
        labels="restore",
        knowledge=OWN_DRAWS,
    )


def gi() -> Inversion:
    """GradInversion: l2 matching with TV, l2 and BatchNorm priors, restarts pulled to their mean, Langevin noise.

    The BatchNorm prior takes the running statistics that the model carries (it is left out of a model that has none).
    """
    return Inversion(
        "gi",
        objective="l2",
        tv=1e-4,
        l2=1e-6,
        batchnorm=0.1,
        group=1e-4,
        langevin=0.01,
        restarts=4,
        descent=Descent(Adam(lr=0.1), Cosine(warmup=50), iterations=20_000),
        labels="unique",
        knowledge=OWN_DRAWS,
    )


def gi_strong() -> Inversion:
    """GradInversion that is told the batch's true statistics in every BatchNorm layer: an upper bound."""
    return replace(gi(), name="gi-strong", knowledge={**OWN_DRAWS, "statistics.*": Known()})


_COMBINING = "Scheliga, Mäder, Seeland 2024, Combining Stochastic Defenses to Resist Gradient Inversion"
_GRADINVERSION = "Yin et al. 2021, See through Gradients: Image Batch Recovery via GradInversion (CVPR)"
_DROPOUT = "Scheliga, Mäder, Seeland 2023, Dropout is NOT All You Need to Prevent Gradient Leakage (AAAI)"

_ANALYTIC = (
    "Phong, Aono, Hayashi, Wang, Moriai 2017, Privacy-Preserving Deep Learning: Revisited and Enhanced; "
    "Lu, Zhang, Zhao, Tang, Tan 2022, APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers (CVPR)"
)
_RGAP = "Zhu, Blaschko 2021, R-GAP: Recursive Gradient Attack on Privacy (ICLR)"
_WU = "Wu, Chen, Guo, Weinberger 2023, Learning to Invert: Simple Adaptive Attacks for Gradient Inversion"
_GRNN = (
    "Ren, Deng, Xie 2022, GRNN: Generative Regression Neural Network - A Data Leakage Attack for Federated Learning "
    "(ACM TIST)"
)
_GIAS = "Jeon, Kim, Lee, Oh, Ok 2021, Gradient Inversion with Generative Image Prior (NeurIPS)"
_GGL = (
    "Li, Zhang, Liu, Liu 2022, Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage (CVPR)"
)
_FOUND_LABELS = Argument("labels", Choice(("given", "idlg", "unique", "restore")), "given")
_UNDO = Argument("undo", Flag(), False)
_SOLVED = (_FOUND_LABELS, Argument("prior", Choice(("none", "public")), "none"), _UNDO)
_ROB = "Fowl, Geiping, Czaja, Goldblum, Goldstein 2022, Robbing the Fed: Directly Obtaining Private Data (ICLR)"
_BINS = (
    Argument("bins", Range(2, integer=True), 64),
    Argument("measure", Choice(("brightness", "random")), "brightness"),
    Argument("law", Choice(("normal", "laplace", "empirical")), "normal"),
    Argument("sparse", Flag(), False),
    Argument("gain", Range(0, low_open=True), 1e-3),
    Argument("decoys", Range(0, integer=True), 0),
    _FOUND_LABELS,
    _UNDO,
)
_CURIOUS = (
    "Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot 2023, When the Curious Abandon Honesty (EuroS&P)"
)
_ROWS = (
    Argument("rows", Range(1, integer=True), 256),
    Argument("scale", Range(0, low_open=True), 0.95),
    Argument("std", Range(0, low_open=True), 0.5),
    Argument("share", Range(0, 1, low_open=True, high_open=True, optional=True), None),
    Argument("gain", Range(0, low_open=True), 1e-3),
    Argument("decoys", Range(0, integer=True), 0),
    _FOUND_LABELS,
    _UNDO,
)
_WEN = (
    "Wen, Geiping, Fowl, Goldblum, Goldstein 2022, Fishing for User Data in Large-Batch Federated Learning via "
    "Gradient Magnification (ICML)"
)
_MEAN = "the law of large numbers"
_GLAUS = "Yang et al. 2023 (GLAUS)"
_SEARCHED = tuple(setting for setting in SETTINGS if setting.name in SEARCHED)
_FISHED = (
    Argument("target", Range(0, integer=True), 0),
    Argument("share", Range(0, 1, low_open=True, high_open=True, optional=True), None),
    *(setting for setting in SETTINGS if setting.name in (*SEARCHED, "belief")),
)
_POOLED = tuple(setting for setting in SETTINGS if setting.name in (*SEARCHED, "labels", "halving", "start"))
_SAMPLED = (Argument("estimate", Choice(("ranks", "thresholds")), "ranks"), *_POOLED)
_LEARNED = (
    Argument("epochs", Range(1, integer=True), 30),
    Argument("width", Range(1, integer=True), 1000),
    Argument("features", Range(1, integer=True), 4096),
    Argument("lr", Range(0, low_open=True), 1e-3),
    _FOUND_LABELS,
)

ATTACKS: dict[str, AttackEntry] = {
    entry.name: entry
    for entry in (
        InversionEntry("dlg", dlg, "inputs and labels by L-BFGS on the l2 distance", "Zhu, Liu, Han, NeurIPS 2019"),
        InversionEntry("idlg", idlg, "DLG with the label read off the last layer", "Zhao, Mopuri, Bilen, 2020"),
        InversionEntry("ig", ig, "cosine distance, total variation, signed Adam", "Geiping et al., NeurIPS 2020"),
        InversionEntry("ig-scheliga", ig_scheliga, "IG with TV 0.01 and a plateau schedule", _COMBINING),
        InversionEntry("wiig", wiig, "IG that is told the client's true randomness: an upper bound", _COMBINING),
        InversionEntry("dia", dia, "IG that optimises the dropout masks with the image", _DROPOUT),
        InversionEntry("gpia", gpia, "IG with the pruning mask read off the update's zeros", _COMBINING),
        InversionEntry("vbia", vbia, "IG that optimises the bottleneck's noise with the image", _COMBINING),
        InversionEntry("dpia", dpia, "IG that optimises the additive noise with the image", _COMBINING),
        InversionEntry("pig", pig, "IG that ignores the layers behind a bottleneck's noise", _COMBINING),
        InversionEntry("cdia", cdia, "all that applies: masks inferred, masks and noise optimised", _COMBINING),
        InversionEntry("sapag", sapag, "Gaussian kernel distance a layer", "Wang et al., 2020"),
        InversionEntry("gi", gi, "l2 distance, BatchNorm prior, restarts that agree", _GRADINVERSION),
        InversionEntry("gi-strong", gi_strong, "GI that is told the batch's true BatchNorm statistics", _GRADINVERSION),
        GenerativeEntry("grnn", grnn, "a generator that learns from the update alone", _GRNN, UNTRAINED),
        GenerativeEntry("gias", gias, "a generator that knows images: what it draws, then itself", _GIAS, TRAINED),
        GenerativeEntry("ggl", ggl, "a generator that knows images: what it draws evolves", _GGL, EVOLVED),
        AttackEntry("analytic", Analytic, "the first layer's equations, solved", _ANALYTIC, _SOLVED),
        AttackEntry(
            "r-gap",
            Recursive,
            "each layer's equations, solved from the last to the first",
            _RGAP,
            (_FOUND_LABELS, _UNDO),
        ),
        AttackEntry("rob", Imprint, "a malicious server's imprint block, read off in closed form", _ROB, _BINS),
        AttackEntry("curious", Trap, "a malicious server's trap weights, read off in closed form", _CURIOUS, _ROWS),
        InversionEntry("fishing", fishing, "a malicious server's last layer for one class, then IG", _WEN, _FISHED),
        InversionEntry("averaging", averaging, "IG on the mean of many rounds of one model", _MEAN, _POOLED),
        InversionEntry("glaus", glaus, "a sampler's many rounds: how often entries were sent", _GLAUS, _SAMPLED),
        AttackEntry("learned", Learned, "a network trained on public images and simulated updates", _WU, _LEARNED),
    )
}
"""Every attack that a run file, the command line or `make_attack` can name."""


def make_attack(text: str, own: bool = False) -> Any:
    """Build an attack from its name and settings; with `own`, one of the user's too: `pkg.module:name`, imported.

    >>> make_attack("ig(iterations=500, restarts=2)").descent.iterations
    500
    """
    built = [attack for _, attack in read(text, ATTACKS, "attack", own_attack if own else None)]
    if len(built) != 1:
        raise fail("attack", f"'{text}' names {len(built)} attacks", "list several attacks as separate texts")
    return built[0]


def own_attack(path: str) -> Entry:
    """Import a user's own attack, or what returns one; a setting of the one loop takes the settings of all such."""
    entry = own_entry(path, "attack", _is_attack, _named, _MISTAKEN)
    if not entry.arguments and isinstance(made := entry(), Inversion):
        return InversionEntry(path, lambda: made, entry.description, entry.citation)
    return entry


_MISTAKEN = {
    "observations": (
        "is called as an attack, and has no name, belief and knowledge",
        "write it as the __call__ of a class that has them",
    )
}


def _is_attack(found: Any) -> bool:
    parts = (("name", str), ("belief", str), ("knowledge", Mapping))
    return callable(found) and all(isinstance(getattr(found, part, None), kind) for part, kind in parts)


def _named(made: Any, name: str) -> Any:
    """Name an attack by its text."""
    if not _is_attack(made):
        what = f"returned {type(made).__name__}, not an attack"
        raise fail(name, what, "return an Inversion, or a callable with a name, a belief and a knowledge")
    named = copy.copy(made)
    object.__setattr__(named, "name", name)  # whether it is a frozen dataclass or not
    return named
