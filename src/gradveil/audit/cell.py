"""One cell of an audit: a client, a defence, an attack and a seed; and how its updates are made and attacked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import Attack, Judge, Matcher, Observation, Persistent, Planner, Progress, Reconstruction
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.learned import Learned
from gradveil.audit.active import active_facts, received, resent
from gradveil.audit.adaptive import attacks_against
from gradveil.audit.bound import leaked
from gradveil.audit.budget import Share, read_budget, spends, within
from gradveil.audit.config import RunConfig
from gradveil.audit.granted import first, grant, looks_at_last, told
from gradveil.audit.plans import UNPLANNED, Plans
from gradveil.audit.privacy import privacy_facts
from gradveil.audit.protocol import answer
from gradveil.audit.rounds import Truth, observe, updates
from gradveil.audit.scene import Scene
from gradveil.audit.undefended import UNDEFENDED, control_attacks, first_met, target_clients
from gradveil.audit.utility import pruned, worth
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.own import users
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.federated.config import digest
from gradveil.federated.standing import Standing
from gradveil.federated.wire import encoded_size
from gradveil.metrics import cosine, dense_bytes, relative_distance


@dataclass(frozen=True)
class Address:
    """The address of a cell within a run."""

    id: str
    client: int
    defence: str
    attack: str
    seed: int
    trained: int | None = None
    """The round of the training after which the client is attacked; None where nothing is trained."""
    control: bool = False
    """Whether it is the undefended control of a run that asks for no undefended client."""

    @property
    def meeting(self) -> tuple[int, str, str]:
        """Who meets whom, whatever the seed and the round: client, defence, attack."""
        return self.client, self.defence, self.attack

    def clients(self, whole: int) -> int:
        """Count the clients that are attacked, of so many in the run."""
        return target_clients(whole, self.control)


@dataclass(frozen=True)
class Recovered:
    """What one share of a cell's victims gave: tensors with leading V, plain facts, and a status for every victim."""

    tensors: Tensors
    facts: dict[str, Any]
    statuses: tuple[str, ...]


def cells(config: RunConfig) -> list[Address]:
    """List the cells of a run: seeds, rounds of the training, clients, attacks, defences (the last runs fastest).

    The undefended control comes last.
    """
    places = [
        (seed, stage, index) for seed in config.seeds for stage in config.stages for index in range(len(config.client))
    ]
    return [
        Address(
            _name(config, seed, index, defence, attack, stage, control), index, defence, attack, seed, stage, control
        )
        for control, met in ((False, pairs(config)), (True, [(text, UNDEFENDED) for text in control_attacks(config)]))
        for seed, stage, index in places
        for attack, defence in met
    ]


def pairs(config: RunConfig) -> list[tuple[str, str]]:
    """List which attack meets which defence: all with all, and `adaptive` with the attackers of each defence."""
    against = {defence: list(attacks_against(config.attacks, defence)) for defence in config.defences}
    every = dict.fromkeys(text for texts in against.values() for text in texts)
    return [(text, defence) for text in every for defence, texts in against.items() if text in texts]


def recover(
    scene: Scene,
    cell: Address,
    numbers: range,
    progress: Callable[[Progress], None],
    plans: Plans = UNPLANNED,
    standing: Standing | None = None,
) -> Recovered:
    """Make the updates of these victims, from where their training stands, and attack them.

    `plans` keeps the attack's plan, which is chosen for this machine as it is now: told before the attack starts,
    known again after an interruption. The same plan gives bit-identical results.
    """
    honest = scene.client(cell.client, cell.defence, cell.seed, standing), scene.undefended(cell.client, cell.seed)
    attack = scene.attacks[cell.attack]
    client, plain = (received(scene, attack, each, cell.seed) for each in honest)
    seen, truth = observe(scene, cell, client, numbers, standing, resent(scene, attack, client))
    sent = seen[-1].update
    made = attacked(scene, cell, client, seen, truth, numbers, progress, plans)
    raw = raw_update(client, plain, seen[-1].params, truth)
    tensors = {
        **tensors_of(made.found, seen[-1]),
        **judged(made, seen, truth),
        "distance": relative_distance(sent, raw),
        "cosine": cosine(sent, raw),
        **worth(sent, raw),
    }
    if client.batch:
        tensors["transformed"] = truth.transformed.inputs
    leak, unbounded = leaked(scene, cell.seed, client, seen, truth)
    known = pruned(client, fresh=scene.config.rounds == 1 and not cell.trained)
    facts = {"unbounded": unbounded, "pruned": known}
    return recovered(scene, client, made, sent, truth, tensors | leak, facts)


@dataclass(frozen=True)
class Made:
    """An attack that was made: by whom, with what knowledge, and what he found."""

    attack: Attack
    belief: Client
    knowledge: Knowledge
    grants: list[str]
    key: Key
    found: Reconstruction
    row_iterations: int


