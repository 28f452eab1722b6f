"""The catalogue of attacks: inversions, analytic attacks, and malicious servers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from gradveil.attacks.closed_form.defended_layers import r_gap
from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.closed_form.unmix import Unmix
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.image_sources import Images, Trained
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion_presets import (
    BORDERS,
    HELD,
    WHITENED,
    cdia,
    dia,
    dlg,
    dpia,
    ggl,
    gi,
    gi_strong,
    gias,
    gpia,
    grnn,
    idlg,
    ig,
    ig_scheliga,
    pig,
    portfolio,
    sapag,
    sme,
    tableak,
    vbia,
    wiig,
)
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample
from gradveil.attacks.learned import Learned
from gradveil.attacks.malicious.fishing import SEARCHED, Fishing, fishing
from gradveil.attacks.malicious.hidden_units import CopiedRows, QuantileBiases
from gradveil.attacks.malicious.loss_steering import Steering, steering
from gradveil.attacks.malicious.planted_block import Imprint, Trap
from gradveil.attacks.many_rounds import averaging, glaus, right_angles
from gradveil.attacks.sequences.embedding_rows import EmbeddingRows
from gradveil.attacks.sequences.embedding_search import EmbeddingSearch
from gradveil.attacks.sequences.span_attack import SpanAttack, span_rank
from gradveil.attacks.undo_batch_defence import undoing
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.settings import Argument, Choice, NamedEntry, Range, or_none, settings_of
from gradveil.core.text_form import read
from gradveil.core.user_code import imported, own_entry

KNOWN_BY_WORD: dict[str, tuple[str, dict[str, How], str]] = {
    "order": (
        "schedule",
        {"told": Known(), "in-order": Neutral(), "drawn": Sample(every_iteration=False)},
        "Knowledge of the examples of each local step; `in-order` takes the mean of Poisson sampling.",
    ),
    "additive": (
        "send.noise",
        {"neutral": Neutral(), "optimised": HELD, "told": Known(), "subtracted": Known()},
        "Knowledge of additive noise: its mean, the best fit, or its value, added to the simulated update or "
        "subtracted from the observed one.",
    ),
    "pruned": (
        "send.entries.border.bias",
        {"free": Neutral(), "ordered": Infer()},
        "Magnitude of a pruned entry: free, or bound by the order of magnitudes.",
    ),
}
"""Settings that choose the treatment of a kind of tensor: an example of its names, the treatment of each word, help."""
OF_NOISE = (
    Argument(
        "noise_std",
        Range(0),
        help="Standard deviation that optimised additive noise is pulled to per parameter, in units of its own.",
    ),
    Argument("noise_weight", Range(0), help="Weight of that prior, which also pulls the mean of the noise to zero."),
)
"""Settings of the prior of optimised additive noise."""
_IN_ORDER = (
    *(
        "iterations",
        "restarts",
        "lr",
        "sign",
        "tv",
        "tv_end",
        "tv_over",
        "l2",
        "denoise",
        "denoiser",
        "objective",
        "ignore",
        "labels",
        "simulated_client",
        "start",
    ),
    *(
        "tolerance",
        "patience",
        "keep",
        "report",
        "order",
        "additive",
        "noise_std",
        "noise_weight",
        "whiten",
        "pruned",
        "step_size",
        "rounds",
    ),
    *(
        "batchnorm",
        "features",
        "group",
        "register",
        "langevin",
        "halving",
        "median",
        "undo",
        "undo_entries",
        "surrogate",
    ),
)
_DECLARED = {
    **{setting.name: setting for part in (Inversion, Descent, Adam) for setting in settings_of(part)},
    **{name: Argument(name, Choice(tuple(words)), help=help) for name, (_, words, help) in KNOWN_BY_WORD.items()},
    **{argument.name: argument for argument in OF_NOISE},
}
SETTINGS = tuple(or_none(_DECLARED[name]) for name in _IN_ORDER)
"""The settings of inversions; none keeps the preset's value."""
_OF_DEFENCES = {"additive": ("optimised", "told", "subtracted"), "pruned": ("ordered",), "objective": ("likelihood",)}
"""Words about a defence, which have no effect on an attack that ignores the defence."""
_OF_STEPPER = tuple(setting.name for setting in settings_of(Adam))
_OF_DESCENT = tuple(setting.name for setting in settings_of(Descent))


