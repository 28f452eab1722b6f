"""The catalogue of attacks: the papers' as settings of the one loop, closed forms, malicious servers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.closed_form.layer_by_layer import Recursive
from gradveil.attacks.inversion.descent import Cosine, Descent, StepSchedule
from gradveil.attacks.inversion.distances import OBJECTIVES
from gradveil.attacks.inversion.image_sources import Images
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import LBFGS, Adam
from gradveil.attacks.inversion_presets import (
    BORDERS,
    INTERVALS,
    MASKS,
    OWN_DRAWS,
    WHITENED,
    cdia,
    dia,
    dpia,
    ggl,
    gias,
    gpia,
    grnn,
    ig_scheliga,
    pig,
    vbia,
    wiig,
)
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample
from gradveil.attacks.learned import Learned
from gradveil.attacks.malicious.fishing import SEARCHED, Fishing
from gradveil.attacks.malicious.planted_block import Imprint, Trap
from gradveil.attacks.many_rounds import Pooled
from gradveil.attacks.undo import undoing
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.settings import Argument, Choice, Flag, NamedEntry, Range, TextValue
from gradveil.core.text_form import read
from gradveil.core.user_code import imported, own_entry

SETTINGS = (
    Argument("iterations", Range(1, integer=True, optional=True), None),
    Argument("restarts", Range(1, integer=True, optional=True), None),
    Argument("lr", Range(0, low_open=True, optional=True), None),
    Argument("sign", Choice(("plain", "signed", "soft", None)), None),
    Argument("tv", Range(0, optional=True), None),
    Argument("l2", Range(0, optional=True), None),
    Argument("objective", Choice((*OBJECTIVES, None)), None),
    Argument("ignore", Choice(("nothing", "stochastic", None)), None),
    Argument("labels", Choice(("given", "idlg", "unique", "restore", "joint", None)), None),
    Argument("simulated_client", Choice(("naive", "full", None)), None),
    Argument("start", Choice(("normal", "uniform", "solved", None)), None),
    Argument("tolerance", Range(0, optional=True), None),
    Argument("patience", Range(1, integer=True, optional=True), None),
    Argument("keep", Choice(("best", "last", None)), None),
    Argument("report", Range(1, integer=True, optional=True), None),
    Argument("order", Choice(("told", "in-order", "drawn", None)), None),
    Argument("additive", Choice(("neutral", "optimised", "told", "subtracted", None)), None),
    Argument("rounding", Choice(("simulated", "interval", None)), None),
    Argument("whiten", Flag(optional=True), None),
    Argument("pruned", Choice(("free", "ordered", None)), None),
    Argument("step_size", Range(0, low_open=True, optional=True), None),
    Argument("rounds", Choice(("first", "last", "all", None)), None),
    Argument("batchnorm", Range(0, optional=True), None),
    Argument("group", Range(0, optional=True), None),
    Argument("register", Flag(optional=True), None),
    Argument("langevin", Range(0, optional=True), None),
    Argument("halving", Flag(optional=True), None),
    Argument("undo", Flag(optional=True), None),
)
"""What a run file may change about any of these attacks; none means the preset's own."""

_ORDERS: dict[str, How] = {"told": Known(), "in-order": Neutral(), "drawn": Sample(every_iteration=False)}
"""What an attacker makes of which examples were in which local step; `in-order` takes Poisson sampling's mean."""
_ADDITIVE: dict[str, How] = {
    "neutral": Neutral(),
    "optimised": Optimise(weight=1e-6),
    "told": Known(),
    "subtracted": Known(),
}
"""What an attacker makes of noise that was added to what was sent: its mean, or whatever fits best (as DPIA does). An
attack that knows the noise adds it to the simulated update (as WIIG does), or subtracts it from the observed one."""
_PRUNED: dict[str, dict[str, How]] = {"free": dict.fromkeys(BORDERS, Neutral()), "ordered": BORDERS}
"""What an attacker makes of a pruned entry: anything, or what the order of magnitudes allows."""
KNOWN_BY_WORD: dict[str, tuple[str, dict[type[How], str]]] = {
    "order": ("schedule", {Known: "told", Neutral: "in-order", Sample: "drawn"}),
    "additive": ("send.noise", {Neutral: "neutral", Optimise: "optimised", Known: "told"}),
    "rounding": ("send.levels.sent.bias", {Neutral: "simulated", Infer: "interval"}),
    "pruned": ("send.entries.border.bias", {Neutral: "free", Infer: "ordered"}),
}
"""Settings that are words for what an attacker makes of a tensor: a name of that kind, and the word for each way."""
_OF_DEFENCES = {"additive": ("optimised", "told", "subtracted"), "rounding": ("interval",), "pruned": ("ordered",)}
"""Words that say something of a defence: who ignores it has nothing to apply them to."""
_OF_STEPPER = ("lr", "sign")
_OF_DESCENT = ("iterations", "tolerance", "patience", "keep", "report", "halving")


