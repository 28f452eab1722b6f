"""What a model gives attackers beside its updates: input in closed form, running statistics.

Attacked where all is asked for; closed forms are a warning of `check` and of audits else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.base import Prospect
from gradveil.attacks.inversion import Inversion
from gradveil.attacks.likely import prior_problems
from gradveil.attacks.presets import make_attack
from gradveil.attacks.rgap import Recursive
from gradveil.audit.reader import with_defaults
from gradveil.audit.scene import Scene
from gradveil.core.errors import Problem
from gradveil.core.words import listing, plural
from gradveil.nn.chain import Link, chained, settles
from gradveil.nn.shown import Shown, shown
from gradveil.nn.weights import put_weights


def closed_forms(scene: Scene, *, called: bool = False) -> Iterator[Problem]:
    """Warn of clients that send the gradient of one image, of a model that shows what goes into it.

    Not where the run has the attack that solves those equations. Those of a chain of layers hold for nothing but the
    gradient itself. The remedy is told as options, or as arguments where the audit was `called` from Python.
    """
    solve_layer, solve_chain = _ARGUMENTS if called else _OPTIONS
    several, bare = len(scene.config.client) > 1, "none" in scene.defences
    for index in range(len(scene.config.client)):
        what = remedy = ""
        if layer := _shown(scene, index):
            if not _has(scene, Analytic):
                what = "one image comes back in closed form: "
                what += f"the gradient of '{layer.errors}' says what went into '{layer.path}'"
                remedy = f"{solve_layer}; more examples an update or not sending '{layer.errors}' ends it"
        elif bare and not _has(scene, Recursive) and (count := len(_chain(scene, index))):
            what = f"one image may come back in closed form: the model is a plain chain of {plural(count, 'layer')}, "
            what += "whose equations can be solved from the last to the first"
            remedy = f"{solve_chain}; more examples an update or local steps end it"
        if what:
            where = f"client[{index}]" if several else "client"
            yield Problem(where, what, f"attack it so: {remedy}", severity="warning")


_OPTIONS = "--attack analytic", "--attack r-gap --defence none"
_ARGUMENTS = 'attacks=["analytic"]', 'attacks=["r-gap"], defences=["none"]'


def widened(scene: Scene) -> tuple[Scene, list[str]]:
    """Add to `adaptive` who uses what this model gives besides; say what was added, and why."""
    told: list[str] = []
    ways = (
        (with_closed_forms, "shows its input in closed form"),
        (with_statistics, "carries running statistics of what it was trained on"),
    )
    for widen, why in ways:
        more = widen(scene)
        if added := more.config.attacks[len(scene.config.attacks) :]:
            told.append(f"adaptive: {listing(added)} too, since the model {why}")
        scene = more
    return scene, told


def with_statistics(scene: Scene) -> Scene:
    """Add the attack that pulls to running statistics, where every client's model carries some."""
    known = (isinstance(attack, Inversion) and attack.batchnorm > 0 for attack in scene.attacks.values())
    if any(known) or not all(_carries(scene, index) for index in range(len(scene.config.client))):
        return scene
    return _with_attacks(scene, [_call("cdia", *_UNLABELLED[: not scene.source.scored], f"batchnorm={_PULL}")])


def _carries(scene: Scene, index: int) -> bool:
    """Say whether the model that a client receives carries running statistics."""
    client = scene.client(index, next(iter(scene.defences)), scene.config.seeds[0])
    put_weights(client.model, scene.source.received(client))
    return bool(client.running())


def with_closed_forms(scene: Scene) -> Scene:
    """Add the attacks in closed form where every client sends what shows one image, and some defence leaves it so."""
    config, added = scene.config, list[str]()
    clients = range(len(config.client))
    unlabelled = not scene.source.scored
    words = ["labels=idlg"] if unlabelled else []
    unfit: dict[tuple[int, str, str], str] = {}
    if all(_shown(scene, index) for index in clients):
        added += [] if _has(scene, Analytic) else _analytic(scene, words)
    elif not _has(scene, Recursive) and all(_chain(scene, index) for index in clients):
        solver = _call("r-gap", *words)
        unfit = _unsolvable(scene, solver)
        added += [] if len(unfit) == len(clients) * len(config.defences) else [solver]
    return _with_attacks(replace(scene, unfit={**scene.unfit, **unfit}), added)