def attacked(
    scene: Scene,
    cell: Address,
    client: Client,
    seen: Sequence[Observation],
    truth: Truth,
    numbers: range,
    progress: Callable[[Progress], None],
    plans: Plans,
) -> Made:
    """Attack what was seen of these victims; of the truth an attack gets what is granted to it by name."""
    attack = scene.attacks[cell.attack]
    belief = client if attack.belief == "full" else client.undefended_update()
    knowledge, grants = grant(scene, attack, belief, _looked_at(attack, seen).params, truth)
    key = Key(cell.seed, (Stream.ATTACK,))
    attack = _afforded(scene, cell, attack, numbers, lambda tried: tried(seen, belief, knowledge, key), plans)
    done = 0

    def count(step: Progress) -> None:
        nonlocal done
        done = step.row_iterations
        progress(step)

    plan: tuple[int, ...] = ()
    if isinstance(attack, Planner):
        plan = plans.settled("rows", partial(attack.plan, seen, belief, knowledge, key))
    found = answer(attack, seen, belief, knowledge, lambda: attack(seen, belief, knowledge, key, count, plan))
    done = done or int(found.iterations.sum()) * found.objectives.shape[1]
    return Made(attack, belief, knowledge, grants, key, found, done)


def _looked_at(attack: Attack, seen: Sequence[Observation]) -> Observation:
    """Return the round that an attack looks at, or the first of several."""
    return seen[-1] if looks_at_last(attack) else seen[0]


def tensors_of(found: Reconstruction, seen: Observation) -> Tensors:
    """Name what an attack gave back, and the sizes of what it was given."""
    tensors = {
        "inputs": found.inputs,
        "targets": found.targets,
        "objective": found.objective,
        "objectives": found.objectives,
        "initial": found.initial,
        "iterations": found.iterations,
        "restart": found.restart,
        "bytes_dense": dense_bytes(seen.update),
        "bytes_sent": _bytes_sent(seen),
    }
    if found.before_undoing is not None:
        tensors["before_undoing"] = found.before_undoing
    if found.match is not None:
        tensors["match"] = found.match
    return tensors | {f"trace.{count}": value for count, value in found.trace.items()}


def recovered(
    scene: Scene, client: Client, made: Made, sent: Tensors, truth: Truth, tensors: Tensors, facts: Mapping[str, Any]
) -> Recovered:
    """Put tensors and facts together, fit to be written."""
    whole = _facts(scene, client, made, sent, first(truth)) | {"row_iterations": made.row_iterations, **facts}
    # Clones: an attack may return views of one tensor, which cannot be written side by side.
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return Recovered(kept, whole, tuple(made.found.status))


def _bytes_sent(seen: Observation) -> Tensor:
    """Count the bytes of each victim's update on the wire [V]."""
    rows = ({name: value[row] for name, value in seen.update.items()} for row in range(len(seen.victims)))
    return torch.tensor([encoded_size(row, seen.messages) for row in rows])


def _facts(scene: Scene, client: Client, made: Made, sent: Tensors, first: Batch) -> dict[str, Any]:
    """Say plainly what was attacked, by whom, what he was told, and what is proven of the client."""
    return {
        "params": sum(value[0].numel() for value in sent.values()),
        **privacy_facts(scene, client, first),
        "belief": made.attack.belief,
        "custom": users(made.attack),
        "grants": [*scene.facts, *made.grants],
        "knowledge": told(made.attack),
        "in_parts": _in_parts(client, first),
        "remarks": [(each.words, each.numbers, each.usual) for each in made.found.remarks],
        **active_facts(made.attack, client),
        # Of the attack alone; of a cell in several shares their sum: working time, not what a clock on the wall shows.
        "seconds": made.found.seconds,
        "plan": list(made.found.plan),
        "restarts": made.found.objectives.shape[1],
        "simulated": _simulated(scene, made.attack, len(first.inputs)),
    }


def _simulated(scene: Scene, attack: Attack, examples: int) -> int:
    """Count the updates that a learner simulated to learn from: a pass more than its epochs."""
    return (attack.epochs + 1) * lessons(scene, examples) if isinstance(attack, Learned) else 0


def _in_parts(client: Client, batch: Batch) -> bool:
    """Say whether local steps take the examples in parts, so that it matters who was in which."""
    local = client.local
    return local is not None and (local.sampling == "poisson" or local.batch * client.members < len(batch.inputs))


def _afforded(
    scene: Scene,
    cell: Address,
    attack: Attack,
    numbers: range,
    run: Callable[[Attack], object],
    plans: Plans,
) -> Attack:
    """Cut the attack down to its share of the run's budget, if there is one."""
    config = scene.config
    if config.budget is None:
        return attack
    sharers, examples = sharers_of(scene, cell), config.client[cell.client].examples
    searches = min(config.rounds, examples) if isinstance(attack, Persistent) else 1
    share = Share(sharers, len(numbers), config.victims, lessons(scene, examples), searches)
    return within(read_budget(config.budget), attack, share, run, plans)