@dataclass(frozen=True)
class AttackEntry(NamedEntry):
    """One named attack. Calling it with settings builds the attack, named by its canonical text."""

    def __call__(self, **values: Any) -> Any:
        """Build the attack; every unknown or impossible setting is refused at once."""
        given = {name: value for name, value in self.filled(values).items() if value is not None}
        return self.built(self.factory(), self.text(values), given)

    def built(self, attack: Any, name: str, given: dict[str, Any]) -> Any:
        """Set the attack's own fields."""
        return replace(attack, name=name, **given)

    def make(self) -> Any:
        """Build the attack with the preset's own settings."""
        return self()


@dataclass(frozen=True)
class InversionEntry(AttackEntry):
    """A setting of the one inversion loop."""

    arguments: tuple[Argument, ...] = SETTINGS

    def built(self, attack: Inversion, name: str, given: dict[str, Any]) -> Inversion:
        """Part the settings into those of the attack, its descent and its steps."""
        if given.get("simulated_client", attack.simulated_client) == "naive":
            refuse(list(self._in_vain(given)))
        if order := given.pop("order", None):
            given["knowledge"] = {"schedule": _ORDERS[order], "inclusion": _ORDERS[order], **attack.knowledge}
        if additive := given.pop("additive", None):
            given["knowledge"] = _with_additive(given.get("knowledge", attack.knowledge), _ADDITIVE[additive])
            given["subtract"] = additive == "subtracted"
        if given.pop("rounding", None) == "interval":
            # First in order and last in say: a preset may have a pattern of this very name.
            given["knowledge"] = {**INTERVALS, **given.get("knowledge", attack.knowledge), **INTERVALS}
        if given.get("whiten"):
            given["knowledge"] = {**WHITENED, **given.get("knowledge", attack.knowledge)}
        if pruned := given.pop("pruned", None):
            given["knowledge"] = {**_PRUNED[pruned], **given.get("knowledge", attack.knowledge)}
        if given.get("undo"):
            given.setdefault("simulated_client", "full")
            given["knowledge"] = undoing(given.get("knowledge", attack.knowledge))
        if given.get("start") == "solved" and given.get("simulated_client", attack.simulated_client) == "full":
            given["knowledge"] = {**given.get("knowledge", attack.knowledge), "public": Known()}
        if given.get("share") is not None:  # a gate is fitted to public images
            given["knowledge"] = {**attack.knowledge, "public": Known()}
        descent = replace(attack.descent, **{n: given.pop(n) for n in _OF_DESCENT if n in given})
        if "sign" in given and not isinstance(descent.stepper, Adam):
            what = f"is a setting of Adam, this attack uses {type(descent.stepper).__name__}"
            raise fail(f"{self.name}.sign", what, "leave it out")
        stepping = {n: given.pop(n) for n in _OF_STEPPER if n in given}
        descent = replace(descent, stepper=replace(descent.stepper, **stepping))
        return replace(attack, name=name, descent=descent, **given)

    def _in_vain(self, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Find what would change nothing, since this attacker ignores the defence."""
        idle = [f"{setting}={given[setting]}" for setting, words in _OF_DEFENCES.items() if given.get(setting) in words]
        for text in [*idle, *(["whiten=true"] if given.get("whiten") else [])]:
            what = "is about a defence, and this attacker ignores it"
            yield Problem(text, what, "set simulated_client=full too, or choose an attack that does: cdia")


def _without(*names: str) -> tuple[Argument, ...]:
    return tuple(argument for argument in SETTINGS if argument.name not in names)


_OF_PIXELS = ("sign", "start", "langevin")
_OF_RESTARTS = ("restarts", "halving", "group", "register")
_COUNT = Range(1, integer=True, optional=True)
UNTRAINED = (Argument("latent", _COUNT, None), Argument("width", _COUNT, None), *_without(*_OF_PIXELS))
"""What may be changed of an attack with a generator that learns from the update alone."""
_LEARNT = (
    *(Argument(name, _COUNT, None) for name in ("latent", "width", "lessons")),
    Argument("prior", Range(0, optional=True), None),
    Argument("generator", TextValue("a module of your own, 'pkg.module:name'"), None),
)
TRAINED = (
    *_LEARNT,
    Argument("tuned", Range(0, 1, high_open=True, optional=True), None),
    Argument("tuning", Range(0, low_open=True, optional=True), None),
    *_without(*_OF_PIXELS),
)
"""The same, of one with a generator that knows images."""
EVOLVED = (*_LEARNT, Argument("population", Range(2, integer=True), 50), *_without(*_OF_PIXELS, *_OF_RESTARTS))
"""The same, where candidates evolve."""


@dataclass(frozen=True)
class GenerativeEntry(InversionEntry):
    """A setting of the one inversion loop in which a generator draws the images."""

    def built(self, attack: Inversion, name: str, given: dict[str, Any]) -> Inversion:
        """Part the generator's settings off."""
        if population := given.pop("population", None):
            given["restarts"] = population
        of_images = {field.name for field in fields(attack.images)} & given.keys()
        images = replace(attack.images, **{n: given.pop(n) for n in of_images})
        refuse(list(self._idle(images, of_images)))
        if getattr(images, "generator", None) is not None:
            knowledge = {n: how for n, how in attack.knowledge.items() if n != "public"}
            attack = replace(attack, knowledge=knowledge)
        return super().built(replace(attack, images=images), name, given)

    def _idle(self, images: Images, said: Collection[str]) -> Iterator[Problem]:
        """Find what was said of a generator and would change nothing."""
        if getattr(images, "generator", None) is not None:
            for setting in sorted({"lessons", "width"} & set(said)):
                what = "is about a generator that the attacker teaches, and he brings one"
                yield Problem(f"{self.name}.{setting}", what, "leave it out")
        if "tuning" in said and not getattr(images, "tuned", 0.0):
            yield Problem(f"{self.name}.tuning", "is the step size of the second part, and there is none", "set tuned")


def _with_additive(knowledge: Mapping[str, How], how: How) -> dict[str, How]:
    """Say what becomes of additive noise: after what is said of masks, before what is said of everything else."""
    ways = {"step.*": how, "send.*": how}
    others = [(pattern, way) for pattern, way in knowledge.items() if pattern not in ways]
    return {**{p: w for p, w in others if p != "*"}, **ways, **{p: w for p, w in others if p == "*"}}


def known_as(attack: Inversion, setting: str) -> str | None:
    """Tell which word of `order`, `additive`, `rounding` or `pruned` a preset's knowledge comes to; None if to none.

    >>> known_as(Inversion("mine"), "additive"), known_as(Inversion("mine", subtract=True), "additive")
    ('neutral', 'subtracted')
    """
    if setting == "additive" and attack.subtract:
        return "subtracted"
    name, words = KNOWN_BY_WORD[setting]
    way = next((how for pattern, how in attack.knowledge.items() if fnmatchcase(name, pattern)), Neutral())
    return words.get(type(way))


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
        descent=Descent(Adam(lr=0.1, sign="signed"), StepSchedule(), iterations=24_000),
        knowledge=OWN_DRAWS,
    )


