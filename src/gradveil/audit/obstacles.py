"""What stands in the way of a run, found before its first cell: sizes, models, defended clients, attacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gradveil.attacks.base import Careful, Prospect
from gradveil.audit.adaptive import WORDS, attacks_against
from gradveil.audit.protocol import declared
from gradveil.audit.undefended import UNDEFENDED, control_attacks
from gradveil.client import Client, speakers
from gradveil.core.errors import UNFIT, GradveilError, Problem
from gradveil.core.types import Batch
from gradveil.core.words import listing
from gradveil.defences.contract import faults
from gradveil.nn import surgery
from gradveil.nn.check import check
from gradveil.nn.paths import called
from gradveil.nn.weights import misfits

if TYPE_CHECKING:
    from gradveil.audit.scene import Scene

SMALLEST = 11
"""Pixels a side: SSIM's window."""


def model_problems(scene: Scene) -> list[Problem]:
    """Check the model on the first victim's examples: what would fail in every cell is told once, before the first."""
    settings = scene.config.model
    batch = scene.batch(scene.examples(0, range(1)))
    first = Batch(batch.inputs[0], batch.targets[0])
    model = scene.model(scene.config.seeds[0]).to(scene.config.device, scene.dtype)
    found = check(model, first, scene.loss, bounds=scene.victims.bounds, classes=len(scene.victims.classes))
    hint = "" if settings.prepare else "; or let it be done: --set model.prepare=true"
    return [replace(p, remedy=p.remedy + hint) if surgery.__name__ in p.remedy else p for p in found]


class Obstacles(NamedTuple):
    """What stands in the way of a run."""

    problems: list[Problem]
    """Each once; those of an attack that another of its cells can be attacked with are warnings."""
    unfit: Mapping[tuple[int, str, str], str]
    """(client, defence, attack) -> why the attack does not apply there."""


class _Meeting(NamedTuple):
    """An attack on a defended client, and what stands in its way."""

    client: int
    defence: str
    attack: str
    problems: tuple[Problem, ...]


def obstacles(scene: Scene) -> Obstacles:
    """Find out before the first cell what would stop a later one: sizes, models, defended clients, attacks.

    An attack that was asked for by name and fits some of the defended clients leaves the others out; attackers that
    stand for `adaptive` have to fit, for a verdict counts on them. Where updates were recorded, of
    apps that share no public images, attackers may lack what they need: they are left out, as long as somebody is left.
    """
    found = list(_obstacles(scene))
    made = [each for each in found if isinstance(each, _Meeting) and not each.problems]
    fits, attacked = {each.attack for each in made} & {*scene.config.attacks}, {each[:2] for each in made}
    problems: list[Problem] = []
    unfit: dict[tuple[int, str, str], str] = {}
    for each in found:
        if isinstance(each, Problem):
            problems.append(each)
        elif each.problems and (each.attack in fits or _spared(scene, each, attacked)):
            unfit[each[:3]] = "; ".join(f"{p.what} -> {p.remedy}" for p in each.problems)
            problems += (replace(p, severity="warning") for p in each.problems)
        else:
            problems += each.problems
    if not any(problem.severity == "error" for problem in problems):
        unfit |= _unfit_controls(scene)
    return Obstacles(list(dict.fromkeys(problems)), unfit)


def _unfit_controls(scene: Scene) -> dict[tuple[int, str, str], str]:
    """Find the attacks that do not apply without a defence: such a control is left out, and stops nothing."""
    attacks, unfit = control_attacks(scene.config), dict[tuple[int, str, str], str]()
    for index in range(len(scene.config.client) if attacks else 0):
        client = scene.client(index, UNDEFENDED, scene.config.seeds[0])
        for each in _meetings(scene, index, UNDEFENDED, attacks, client, "client"):
            if each.problems:
                unfit[each[:3]] = "; ".join(f"{p.what} -> {p.remedy}" for p in each.problems)
    return unfit


def _spared(scene: Scene, each: _Meeting, attacked: set[tuple[int, str]]) -> bool:
    """Say whether recorded updates can do without an attacker that `adaptive` stands for."""
    return not scene.source.simulated and each.attack not in scene.config.attacks and each[:2] in attacked


