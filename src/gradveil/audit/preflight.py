"""Checks before the first trial: sizes, models, defended clients, attacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.protocol import Attack, CanRefuse, Prospect, traits
from gradveil.audit.argument_checks import declared
from gradveil.audit.attack_selection import (
    UNDEFENDED,
    WORDS,
    control_attacks,
    general_attacks,
    is_same_attack,
    met,
    nothing_to_try,
    pairs,
    without_aim,
)
from gradveil.audit.attackers.attacker_table import is_unknown
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.experiment import Experiment
from gradveil.audit.recorded.recorded_updates import observed_images, open_observed
from gradveil.audit.run_file import with_defaults
from gradveil.audit.sources import Source, cost_setting, training_of, training_setting
from gradveil.client import Client, speakers, usual_loss
from gradveil.core.errors import UNFIT, GradveilError, Problem, refuse
from gradveil.core.formatting import listing
from gradveil.core.types import Batch
from gradveil.data import DATASETS, Dataset, located
from gradveil.data.registry import kind_of
from gradveil.defences import Defence, parse
from gradveil.defences.user_defence import faults
from gradveil.federated.training_setup import device_problems, initial_model, open_images
from gradveil.metrics import metric
from gradveil.nn import surgery
from gradveil.nn.check import check
from gradveil.nn.module_paths import called
from gradveil.nn.stochastic import switched_off
from gradveil.nn.weight_files import misfits, read_weights
from gradveil.theory.input_jacobian import squared_row_norms


def model_problems(experiment: Experiment) -> list[Problem]:
    """Check the model on the first target's examples: what would fail in every trial is told once, before the first."""
    settings = experiment.config.model
    batch = experiment.batch(experiment.examples(0, range(1)))
    first = Batch(batch.inputs[0], batch.targets[0])
    model = experiment.model(experiment.config.seeds[0]).to(experiment.config.device, experiment.dtype)
    found = check(
        model,
        first,
        experiment.loss or usual_loss(model),
        bounds=experiment.space.bounds(first.inputs),
        classes=len(experiment.private.classes),
    )
    hint = "" if settings.prepare else "; or let it be done: --set model.prepare=true"
    return [replace(p, remedy=p.remedy + hint) if surgery.is_named_in(p.remedy) else p for p in found]


class Obstacles(NamedTuple):
    """What stands in the way of a run."""

    problems: list[Problem]
    """Each once; those of an attack that another of its trials can be attacked with are warnings."""
    unfit: Mapping[tuple[int, str, str], str]
    """(client, defence, attack) -> why the attack does not apply there."""


class _Meeting(NamedTuple):
    """An attack on a defended client, and what stands in its way."""

    client: int
    defence: str
    attack: str
    problems: tuple[Problem, ...]


def obstacles(experiment: Experiment) -> Obstacles:
    """Find out before the first trial what would stop a later one: sizes, models, defended clients, attacks.

    An attack that was asked for by name and fits some of the defended clients leaves the others out; attackers that
    stand for `adaptive` have to fit, for a verdict counts on them; of texts, where updates were recorded and behind
    unknown defences, attackers may lack what they need, and are left out as long as somebody is left.
    """
    found = list(_obstacles(experiment))
    made = [each for each in found if isinstance(each, _Meeting) and not each.problems]
    fits, attacked = (
        {each.attack for each in made} & {*without_aim(experiment.config.attacks)},
        {each[:2] for each in made},
    )
    problems: list[Problem] = []
    unfit: dict[tuple[int, str, str], str] = {}
    for each in found:
        if isinstance(each, Problem):
            problems.append(each)
        elif each.problems and (each.attack in fits or _spared(experiment, each, attacked)):
            unfit[each[:3]] = "; ".join(f"{p.what} -> {p.remedy}" for p in each.problems)
            problems += (replace(p, severity="warning") for p in each.problems)
        else:
            problems += each.problems
    if not any(problem.severity == "error" for problem in problems):
        unfit |= _unfit_controls(experiment)
    return Obstacles(list(dict.fromkeys(problems)), unfit)


