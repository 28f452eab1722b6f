"""Warnings about a run: closed forms that apply, running statistics, and differential privacy that does not hold.

Attacked where all is asked for; closed forms are a warning of `check` and of audits else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.defended_layers import Estimated
from gradveil.attacks.closed_form.disturbed import prior_problems
from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.closed_form.layer_by_layer import Recursive
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.protocol import Prospect
from gradveil.audit.attack_selection import without_aim
from gradveil.audit.experiment import Experiment
from gradveil.audit.run_file import with_defaults
from gradveil.client import Client
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.formatting import listing, plural
from gradveil.core.types import Batch
from gradveil.defences.guarantees import examine
from gradveil.defences.privacy_warnings import suspicions
from gradveil.metrics import scored
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.layer_chain import Link, chained, settles
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.weight_files import put_weights
from gradveil.theory.accounting import epsilon


def closed_forms(experiment: Experiment, *, called: bool = False) -> Iterator[Problem]:
    """Warn of clients that send the gradient of one image, of a model that shows what goes into it.

    Not where the run has the attack that solves those equations. Those of a chain of layers hold for nothing but the
    gradient itself. The remedy is told as options, or as arguments where the audit was `called` from Python.
    """
    solve_layer, solve_chain = _ARGUMENTS if called else _OPTIONS
    several, bare = len(experiment.config.client) > 1, "none" in experiment.defences
    for index in range(len(experiment.config.client)):
        what = remedy = ""
        if layer := _shown(experiment, index):
            if not _has(experiment, Analytic):
                what = "one image comes back in closed form: "
                what += f"the gradient of '{layer.errors}' says what went into '{layer.path}'"
                remedy = f"{solve_layer}; more examples an update or not sending '{layer.errors}' ends it"
        elif bare and not _has(experiment, Recursive) and (count := len(_chain(experiment, index))):
            what = f"one image may come back in closed form: the model is a plain chain of {plural(count, 'layer')}, "
            what += "whose equations can be solved from the last to the first"
            remedy = f"{solve_chain}; more examples an update or local steps end it"
        if what:
            where = f"client[{index}]" if several else "client"
            yield Problem(where, what, f"attack it so: {remedy}", severity="warning")


def untested(warning: str) -> str:
    """Shorten a warning of a run to what it is of, with the option that tries it.

    >>> untested("client: one image may come back: a plain chain -> attack it so: --attack r-gap; a batch ends it")
    'one image may come back (--attack r-gap)'
    """
    cause, _, remedy = warning.partition(" -> ")
    what = cause.partition(": ")[2].partition(":")[0]
    return f"{what} ({remedy.removeprefix('attack it so: ').partition(';')[0]})"


_OPTIONS = "--attack analytic", "--attack r-gap --defence none"
_ARGUMENTS = 'attacks=["analytic"]', 'attacks=["r-gap"], defences=["none"]'


def widened(experiment: Experiment) -> tuple[Experiment, list[str]]:
    """Add to `adaptive` who uses what this model gives besides; say what was added, and why."""
    told: list[str] = []
    ways = (
        (with_closed_forms, "shows its input in closed form"),
        (with_estimates, "is a plain chain of layers, whose gradients have known factors"),
        (with_statistics, "carries running statistics of what it was trained on"),
    )
    for widen, why in ways:
        more = widen(experiment)
        if added := without_aim(more.config.attacks[len(experiment.config.attacks) :]):
            told.append(f"adaptive: {listing(added)} too, since the model {why}")
        experiment = more
    return experiment, told


def with_statistics(experiment: Experiment) -> Experiment:
    """Add the attack that pulls to running statistics, where every client's model carries some."""
    known = (isinstance(attack, Inversion) and attack.batchnorm > 0 for attack in experiment.attacks.values())
    if any(known) or not all(_carries(experiment, index) for index in range(len(experiment.config.client))):
        return experiment
    return _with_attacks(
        experiment, [_call("cdia", *_UNLABELLED[: not experiment.source.scored], f"batchnorm={_PULL}")]
    )


def _carries(experiment: Experiment, index: int) -> bool:
    """Say whether the model that a client receives carries running statistics."""
    client = experiment.client(index, next(iter(experiment.defences)), experiment.config.seeds[0])
    put_weights(client.model, experiment.source.received(client))
    return bool(running_statistics(client.model))


def with_closed_forms(experiment: Experiment) -> Experiment:
    """Add the attacks in closed form where every client sends what shows one image, and some defence leaves it so."""
    config, added = experiment.config, list[str]()
    clients = range(len(config.client))
    unlabelled = not experiment.source.scored
    words = ["labels=idlg"] if unlabelled else []
    unfit: dict[tuple[int, str, str], str] = {}
    if all(_shown(experiment, index) for index in clients):
        added += [] if _has(experiment, Analytic) else _analytic(experiment, words)
    elif not _has(experiment, Recursive) and all(_chain(experiment, index) for index in clients):
        solver = _call("r-gap", *words)
        unfit = _unsolvable(experiment, solver)
        added += [] if len(unfit) == len(clients) * len(config.defences) else [solver]
    return _with_attacks(replace(experiment, unfit={**experiment.unfit, **unfit}), added)