def _obstacles(scene: Scene) -> Iterator[Problem | _Meeting]:
    config = scene.config
    available = len(scene.victims)
    if min(scene.victims.inputs.shape[-2:]) < SMALLEST:
        what = f"images are {' x '.join(str(side) for side in scene.victims.inputs.shape[-2:])} pixels"
        yield Problem("data.size", f"{what}, and SSIM needs {SMALLEST}", f"resize them to at least {SMALLEST} pixels")
    if config.images_needed > available:
        size = max(client.examples for client in config.client)
        what = f"{config.victims} victims from number {config.first_victim} with {size} examples each need "
        what += f"{config.images_needed} images, '{config.data.name}' has {available} for victims: those of its test "
        what += "split, or every fourth of a class where it has none"
        remedy = f"lower victims, first_victim or client.batch; at most {available // size} victims"
        if available < size:
            remedy = f"lower client.batch: one update of at most {available} images; or give more of them"
        yield Problem("victims", what, remedy)
        return
    try:
        scene.model(config.seeds[0])
    except GradveilError as error:
        yield from error.problems
        return
    for index in range(len(config.client)):
        where = "client" if len(config.client) == 1 else f"client[{index}]"
        batch = scene.batch(scene.examples(index, range(1)))
        first = Batch(batch.inputs[0], batch.targets[0])
        for i, text in enumerate(scene.defences):
            try:
                client = scene.client(index, text, config.seeds[0])
                yield from _weight_problems(scene, client, index)
                yield from scene.source.client_problems(config, index, client, where, text)
                client.trained()
                found = list(faults(scene.defences[text], client, first))
                yield from (replace(p, where=f"defences[{i}] '{text}', {where}: {p.where}") for p in found)
                if any(p.severity == "error" for p in found):
                    continue
                client.noise_spec(client.params(), first)
                if scene.source.simulated:
                    yield from _speaker_problems(scene, index, client, f"defences[{i}] '{text}', {where}")
                attacks = list(attacks_against(config.attacks, text))
                yield from _meetings(scene, index, text, attacks, client, where)
            except GradveilError as error:
                yield from (
                    Problem(f"defences[{i}] '{text}', {where}", f"{p.where}: {p.what}", p.remedy)
                    for p in error.problems
                )
            except UNFIT:  # asked what stands in its way, an attack looks at what the model does with images
                if not (found := model_problems(scene)):
                    raise
                yield from (replace(p, where=called(client.model, p.where)) for p in found)
                return


def _weight_problems(scene: Scene, client: Client, index: int) -> Iterator[Problem]:
    """Say why trained weights fit neither this model nor the one without the defence."""
    plain = scene.undefended(index, scene.config.seeds[0]).model
    if scene.weights and misfits(plain, scene.weights, ""):
        yield from misfits(client.model, scene.weights, f"model.weights '{scene.config.model.weights}'")


def _speaker_problems(scene: Scene, index: int, client: Client, where: str) -> Iterator[Problem]:
    """Find out whether there are images for those who speak before a round: they are nobody's victims."""
    config, count = scene.config, speakers(client)
    needed = (config.first_victim + config.victims + count) * config.client[index].examples
    if count and needed > len(scene.victims):
        who = "one other client speaks" if count == 1 else f"{count} other clients speak"
        what = f"{who} before a round: with the victims that takes {needed} images, there are {len(scene.victims)}"
        yield Problem(where, what, "lower victims or client.batch, or let nobody speak (adgp: selection=previous)")


def _meetings(
    scene: Scene, index: int, defence: str, attacks: Sequence[str], client: Client, where: str
) -> Iterator[_Meeting]:
    """Ask the attacks on a defended client what stands in their way."""
    data, config = scene.victims, scene.config
    batch = scene.batch(scene.examples(index, range(1)))
    first = Batch(batch.inputs[0], batch.targets[0])
    shape = (data.channels, int(data.inputs.shape[-2]), int(data.inputs.shape[-1]))
    facts = shape, config.client[index].examples, scene.classes, len(scene.public or ())
    for text in attacks:
        attack = scene.attacks[text]
        belief = client if attack.belief == "full" else client.undefended_update()
        found = list(declared(attack))
        found += attack.problems(Prospect(belief, *facts)) if isinstance(attack, Careful) and not found else ()
        spec = belief.noise_spec(belief.params(), first)
        found += scene.source.attack_problems(attack, spec)
        aside = (
            "" if text in config.attacks else f"; or name the attacks that you want, in the place of {listing(WORDS)}"
        )
        place = f"attack '{text}' on '{defence}', {where}"
        told = (Problem(f"{place}: {p.where}", p.what, p.remedy + aside) for p in found)
        yield _Meeting(index, defence, text, tuple(told))