def _unfit_controls(experiment: Experiment) -> dict[tuple[int, str, str], str]:
    """Find the attacks that do not apply without a defence: such a control is left out, and stops nothing."""
    attacks, unfit = control_attacks(experiment.config), dict[tuple[int, str, str], str]()
    for index in range(len(experiment.config.client) if attacks else 0):
        client = experiment.client(index, UNDEFENDED, experiment.config.seeds[0])
        for each in _meetings(experiment, index, UNDEFENDED, attacks, client, "client"):
            if each.problems:
                unfit[each[:3]] = "; ".join(f"{p.what} -> {p.remedy}" for p in each.problems)
    return unfit


def _spared(experiment: Experiment, each: _Meeting, attacked: set[tuple[int, str]]) -> bool:
    """Report whether a run continues where an attacker does not apply, as long as others are left.

    It can on recorded updates, and behind a defence of which nothing is known, if the attacker stands for `adaptive`
    or is one of those that a verdict on such a defence needs; and of texts: there models differ in what is known of
    their layers, and clients in what they send.
    """
    named = each.attack in {*without_aim(experiment.config.attacks)} - experiment.expanded
    if named and is_unknown(each.defence):
        general = general_attacks(each.defence, public=True, kind=experiment.space.words.kind)
        named = not any(is_same_attack(text, each.attack) for text in general)
    texts, guessed = "tokens" in experiment.space.offers, not experiment.source.simulated or is_unknown(each.defence)
    return each[:2] in attacked and (texts or (guessed and not named))


def _obstacles(experiment: Experiment) -> Iterator[Problem | _Meeting]:
    config = experiment.config
    available = _for_targets(experiment)
    for name in config.metrics:
        try:
            metric(name)
        except GradveilError as error:
            yield from (replace(p, where=f"metrics: {p.where}") for p in error.problems)
    yield from experiment.space.unscored()
    if config.images_needed > available:
        size = max(client.examples for client in config.client)
        what = (
            f"{config.target_clients} clients from number {config.first_target_client} with {size} examples each need "
        )
        some = experiment.space.words.plural
        which = _TARGETS[config.target_images]
        which = f"those that are {experiment.private.classes[0]}s" if available < len(experiment.private) else which
        what += f"{config.images_needed} {some}, '{config.data.name}' has {available} for targets: {which}"
        remedy = (
            f"lower target clients, first_target_client or client.batch; at most {available // size} target clients: "
            f"--target-clients {available // size}"
        )
        if available < size:
            remedy = f"lower client.batch: one update of at most {available} {some}; or give more of them"
        yield Problem("target_clients", what, remedy)
        return
    try:
        experiment.model(config.seeds[0])
    except GradveilError as error:
        yield from error.problems
        return
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = experiment.batch(experiment.examples(index, range(1)))
        first = Batch(batch.inputs[0], batch.targets[0])
        for i, text in enumerate(experiment.defences):
            try:
                client = experiment.client(index, text, config.seeds[0])
                yield from _weight_problems(experiment, client, index)
                yield from experiment.source.client_problems(config, index, client, where, text)
                client.trained()
                found = list(faults(experiment.defences[text], client, first))
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in found)
                if any(p.severity == "error" for p in found):
                    continue
                yield from _derivative_problems(client, first, f"defences[{i}] '{text}', {where}")
                if experiment.source.simulated:
                    yield from _speaker_problems(experiment, index, client, f"defences[{i}] '{text}', {where}")
                attacks = met(config, text)
                yield from _meetings(experiment, index, text, attacks, client, where)
            except GradveilError as error:
                yield from (
                    Problem(f"defences[{i}] '{text}', {where}", f"{p.where}: {p.what}", p.remedy)
                    for p in error.problems
                )
            except UNFIT:  # asked what stands in its way, an attack looks at what the model does with images
                if not (found := model_problems(experiment)):
                    raise
                yield from (replace(p, where=called(client.model, p.where)) for p in found)
                return