def fishing() -> Fishing:
    """Fishing for one class by the last layer, then IG; each round that is watched fishes for another class."""
    own = {field.name: getattr(ig(), field.name) for field in fields(Inversion)}
    knowledge = {**MASKS, **OWN_DRAWS}  # with simulated_client=full
    return Fishing(**{**own, "name": "fishing", "labels": "restore", "rounds": "all", "knowledge": knowledge})


def averaging() -> Pooled:
    """IG on the mean of what was sent in all rounds: noise of mean zero, sampling and rounding are averaged away."""
    own = {field.name: getattr(ig_scheliga(), field.name) for field in fields(Inversion)}
    return Pooled(**{**own, "name": "averaging", "rounds": "all"})


def glaus() -> Pooled:
    """GLAUS: magnitudes by how often an entry was sampled, signs by what was seen; then IG, where the paper has DLG."""
    knowledge = {**OWN_DRAWS, "public": Known()}
    return replace(averaging(), name="glaus", simulated_client="full", estimate="ranks", knowledge=knowledge)


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
    *(setting for setting in SETTINGS if setting.name in (*SEARCHED, "simulated_client")),
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


def _plugged(plugin: Plugin) -> NamedEntry:
    """Make the entry of an attack that a package has: its own entry, an attack, or what returns one."""
    found = imported(plugin.path, plugin.path)
    entry = found if isinstance(found, AttackEntry) else own_attack(plugin.path)
    return replace(entry, name=plugin.name)


ALL_ATTACKS: Catalogue[NamedEntry] = Catalogue("attacks", "attack", ATTACKS, _plugged)
"""`ATTACKS`, and those of installed packages."""


def make_attack(text: str, own: bool = False) -> Any:
    """Build an attack from its name and settings; with `own`, one of the user's too: `pkg.module:name`, imported.

    >>> make_attack("ig(iterations=500, restarts=2)").descent.iterations
    500
    """
    built = [attack for _, attack in read(text, ALL_ATTACKS, "attack", own_attack if own else None)]
    if len(built) != 1:
        raise fail("attack", f"'{text}' names {len(built)} attacks", "list several attacks as separate texts")
    return built[0]


def own_attack(path: str) -> NamedEntry:
    """Import a user's own attack, or what returns one; a setting of the one loop takes the settings of all such."""
    entry = own_entry(path, "attack", _is_attack, _named, _MISTAKEN)
    if not entry.arguments and isinstance(made := entry(), Inversion):
        return InversionEntry(path, lambda: made, entry.description, entry.citation)
    return entry


_MISTAKEN = {
    "observations": (
        "is called as an attack, and has no name, simulated client and knowledge",
        "write it as the __call__ of a class that has them",
    )
}


def _is_attack(found: Any) -> bool:
    parts = (("name", str), ("simulated_client", str), ("knowledge", Mapping))
    return callable(found) and all(isinstance(getattr(found, part, None), kind) for part, kind in parts)


def _named(made: Any, name: str) -> Any:
    """Name an attack by its text."""
    if not _is_attack(made):
        what = f"returned {type(made).__name__}, not an attack"
        raise fail(name, what, "return an Inversion, or a callable with a name, a simulated client and a knowledge")
    named = copy.copy(made)
    object.__setattr__(named, "name", name)  # whether it is a frozen dataclass or not
    return named