def with_estimates(experiment: Experiment) -> Experiment:
    """Add the estimate from masked or noisy layers on each defence that changes the updates of a plain chain.

    It reads the labels off the update.
    """
    if any(isinstance(attack, Estimated) for attack in experiment.attacks.values()):
        return experiment
    return _with_attacks(
        experiment, [f"{_ESTIMATE} on {defence}" for defence in experiment.defences if _estimable(experiment, defence)]
    )


_ESTIMATE = "r-gap(labels=restore, simulated_client=full)"


def _estimable(experiment: Experiment, defence: str) -> bool:
    """Return whether a defence changes what each client sends of one image, and the estimate fits them all."""
    attack, seed = Estimated(labels="restore"), experiment.config.seeds[0]
    facts = experiment.space.shape, experiment.classes, len(experiment.public or ())
    for index in range(len(experiment.config.client)):
        if not _one_image(experiment, index):
            return False
        client = experiment.client(index, defence, seed)
        if client.step is None and client.send is None:
            return False
        if list(attack.problems(Prospect(client, facts[0], 1, *facts[1:]))):
            return False
    return True


def _with_attacks(experiment: Experiment, added: list[str]) -> Experiment:
    """Add attacks to a run."""
    config = experiment.config
    tuning = config.iterations, config.restarts
    made = {text: make_attack(with_defaults(text, *tuning)) for text in without_aim(added)}
    attacks = {**experiment.attacks, **made}
    return replace(experiment, config=config.model_copy(update={"attacks": [*config.attacks, *added]}), attacks=attacks)


def _analytic(experiment: Experiment, words: list[str]) -> list[str]:
    """Name the attacks on a first layer's equations, and those that begin there where a defence changes updates."""
    parts = [
        (getattr(defence, "step", None), getattr(defence, "send", None)) for defence in experiment.defences.values()
    ]
    changed = any(part is not None for both in parts for part in both)
    if not changed or list(prior_problems(experiment.space.shape, 1, public=experiment.public is not None)):
        return [_call("analytic", *words)]
    layers = [_shown(experiment, index) for index in range(len(experiment.config.client))]
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


def _has(experiment: Experiment, kind: type) -> bool:
    return any(isinstance(attack, kind) for attack in experiment.attacks.values())


def _one_image(experiment: Experiment, index: int) -> bool:
    settings = experiment.config.client[index]
    return settings.examples == 1 and settings.local is None and "numbers" in experiment.space.offers


def _shown(experiment: Experiment, index: int) -> InputEquations | None:
    """Return the equations that a client's update shows, if it sends the gradient of one image."""
    if not _one_image(experiment, index):
        return None
    client = experiment.undefended(index, experiment.config.seeds[0])
    layer, _ = shown(client.model, client.params(), experiment.space.shape, client.trained())
    return layer


def _chain(experiment: Experiment, index: int) -> tuple[Link, ...]:
    """Return the layers whose equations are enough for one image, if a client sends its gradient by such a model."""
    if not _one_image(experiment, index):
        return ()
    client = experiment.undefended(index, experiment.config.seeds[0])
    links, problems = chained(client.model, client.params(), experiment.space.shape, client.trained())
    return links if not problems and settles(links) else ()


def _unsolvable(experiment: Experiment, attack: str) -> dict[tuple[int, str, str], str]:
    """Say which defences make the model another thing than a chain: where r-gap does not apply, and why."""
    seed, solver = experiment.config.seeds[0], Recursive()
    facts = experiment.space.shape, 1, experiment.classes, len(experiment.public or ())
    found: dict[tuple[int, str, str], str] = {}
    for index in range(len(experiment.config.client)):
        for text in experiment.defences:
            simulated_client = experiment.client(index, text, seed).undefended_update()
            if problems := list(solver.problems(Prospect(simulated_client, *facts))):
                found[index, text, attack] = "; ".join(f"{p.what} -> {p.remedy}" for p in problems)
    return found


def privacy_facts(experiment: Experiment, client: Client, batch: Batch) -> dict[str, Any]:
    """Say what is proven of a defended client; where the run tells of its training, as epsilons and with warnings."""
    settings = experiment.config.privacy
    training = settings.build() if settings else None
    privacy = examine(client, batch)
    sound = () if training is None else privacy.sound
    return {
        "guarantee": privacy.promise(training),
        "epsilon": {each.unit: epsilon(each.multiplier, training) for each in sound if training},
        "suspicions": [str(problem) for problem in suspicions(client, batch, training)] if training else [],
    }


def privacy_problems(experiment: Experiment) -> Iterator[Problem]:
    """Warn of every client and defence of a run whose differential privacy is void or worthless."""
    config = experiment.config
    training = config.privacy.build() if config.privacy else None
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = experiment.batch(experiment.examples(index, range(1)))
        for i, text in enumerate(experiment.defences):
            try:
                client = experiment.client(index, text, config.seeds[0])
                for p in suspicions(client, Batch(batch.inputs[0], batch.targets[0]), training):
                    yield replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}")
            except GradveilError as error:
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in error.problems)


def metric_problems(experiment: Experiment) -> Iterator[Problem]:
    """Try the metrics of a run on its first examples; warn of those that give no score."""
    batch = experiment.batch(experiment.examples(0, range(1)))
    truth = experiment.space.view(batch.inputs.cpu())
    for name in experiment.config.metrics:
        why = scored(name, 1 - truth, truth)
        if isinstance(why, str):
            yield Problem(f"metrics: {name}", why, "correct it, or leave it out: it gives no scores", "warning")