def _derivative_problems(client: Client, batch: Batch, where: str) -> Iterator[Problem]:
    """Differentiate once by word embeddings if the defence does: the checks of a model do so by numbers only."""
    spec = client.noise_spec(client.params(), batch)
    gradient, model = client.pipeline.gradient, client.model
    if batch.inputs.is_floating_point() or all(name.rsplit(".", 1)[-1] != "probe" for name in spec):
        return
    context = gradient.context(client.params(), batch, switched_off(model, batch.inputs))
    assert context.gradient is not None
    probe = context.perturbation.zeros(batch.inputs).unsqueeze(0)
    try:
        squared_row_norms(context.gradient, batch, probe, perturbation=context.perturbation)
    except UNFIT as error:
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"differentiates the gradient by the word embeddings, which fails: {type(error).__name__}: {first}"
        yield Problem(where, what, "compute attention by its formula: --set model.prepare=true; or leave it out")


_TARGETS = {
    "test": "those of its test split, or every fourth of a class where it has none",
    "client": "a tenth of its training split, which one of ten clients holds",
}


def _for_targets(experiment: Experiment) -> int:
    """Count the images that target clients may hold: bundled data may keep some to test a model only."""
    entry = DATASETS.get(experiment.config.data.name)
    whole = len(experiment.private)
    elsewhere = experiment.config.train or experiment.config.target_images == "client"
    return whole if entry is None or entry.targets is None or elsewhere else min(entry.targets, whole)


def _weight_problems(experiment: Experiment, client: Client, index: int) -> Iterator[Problem]:
    """Say why trained weights fit neither this model nor the one without the defence."""
    plain = experiment.undefended(index, experiment.config.seeds[0]).model
    if experiment.weights and misfits(plain, experiment.weights, ""):
        yield from misfits(client.model, experiment.weights, f"model.weights '{experiment.config.model.weights}'")


def _speaker_problems(experiment: Experiment, index: int, client: Client, where: str) -> Iterator[Problem]:
    """Find out whether there are images for those who speak before a round: they are nobody's target clients."""
    config, count = experiment.config, speakers(client)
    needed = (config.first_target_client + config.target_clients + count) * config.client[index].examples
    if count and needed > (there := _for_targets(experiment)):
        who = "one other client speaks" if count == 1 else f"{count} other clients speak"
        what = f"{who} before a round: with the targets that takes {needed} images, there are {there}"
        yield Problem(
            where, what, "lower target clients or client.batch, or let nobody speak (adgp: selection=previous)"
        )


def _meetings(
    experiment: Experiment, index: int, defence: str, attacks: Sequence[str], client: Client, where: str
) -> Iterator[_Meeting]:
    """Ask the attacks on a defended client what stands in their way."""
    config = experiment.config
    batch = experiment.batch(experiment.examples(index, range(1)))
    first = Batch(batch.inputs[0], batch.targets[0])
    facts = experiment.space.shape, config.client[index].examples, experiment.classes, len(experiment.public or ())
    for text in attacks:
        attack = experiment.attacks[text]
        simulated_client = client if attack.simulated_client == "full" else client.undefended_update()
        found = [*declared(attack, experiment.public is not None)]
        found += experiment.space.unmet("data", traits(attack).needs)
        found += (
            attack.problems(Prospect(simulated_client, *facts)) if isinstance(attack, CanRefuse) and not found else ()
        )
        spec = simulated_client.noise_spec(simulated_client.params(), first)
        found += experiment.source.attack_problems(attack, spec)
        aside = (
            ""
            if text in without_aim(config.attacks)
            else f"; or name the attacks that you want, in the place of {listing(WORDS)}"
        )
        place = f"attack '{text}' on '{defence}', {where}"
        told = (Problem(f"{place}: {p.where}", p.what, p.remedy + aside) for p in found)
        yield _Meeting(index, defence, text, tuple(told))