def sharers_of(scene: Scene, cell: Address) -> int:
    """Count the attacks that share a cell's budget; a control has what its attack has on a defended client."""
    defence = first_met(scene.config, cell.attack) if cell.control else cell.defence
    return spenders(scene, cell.client, defence)


def spenders(scene: Scene, client: int, defence: str) -> int:
    """Count the attacks that share the budget of a defended client: those that apply to it, and search or learn."""
    on_it = [text for text, whose in pairs(scene.config) if whose == defence]
    return sum(spends(scene.attacks[text]) for text in on_it if (client, defence, text) not in scene.unfit)


def sharing(scene: Scene) -> dict[str, list[int]]:
    """Count those who share the budget of each defence, client by client; nothing where there is no budget."""
    clients = range(len(scene.config.client)) if scene.config.budget else ()
    return {defence: [spenders(scene, client, defence) for client in clients] for defence in scene.config.defences}


def lessons(scene: Scene, examples: int) -> int:
    """Count the updates of so many examples that the public images are good for."""
    return 0 if scene.public is None else len(scene.public) // examples


def raw_update(client: Client, base: Client, params: Tensors, truth: Truth) -> Tensors:
    """Return what the same model would have sent without any defence: raw examples, the defence's noise switched off.

    Noise that the undefended client (`base`) has by itself is no defence: it stays.
    """
    plain = client.undefended_update()
    spec, own = plain.noise_spec(params, first(truth)), base.noise_spec(base.params(), first(truth))
    victims = truth.raw.inputs.shape[0]
    noise: Tensors = {}
    for name, described in spec.items():
        off = described.off().to(truth.raw.inputs.device)
        stays = name in own and own[name].shape == described.shape
        noise[name] = truth.last[name] if stays else off.expand(victims, *off.shape)
    state = {name: value.expand(victims, *value.shape) for name, value in plain.init(params).items()}
    return updates(plain, params, truth.raw, noise, state)[0]


def at_truth(made: Made, seen: Sequence[Observation], truth: Truth) -> Tensor:
    """Return the attacker's own objective [V] at the true examples, NaN if he cannot say: never used to choose.

    At their labels too, not at those that the attack read off an update, which are in no order. An attack that
    undoes a batch defence afterwards searches what the client trained on.
    """
    return judged(made, seen, truth)["at_truth"]


def judged(made: Made, seen: Sequence[Observation], truth: Truth) -> Tensors:
    """Return `at_truth`, and `match_at_truth` [V, 2 or 3] of attacks that compute it: the same without priors."""
    attack, found = made.attack, made.found
    if not isinstance(attack, Judge):
        return {"at_truth": torch.full_like(found.objective, torch.nan)}
    inputs = (
        truth.raw.inputs if attack.belief == "full" and not getattr(attack, "undo", False) else truth.transformed.inputs
    )
    knowledge = replace(made.knowledge, targets=truth.raw.targets)
    given = seen, made.belief, knowledge, made.key, inputs, truth.noise, found.plan
    tensors = {"at_truth": attack.evaluate(*given)}
    return tensors | (
        {"match_at_truth": attack.match(*given)} if isinstance(attack, Matcher) and found.match is not None else {}
    )


def _name(config: RunConfig, seed: int, index: int, defence: str, attack: str, stage: int | None, control: bool) -> str:
    whole = config.resolved()
    shared = ("data", "model", "client", "precision", "rounds", "server_lr", "budget", "observed")
    after = [] if stage is None else [stage, {k: v for k, v in whole["train"].items() if k != "audit_at"}]
    after += ["control"] * control
    secret = digest([{k: whole[k] for k in shared}, seed, index, defence, attack, *after])
    where = f"{config.model.name}-{config.data.name}-s{seed}-r{config.rounds - 1}"
    where += "" if stage is None else f"-t{stage}"
    where += f"-c{index}" if len(config.client) > 1 else ""
    against = "control" if control else defence
    return "--".join([*(_slug(part) for part in (where, against, attack)), secret[:7]])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:48] or "x"


def merge(parts: Sequence[Recovered]) -> Recovered:
    """Put the shares of a cell's victims together, in order."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    # Shares that measured their time budgets apart looked back at different iterations.
    shared = [name for name in first.tensors if all(name in part.tensors for part in parts)]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in shared}
    facts: Mapping[str, Any] = {
        **first.facts,
        "seconds": sum(part.facts["seconds"] for part in parts),
        "row_iterations": sum(part.facts["row_iterations"] for part in parts),
        "plan": [rows for part in parts for rows in part.facts["plan"]],
        "remarks": [remark for part in parts for remark in part.facts["remarks"]],
    }
    return replace(
        first, tensors=tensors, facts=dict(facts), statuses=tuple(s for part in parts for s in part.statuses)
    )