def _with_attacks(scene: Scene, added: list[str]) -> Scene:
    """Add attacks to a run."""
    config = scene.config
    tuning = config.iterations, config.restarts
    attacks = {**scene.attacks, **{text: make_attack(with_defaults(text, *tuning)) for text in added}}
    return replace(scene, config=config.model_copy(update={"attacks": [*config.attacks, *added]}), attacks=attacks)


def _analytic(scene: Scene, words: list[str]) -> list[str]:
    """Name the attacks on a first layer's equations, and those that begin there where a defence changes updates."""
    parts = [(getattr(defence, "step", None), getattr(defence, "send", None)) for defence in scene.defences.values()]
    changed = any(part is not None for both in parts for part in both)
    if not changed or list(prior_problems(_shape(scene), 1, public=scene.public is not None)):
        return [_call("analytic", *words)]
    layers = [_shown(scene, index) for index in range(len(scene.config.client))]
    patches = any(layer and len(layer.pixels) > 1 for layer in layers)
    solved = [_call("analytic", *words), _call("analytic", *words, "prior=public")]
    return [*solved, *(_call("cdia", *words, *_FROM_THERE, *more) for more in ([], [_BY_TOKEN])[: 1 + patches])]


_FROM_THERE = ("start=solved", "lr=0.01", "tv=0.0001")
"""A search that starts from the closed form, in steps that are small enough not to leave it at once."""
_UNLABELLED = ("labels=restore",)
_PULL = 0.01
"""How strongly to pull to running statistics: of 0, 0.001, 0.01 and 0.1 what helped most on the small CNN."""
_BY_TOKEN = 'objective="tokenwise-cosine"'
"""Where images are cut into patches, each of which has a gradient of its own."""


def _call(name: str, *words: str) -> str:
    return f"{name}({', '.join(words)})" if words else name


def _has(scene: Scene, kind: type) -> bool:
    return any(isinstance(attack, kind) for attack in scene.attacks.values())


def _shape(scene: Scene) -> tuple[int, int, int]:
    channels, height, width = (int(side) for side in scene.victims.inputs.shape[1:])
    return channels, height, width


def _one_image(scene: Scene, index: int) -> bool:
    settings = scene.config.client[index]
    return settings.examples == 1 and settings.local is None


def _shown(scene: Scene, index: int) -> Shown | None:
    """Return the equations that a client's update shows, if it sends the gradient of one image."""
    if not _one_image(scene, index):
        return None
    client = scene.undefended(index, scene.config.seeds[0])
    layer, _ = shown(client.model, client.params(), _shape(scene), client.trained())
    return layer


def _chain(scene: Scene, index: int) -> tuple[Link, ...]:
    """Return the layers whose equations are enough for one image, if a client sends its gradient by such a model."""
    if not _one_image(scene, index):
        return ()
    client = scene.undefended(index, scene.config.seeds[0])
    links, problems = chained(client.model, client.params(), _shape(scene), client.trained())
    return links if not problems and settles(links) else ()


def _unsolvable(scene: Scene, attack: str) -> dict[tuple[int, str, str], str]:
    """Say which defences make the model another thing than a chain: where r-gap does not apply, and why."""
    seed, solver = scene.config.seeds[0], Recursive()
    facts = _shape(scene), 1, scene.classes, len(scene.public or ())
    found: dict[tuple[int, str, str], str] = {}
    for index in range(len(scene.config.client)):
        for text in scene.defences:
            belief = scene.client(index, text, seed).undefended_update()
            if problems := list(solver.problems(Prospect(belief, *facts))):
                found[index, text, attack] = "; ".join(f"{p.what} -> {p.remedy}" for p in problems)
    return found