def open_experiment(
    config: RunConfig, data_dir: Path | None = None, checked: bool = True, model_checked: bool = False
) -> Experiment:
    """Load the data and build what a run needs; refuse with every problem at once.

    A worker leaves the checks out (`checked=False`): they were made before it was started. A run on the data and model
    of another leaves the model's out (`model_checked=True`).
    """
    problems = list(device_problems(config.device, config.precision))
    problems += _bundled_problems(config)
    if not pairs(config):
        problems.append(nothing_to_try(config.attacks, kind_of(config.data.name)))
    refuse(problems)
    defences = {text: parse(text, own=True) for text in config.defences}
    weights = read_weights(located(config.model.weights, data_dir)) if config.model.weights else {}
    source, public, target_clients = _source(config, others(defences.values()), data_dir, checked)

    @cache
    def initial(seed: int) -> nn.Module:
        return initial_model(config.model, target_clients, seed)[0]

    def model(seed: int) -> nn.Module:
        return deepcopy(initial(seed))  # drawing and preparing take longer, and every defence has a copy

    experiment = Experiment(
        config,
        target_clients,
        public,
        model,
        defences,
        _attacks(config, source.scored),
        source=source,
        weights=weights,
    )
    experiment = _within_data(experiment)
    if checked:
        experiment = unobstructed(experiment)
        net, done = initial_model(config.model, target_clients, config.seeds[0], compared=not model_checked)
        found = [] if model_checked else model_problems(experiment)
        refuse([replace(p, where=f"model: {called(net, p.where)}") for p in found])
        experiment = replace(experiment, prepared=tuple(done), cost=cost_setting(config, data_dir, checked))
    return experiment


def _source(
    config: RunConfig, speaking: int, data_dir: Path | None, checked: bool
) -> tuple[Source, Dataset | None, Dataset]:
    """Open what the run's targets are, with public examples and the targets'; so many speak before a round."""
    if config.observed:
        observed = open_observed(config, data_dir)
        return observed, *observed_images(config, data_dir, observed)
    if config.train is not None:
        setting = training_setting(config, data_dir, checked)
        training = training_of(setting, config, speaking)
        return training, training.public.subset(range(len(training.public))[: config.data.public]), training.private
    images = config.images_needed + speaking * max(client.examples for client in config.client)
    gallery = None if config.data.gallery is None else max(config.data.gallery, images)
    seed = config.seeds[0] if config.target_images == "client" else None
    splits = open_images(config.data, data_dir, gallery, client_seed=seed)
    return Source(), splits.public, splits.private


def _within_data(experiment: Experiment) -> Experiment:
    """Attack as many clients as there are examples for, where the run does not say how many."""
    config = experiment.config
    size = max(client.examples for client in config.client)
    most = _for_targets(experiment) // size - config.first_target_client - others(experiment.defences.values())
    if "target_clients" in config.model_fields_set or not 1 <= most < config.target_clients:
        return experiment
    return replace(experiment, config=config.model_copy(update={"target_clients": most}))


def unobstructed(experiment: Experiment) -> Experiment:
    """Refuse what cannot be audited, with every problem at once; note where an attack does not apply."""
    found = obstacles(experiment)
    refuse(found.problems)
    return replace(experiment, unfit=found.unfit)


def others(defences: Iterable[Defence]) -> int:
    """Count the clients besides the target clients who have to be there to speak before a round."""
    return max((d.send.speakers() for d in defences if isinstance(d, Defence) and d.send), default=0)


def _attacks(config: RunConfig, labelled: bool) -> dict[str, Attack]:
    """Build every attack that meets a defence of the run; where nobody knows labels `adaptive` finds them."""
    texts = (text for defence in config.defences for text in met(config, defence))
    tuning = config.iterations, config.restarts
    found: dict[str, Attack] = {}
    for text in texts:
        attack = make_attack(with_defaults(text, *tuning), own=True)
        if not labelled and text not in without_aim(config.attacks) and traits(attack).labels == "given":
            attack = make_attack(with_defaults(text, *tuning, labels="restore"))
        found[text] = attack
    return found


def _bundled_problems(config: RunConfig) -> Iterator[Problem]:
    entry = DATASETS.get(config.data.name)
    if entry is not None and not entry.task and config.client and any(client.local for client in config.client):
        what = f"the labels of '{config.data.name}' mean nothing, so there is nothing to train locally"
        yield Problem("client.local", what, "leave it out (one gradient), or choose data with a task: digits, faces")
