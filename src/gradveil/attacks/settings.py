"""What an attack's text may set: the names, and what each becomes in the one loop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from gradveil.attacks.images import Images
from gradveil.attacks.inversion import Inversion
from gradveil.attacks.knowledge import How, Infer, Known, Neutral, Optimise, Sample
from gradveil.attacks.objective import OBJECTIVES
from gradveil.attacks.steps import Adam
from gradveil.attacks.targeted import BORDERS, INTERVALS, WHITENED
from gradveil.attacks.undo import undoing
from gradveil.core.allowed import Choice, Flag, Range, Text
from gradveil.core.arguments import Argument, Entry
from gradveil.core.errors import Problem, fail, refuse

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
    Argument("belief", Choice(("naive", "full", None)), None),
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
"""What an attacker makes of noise that was added to what was sent: its mean, or whatever fits best (as DPIA does). One
who is told it adds it to what he simulates (as WIIG does), or takes it off what was sent."""
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
class AttackEntry(Entry):
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
        if given.get("belief", attack.belief) == "naive":
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
            given.setdefault("belief", "full")
            given["knowledge"] = undoing(given.get("knowledge", attack.knowledge))
        if given.get("start") == "solved" and given.get("belief", attack.belief) == "full":
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
            yield Problem(text, what, "set belief=full too, or choose an attack that does: cdia")


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
    Argument("generator", Text("a module of your own, 'pkg.module:name'"), None),
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