@dataclass(frozen=True)
class AttackEntry(NamedEntry):
    """One named attack. Calling it with settings builds the attack, with its canonical text as name."""

    def __call__(self, **values: Any) -> Any:
        """Build the attack, or raise an error with every invalid setting."""
        given = {name: value for name, value in self.filled(values).items() if value is not None}
        of_factory = {argument.name for argument in settings_of(self.factory)} & given.keys()
        attack = self.factory(**{name: given.pop(name) for name in of_factory})
        return self.built(attack, self.text(values), given)

    def built(self, attack: Any, name: str, given: dict[str, Any]) -> Any:
        """Set the attack's fields."""
        return replace(attack, name=name, **given)

    def make(self) -> Any:
        """Build the attack with the preset's settings."""
        return self()


@dataclass(frozen=True)
class InversionEntry(AttackEntry):
    """A preset of the inversion loop."""

    arguments: tuple[Argument, ...] = SETTINGS

    def built(self, attack: Inversion, name: str, given: dict[str, Any]) -> Inversion:
        """Split the settings into those of the attack, its descent and its optimiser."""
        if given.get("simulated_client", attack.simulated_client) == "naive":
            refuse(list(self._without_effect(given)))
        treatment = {
            setting: words[given[setting]] for setting, (_, words, _) in KNOWN_BY_WORD.items() if setting in given
        }
        if given.pop("order", None):
            given["knowledge"] = {**dict.fromkeys(("schedule", "inclusion"), treatment["order"]), **attack.knowledge}
        if additive := given.pop("additive", None):
            # Additive noise comes after masks and before the pattern of everything else.
            ways = dict.fromkeys(("step.*", "send.*"), treatment["additive"])
            others = {p: how for p, how in given.get("knowledge", attack.knowledge).items() if p not in ways}
            rest = {p: others.pop(p) for p in ("*",) if p in others}
            given["knowledge"] = {**others, **ways, **rest}
            given["subtract"] = additive == "subtracted"
        if held := {argument.name: given.pop(argument.name) for argument in OF_NOISE if argument.name in given}:
            given["knowledge"] = self._held(given.get("knowledge", attack.knowledge), held)
        if given.get("whiten"):
            given["knowledge"] = {**WHITENED, **given.get("knowledge", attack.knowledge)}
        if given.pop("pruned", None):
            orders = dict.fromkeys(BORDERS, treatment["pruned"])
            given["knowledge"] = {**orders, **given.get("knowledge", attack.knowledge)}
        if given.get("undo"):
            given.setdefault("simulated_client", "full")
            given["knowledge"] = undoing(given.get("knowledge", attack.knowledge))
        if given.get("start") == "solved" and given.get("simulated_client", attack.simulated_client) == "full":
            given["knowledge"] = {**given.get("knowledge", attack.knowledge), "public": Known()}
        if given.get("denoise") and given.get("denoiser") is None:  # one is trained on public images
            given["knowledge"] = {**given.get("knowledge", attack.knowledge), "public": Known()}
        if given.get("share") is not None:  # a gate is fitted to public images
            given["knowledge"] = {**attack.knowledge, "public": Known()}
        if given.keys() & {"tv", "tv_end", "sign", "lr"}:  # what is set needs no trying
            given["variants"] = ()
        descent = replace(attack.descent, **{n: given.pop(n) for n in _OF_DESCENT if n in given})
        if "sign" in given and not isinstance(descent.stepper, Adam):
            problem = f"is a setting of Adam, but this attack uses {type(descent.stepper).__name__}"
            raise fail(f"{self.name}.sign", problem, "leave it out")
        stepping = {n: given.pop(n) for n in _OF_STEPPER if n in given}
        descent = replace(descent, stepper=replace(descent.stepper, **stepping))
        return replace(attack, name=name, descent=descent, **given)

    def _held(self, knowledge: Mapping[str, How], held: Mapping[str, float]) -> dict[str, How]:
        """Set the prior of optimised additive noise."""
        changes = {name.removeprefix("noise_"): value for name, value in held.items()}
        ways = {
            pattern: replace(how, **changes)
            for pattern, how in knowledge.items()
            if pattern in ("step.*", "send.*") and isinstance(how, Optimise)
        }
        if not ways:
            problem = "is about additive noise that the attack optimises, and this one does not"
            remedy = "add additive=optimised, or choose dpia"
            refuse([Problem(f"{self.name}.{name}", problem, remedy) for name in held])
        return {**knowledge, **ways}

    def _without_effect(self, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield settings without effect, since this attacker ignores the defence."""
        idle = [f"{setting}={given[setting]}" for setting, words in _OF_DEFENCES.items() if given.get(setting) in words]
        for text in [*idle, *(["whiten=true"] if given.get("whiten") else [])]:
            problem = "is about a defence, and this attacker ignores it"
            yield Problem(text, problem, "set simulated_client=full too, or choose an attack that does: cdia")


def _only(*names: str) -> tuple[Argument, ...]:
    return tuple(setting for setting in SETTINGS if setting.name in names)


def _without(*names: str) -> tuple[Argument, ...]:
    return tuple(setting for setting in SETTINGS if setting.name not in names)


_OF_PIXELS = ("sign", "start", "langevin", "tv_end")
_OF_GENERATOR = {setting.name: or_none(setting) for setting in settings_of(Trained)}
_LEARNT = tuple(_OF_GENERATOR[name] for name in ("latent", "width", "lessons", "prior", "generator"))
UNTRAINED = (_OF_GENERATOR["latent"], _OF_GENERATOR["width"], *_without(*_OF_PIXELS))
"""The settings of an attack with an untrained generator."""
TRAINED = (*_LEARNT, _OF_GENERATOR["tuned"], _OF_GENERATOR["tuning"], *_without(*_OF_PIXELS))
"""The settings of an attack with a trained generator."""
EVOLVED = (*_LEARNT, *settings_of(ggl), *_without(*_OF_PIXELS, "restarts", "halving", "group", "register"))
"""The settings of an attack with a trained generator and a population."""


@dataclass(frozen=True)
class GenerativeEntry(InversionEntry):
    """A preset of the inversion loop in which a generator draws the images."""

    def built(self, attack: Inversion, name: str, given: dict[str, Any]) -> Inversion:
        """Set the generator's settings first."""
        of_images = {field.name for field in fields(attack.images)} & given.keys()
        images = replace(attack.images, **{n: given.pop(n) for n in of_images})
        refuse(list(self._idle(images, of_images)))
        if getattr(images, "generator", None) is not None:
            knowledge = {n: how for n, how in attack.knowledge.items() if n != "public"}
            attack = replace(attack, knowledge=knowledge)
        return super().built(replace(attack, images=images), name, given)

    def _idle(self, images: Images, given: Collection[str]) -> Iterator[Problem]:
        """Yield settings of a generator that have no effect."""
        if getattr(images, "generator", None) is not None:
            for setting in sorted({"lessons", "width"} & set(given)):
                problem = "is about a generator that the attack trains, but this one is custom"
                yield Problem(f"{self.name}.{setting}", problem, "leave it out")
        if "tuning" in given and not getattr(images, "tuned", 0.0):
            yield Problem(f"{self.name}.tuning", "is the step size of the second part, and there is none", "set tuned")


def noise_prior(attack: Inversion, setting: str) -> float | None:
    """Return `noise_std` or `noise_weight` of a preset; None if it does not optimise additive noise.

    >>> noise_prior(Inversion("mine"), "noise_std"), noise_prior(dpia(), "noise_std")
    (None, 1.0)
    """
    known = next((how for pattern, how in attack.knowledge.items() if fnmatchcase("send.noise", pattern)), None)
    return getattr(known, setting.removeprefix("noise_")) if isinstance(known, Optimise) else None


def known_as(attack: Inversion, setting: str) -> str | None:
    """Return the word of `order`, `additive`, `rounding` or `pruned` for a preset's knowledge; None if there is none.

    >>> known_as(Inversion("mine"), "additive"), known_as(Inversion("mine", subtract=True), "additive")
    ('neutral', 'subtracted')
    """
    if setting == "additive" and attack.subtract:
        return "subtracted"
    name, words, _ = KNOWN_BY_WORD[setting]
    known = next((how for pattern, how in attack.knowledge.items() if fnmatchcase(name, pattern)), Neutral())
    return next((word for word, how in words.items() if type(how) is type(known)), None)


_COMBINING = "Scheliga, Mäder, Seeland 2024, Combining Stochastic Defenses to Resist Gradient Inversion"
_GRADINVERSION = "Yin et al. 2021, See through Gradients: Image Batch Recovery via GradInversion (CVPR)"
_SME = (
    "Zhu, Yao, Blaschko 2023, Surrogate Model Extension (SME): A Fast and Accurate Weight Update Attack on Federated "
    "Learning (ICML)"
)
_DROPOUT = "Scheliga, Mäder, Seeland 2023, Dropout is NOT All You Need to Prevent Gradient Leakage (AAAI)"

_ANALYTIC = (
    "Phong, Aono, Hayashi, Wang, Moriai 2017, Privacy-Preserving Deep Learning: Revisited and Enhanced; "
    "Lu, Zhang, Zhao, Tang, Tan 2022, APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers (CVPR)"
)
_RGAP = "Zhu, Blaschko 2021, R-GAP: Recursive Gradient Attack on Privacy (ICLR)"
_UNMIX = (
    "Kariyappa et al. 2023, Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning Using "
    "Independent Component Analysis (ICML); Dimitrov, Baader, Müller, Vechev 2024, SPEAR: Exact Gradient Inversion of "
    "Batches in Federated Learning (NeurIPS)"
)
_WU = "Wu, Chen, Guo, Weinberger 2023, Learning to Invert: Simple Adaptive Attacks for Gradient Inversion"
_GRNN = (
    "Ren, Deng, Xie 2022, GRNN: Generative Regression Neural Network - A Data Leakage Attack for Federated Learning "
    "(ACM TIST)"
)
_GIAS = "Jeon, Kim, Lee, Oh, Ok 2021, Gradient Inversion with Generative Image Prior (NeurIPS)"
_GGL = (
    "Li, Zhang, Liu, Liu 2022, Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage (CVPR)"
)
_ROB = "Fowl, Geiping, Czaja, Goldblum, Goldstein 2022, Robbing the Fed: Directly Obtaining Private Data (ICLR)"
_CURIOUS = (
    "Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot 2023, When the Curious Abandon Honesty (EuroS&P)"
)
_WEN = (
    "Wen, Geiping, Fowl, Goldblum, Goldstein 2022, Fishing for User Data in Large-Batch Federated Learning via "
    "Gradient Magnification (ICML)"
)
_QBI = (
    "Nowak, Strufe, Panchenko et al. 2024, QBI: Quantile-Based Bias Initialization for Efficient Private Data "
    "Reconstruction in Federated Learning"
)
_LOKI = (
    "Zhao, Sharma, Elkordy, Ezzeldin, Avestimehr, Bagchi 2024, LOKI: Large-scale Data Reconstruction Attack against "
    "Federated Learning through Model Manipulation (S&P)"
)
_GEMINIO = "Shan et al. 2025, Geminio: Language-Guided Gradient Inversion Attacks in Federated Learning (ICCV)"
_PORTFOLIO = "Gradveil; Geiping et al. 2020 (breaching) for the variation of colour differences"
_TABLEAK = "Vero, Balunović, Dimitrov, Vechev 2023, TabLeak: Tabular Data Leakage in Federated Learning (ICML)"
_MEAN = "the law of large numbers"
_ANGLES = "the rank of right angles; Johnson, Lindenstrauss 1984 for few rounds"
_GLAUS = "Yang et al. 2023 (GLAUS)"
_FILM = "Gupta et al. 2022, Recovering Private Text in Federated Learning of Language Models (NeurIPS)"
_LAMP = "after Balunović et al. 2022, LAMP: Extracting Text from Gradients with Language Model Priors (NeurIPS)"
_DAGER = "Petrov, Dimitrov, Baader, Müller, Vechev 2024, DAGER: Exact Gradient Inversion for Large Language Models"
_FISHED = (*(s for s in settings_of(Fishing) if s.name in ("target", "share")), *_only(*SEARCHED, "simulated_client"))
_STEERED = (
    *(s for s in settings_of(Steering) if s.name in ("target", "lessons")),
    *_only(*SEARCHED, "simulated_client"),
)
_POOLED = _only(*SEARCHED, "labels", "halving", "start")
_SAMPLED = (*settings_of(glaus), *_POOLED)

ATTACKS: dict[str, AttackEntry] = {
    entry.name: entry
    for entry in (
        InversionEntry("dlg", dlg, "inputs and labels by L-BFGS on the l2 distance", "Zhu, Liu, Han, NeurIPS 2019"),
        InversionEntry("idlg", idlg, "DLG with the label read off the last layer", "Zhao, Mopuri, Bilen, 2020"),
        InversionEntry("ig", ig, "cosine distance, total variation, signed Adam", "Geiping et al., NeurIPS 2020"),
        InversionEntry("ig-scheliga", ig_scheliga, "IG with TV 0.01 and a plateau schedule", _COMBINING),
        InversionEntry("wiig", wiig, "IG with the client's true randomness: an upper bound", _COMBINING),
        InversionEntry("dia", dia, "IG that optimises the dropout masks with the image", _DROPOUT),
        InversionEntry("gpia", gpia, "IG with the pruning mask read off the update's zeros", _COMBINING),
        InversionEntry("vbia", vbia, "IG that optimises the bottleneck's noise with the image", _COMBINING),
        InversionEntry("dpia", dpia, "IG that optimises the additive noise with the image", _COMBINING),
        InversionEntry("pig", pig, "IG that ignores the layers behind a bottleneck's noise", _COMBINING),
        InversionEntry("cdia", cdia, "IG that infers pruning masks and optimises other randomness", _COMBINING),
        InversionEntry("portfolio", portfolio, "CDIA by plain Adam, tried on simulated clients first", _PORTFOLIO),
        InversionEntry("tableak", tableak, "rows of a table: softmax of categories, restarts pooled", _TABLEAK),
        InversionEntry("sapag", sapag, "Gaussian kernel distance per layer", "Wang et al., 2020"),
        InversionEntry("sme", sme, "one gradient of all examples on the line of local training", _SME),
        InversionEntry("gi", gi, "l2 distance, BatchNorm prior, restarts that agree", _GRADINVERSION),
        InversionEntry("gi-strong", gi_strong, "GI with the batch's true BatchNorm statistics", _GRADINVERSION),
        GenerativeEntry("grnn", grnn, "the weights of a generator, fitted to the update", _GRNN, UNTRAINED),
        GenerativeEntry("gias", gias, "the latent numbers of a trained generator, then its weights", _GIAS, TRAINED),
        GenerativeEntry("ggl", ggl, "the latent numbers of a trained generator, by CMA-ES", _GGL, EVOLVED),
        AttackEntry("analytic", Analytic, "the first layer's equations, solved", _ANALYTIC),
        AttackEntry("r-gap", r_gap, "each layer's equations, solved from the last to the first", _RGAP),
        AttackEntry("unmix", Unmix, "a batch's images, separated in the first layer's gradient", _UNMIX),
        AttackEntry("rob", Imprint, "a malicious server's imprint block, inverted analytically", _ROB),
        AttackEntry("curious", Trap, "a malicious server's trap weights, inverted analytically", _CURIOUS),
        InversionEntry("fishing", fishing, "a malicious server's last layer for one class, then IG", _WEN, _FISHED),
        AttackEntry("quantile", QuantileBiases, "a malicious server's biases at quantiles, honest weights", _QBI),
        AttackEntry(
            "conv-imprint", CopiedRows, "a malicious server's imprint in a hidden layer, convolutions carry", _LOKI
        ),
        InversionEntry(
            "steering",
            steering,
            "a malicious server's last layer, trained for one class, then IG",
            _GEMINIO,
            _STEERED,
        ),
        InversionEntry("averaging", averaging, "IG on the mean of many rounds of one model", _MEAN, _POOLED),
        InversionEntry(
            "right-angles",
            right_angles,
            "portfolio's search for the gradient at a right angle to all rounds of one model",
            _ANGLES,
            _only(*SEARCHED, "halving", "start"),
        ),
        InversionEntry(
            "glaus", glaus, "magnitudes from how often entries were sampled, then IG or DLG", _GLAUS, _SAMPLED
        ),
        AttackEntry("learned", Learned, "a network trained on public images and simulated updates", _WU),
        AttackEntry("embedding-rows", EmbeddingRows, "texts: words and their order off embedding rows", _FILM),
        AttackEntry("span", SpanAttack, "texts: words and their order by membership in two layers' spans", _DAGER),
        AttackEntry("span-rank", span_rank, "texts: span, with words ranked where noise fills the space", _DAGER),
        AttackEntry("embedding-search", EmbeddingSearch, "texts: a search over mixtures of likely words", _LAMP),
    )
}
"""Every attack that a run file, the command line or `make_attack` can name."""


def _plugged(plugin: Plugin) -> NamedEntry:
    """Make the catalogue entry of a package's attack: an entry, an attack, or a function that returns one."""
    attack = imported(plugin.path, plugin.path)
    entry = attack if isinstance(attack, AttackEntry) else own_attack(plugin.path)
    return replace(entry, name=plugin.name)


ALL_ATTACKS: Catalogue[NamedEntry] = Catalogue("attacks", "attack", ATTACKS, _plugged)
"""`ATTACKS` and the attacks of installed packages."""


def make_attack(text: str, own: bool = False) -> Any:
    """Build an attack from its name and settings; with `own`, also a custom one: `pkg.module:name`, imported.

    >>> make_attack("ig(iterations=500, restarts=2)").descent.iterations
    500
    """
    built = [attack for _, attack in read(text, ALL_ATTACKS, "attack", own_attack if own else None)]
    if len(built) != 1:
        raise fail("attack", f"'{text}' names {len(built)} attacks", "list several attacks as separate texts")
    return built[0]


def own_attack(path: str) -> NamedEntry:
    """Import a custom attack, or a function that returns one; an inversion has the settings of all inversions."""
    entry = own_entry(path, "attack", _is_attack, _named, _MISTAKEN)
    if not entry.arguments and isinstance(attack := entry(), Inversion):
        return InversionEntry(path, lambda: attack, entry.description, entry.citation)
    return entry


_MISTAKEN = {
    "observations": (
        "has the signature of an attack, but no name, simulated client and knowledge",
        "write a class with these attributes, and this function as its __call__",
    )
}


def _is_attack(custom: Any) -> bool:
    parts = (("name", str), ("simulated_client", str), ("knowledge", Mapping))
    return callable(custom) and all(isinstance(getattr(custom, part, None), kind) for part, kind in parts)


def _named(attack: Any, name: str) -> Any:
    """Name an attack by its text."""
    if not _is_attack(attack):
        problem = f"returned {type(attack).__name__}, not an attack"
        raise fail(name, problem, "return an Inversion, or a callable with a name, a simulated client and a knowledge")
    named = copy.copy(attack)
    object.__setattr__(named, "name", name)  # works for frozen dataclasses too
    return named
