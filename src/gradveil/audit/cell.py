"""One cell of an audit: a client, a defence, an attack and a seed; and how its updates are made and attacked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.base import Attack, Observation, Planner, Progress
from gradveil.attacks.knowledge import How, Infer, Knowledge, Known, Neutral, Optimise, Sample
from gradveil.audit.config import RunConfig, digest
from gradveil.audit.plans import settled
from gradveil.audit.scene import Scene, Truth
from gradveil.client import Client
from gradveil.core.errors import fail
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, select, stack, take
from gradveil.core.types import Batch
from gradveil.metrics import cosine, dense_bytes, relative_distance, sparse_bytes

_UPDATE_VALUES = 2**26
"""How many numbers of updates are computed at once."""
_WAYS: dict[type, str] = {Known: "known", Optimise: "optimise", Sample: "sample", Infer: "infer", Neutral: "neutral"}
_LABELS = {"given": "known", "joint": "optimise", "idlg": "infer", "restore": "infer"}


@dataclass(frozen=True)
class Address:
    """The address of a cell within a run."""

    id: str
    client: int
    defence: str
    attack: str
    seed: int


@dataclass(frozen=True)
class Recovered:
    """What one share of a cell's victims gave: tensors with leading V, plain facts, and a status for every victim."""

    tensors: Tensors
    facts: dict[str, Any]
    statuses: tuple[str, ...]


def cells(config: RunConfig) -> list[Address]:
    """List the cells of a run: seeds, clients, attacks, defences (the last runs fastest)."""
    return [
        Address(_name(config, seed, index, defence, attack), index, defence, attack, seed)
        for seed in config.seeds
        for index in range(len(config.client))
        for attack in config.attacks
        for defence in config.defences
    ]


def recover(
    scene: Scene, cell: Address, numbers: range, progress: Callable[[Progress], None], plan_file: Path | None = None
) -> Recovered:
    """Make the updates of these victims and attack them.

    `plan_file` keeps the attack's plan, which is chosen for this machine as it is now: written before the attack
    starts, read again after an interruption. The same plan gives bit-identical results.
    """
    attack = scene.attacks[cell.attack]
    client = scene.client(cell.client, cell.defence, cell.seed)
    params = client.params()
    truth = make_truth(scene, cell, client, params, numbers)
    sent = updates(client, params, truth.raw, truth.noise, truth.state)
    belief = client if attack.belief == "full" else client.undefended_update()
    knowledge, grants = grant(scene, attack, belief, params, truth)
    first = scene.config.first_victim
    seen = Observation(params, sent, truth.raw.inputs.shape[1], tuple(first + number for number in numbers))
    done = 0

    def count(step: Progress) -> None:
        nonlocal done
        done = step.row_iterations
        progress(step)

    key = Key(cell.seed, ("attack",))
    plan: tuple[int, ...] = ()
    if plan_file is not None and isinstance(attack, Planner):
        plan = settled(plan_file, partial(attack.plan, [seen], belief, knowledge, key))
    found = attack([seen], belief, knowledge, key, count, plan)
    raw = _raw_update(client, params, truth)
    tensors = {
        "inputs": found.inputs,
        "targets": found.targets,
        "objective": found.objective,
        "objectives": found.objectives,
        "initial": found.initial,
        "iterations": found.iterations,
        "restart": found.restart,
        "distance": relative_distance(sent, raw),
        "cosine": cosine(sent, raw),
        "bytes_dense": dense_bytes(sent),
        "bytes_sent": sparse_bytes(sent),
    }
    if client.batch:
        tensors["transformed"] = truth.transformed.inputs
    facts = {
        "params": sum(value[0].numel() for value in sent.values()),
        "guarantee": _guarantee(client),
        "belief": attack.belief,
        "grants": [*scene.facts, *grants],
        "knowledge": told(attack),
        # Of the attack alone; of a cell in several shares their sum: working time, not what a clock on the wall shows.
        "seconds": found.seconds,
        "row_iterations": done or int(found.iterations.sum()) * found.objectives.shape[1],
        "plan": list(found.plan),
        "restarts": found.objectives.shape[1],
    }
    kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return Recovered(kept, facts, tuple(found.status))


def make_truth(scene: Scene, cell: Address, client: Client, params: Tensors, numbers: range) -> Truth:
    """Draw what the clients drew: victim by victim, so that no share of victims changes another's noise."""
    raw = scene.batch(scene.examples(cell.client, numbers))
    spec = client.noise_spec(params, Batch(raw.inputs[0], raw.targets[0]))
    first, device = scene.config.first_victim, scene.config.device
    rows = [spec.sample(Key(cell.seed, ("client", first + number))) for number in numbers]
    noise = {name: value.to(device) for name, value in stack(rows).items()}
    state = {name: value.expand(len(numbers), *value.shape) for name, value in client.init(params).items()}
    transformed = raw
    if client.batch:
        each = []
        for i in range(len(numbers)):
            batch = Batch(raw.inputs[i], raw.targets[i])
            for j, transform in enumerate(client.batch):
                batch = transform.apply(batch, {k: v[i] for k, v in select(noise, f"batch.{j}").items()})
            each.append(batch)
        transformed = Batch(torch.stack([b.inputs for b in each]), torch.stack([b.targets for b in each]))
    return Truth(raw, transformed, noise, state)


def updates(client: Client, params: Tensors, batch: Batch, noise: Tensors, state: Tensors) -> Tensors:
    """Compute what the clients send, leading V, a few victims at a time where the model is large."""
    size = max(1, _UPDATE_VALUES // sum(value.numel() for value in params.values()))
    parts: list[Tensors] = []
    for start in range(0, batch.inputs.shape[0], size):
        rows = slice(start, start + size)
        some = Batch(batch.inputs[rows], batch.targets[rows])
        parts.append(client.updates(params, some, take(noise, rows), take(state, rows))[0])
    return {name: torch.cat([part[name] for part in parts]).detach() for name in parts[0]}


def grant(scene: Scene, attack: Attack, belief: Client, params: Tensors, truth: Truth) -> tuple[Knowledge, list[str]]:
    """Tell the attack what its protocol says it knows, and name everything that is true knowledge of the secret."""
    secret = {name: truth.noise[name] for name in belief.noise_spec(params, _first(truth)) if name in truth.noise}
    secret |= _statistics(attack, belief, params, truth)
    pinned = belief.intermediates(params)
    grants: list[str] = []
    tensors: dict[str, How] = {}
    targets: Tensor | None = None
    if told(attack)["targets"] == "known":
        targets = truth.raw.targets
        grants.append("targets: the true labels")
    for pattern, way in attack.knowledge.items():
        if pattern == "targets":
            continue
        if isinstance(way, Known) and way.value is None:
            matching = [name for name in secret if fnmatchcase(name, pattern)]
            read_off = [name for name in pinned if any(fnmatchcase(name, earlier) for earlier in tensors)]
            if not matching and any(fnmatchcase(name, pattern) for name in pinned if name not in read_off):
                remedy = "let the attack infer it from what was sent, or recompute it"
                raise fail(f"attack {attack.name}, {pattern}", "is an intermediate, which nobody can be told", remedy)
            for name in matching:
                tensors.setdefault(name, Known(secret[name]))
                grants.append(f"{name}: its true value")
        else:
            tensors[pattern] = way
    data = scene.victims
    lower, upper = (bound.to(scene.config.device, scene.dtype) for bound in data.bounds)
    shape = (data.channels, int(data.inputs.shape[-2]), int(data.inputs.shape[-1]))
    return Knowledge(shape, lower, upper, max(len(data.classes), 2), tensors, targets), grants


def _statistics(attack: Attack, belief: Client, params: Tensors, truth: Truth) -> Tensors:
    """Compute what an attack may be told of the batch that passed through the normalisation layers."""
    if not any(pattern.startswith("statistics.") for pattern in attack.knowledge):
        return {}
    noise = {name: value for name, value in truth.noise.items() if name in belief.noise_spec(params, _first(truth))}
    with torch.no_grad():
        return {f"statistics.{n}": v for n, v in belief.statistics(params, truth.raw, noise).items()}


def _first(truth: Truth) -> Batch:
    return Batch(truth.raw.inputs[0], truth.raw.targets[0])


def told(attack: Attack) -> dict[str, str]:
    """Say in one word how an attack knows each named tensor, the labels first."""
    ways = {pattern: _WAYS[type(way)] for pattern, way in attack.knowledge.items()}
    labels = getattr(attack, "labels", None)
    return {"targets": _LABELS.get(str(labels), "neutral"), **ways}


def _raw_update(client: Client, params: Tensors, truth: Truth) -> Tensors:
    """Return what the same model would have sent without any defence: raw examples, its own noise switched off."""
    plain = client.undefended_update()
    spec = plain.noise_spec(params, _first(truth))
    victims = truth.raw.inputs.shape[0]
    noise: Tensors = {}
    for name, described in spec.items():
        off = described.off().to(truth.raw.inputs.device)
        noise[name] = truth.noise[name] if name == "schedule" else off.expand(victims, *off.shape)
    return updates(plain, params, truth.raw, noise, {})


def _guarantee(client: Client) -> str:
    said = [part.guarantee for part in (client.step, client.send) if part is not None]
    return "; ".join(said) or "no formal guarantee"


def _name(config: RunConfig, seed: int, index: int, defence: str, attack: str) -> str:
    whole = config.resolved()
    secret = digest([{k: whole[k] for k in ("data", "model", "client", "precision")}, seed, index, defence, attack])
    where = f"{config.model.name}-{config.data.name}-s{seed}-r0" + (f"-c{index}" if len(config.client) > 1 else "")
    return "--".join([*(_slug(part) for part in (where, defence, attack)), secret[:7]])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:48] or "x"


def merge(parts: Sequence[Recovered]) -> Recovered:
    """Put the shares of a cell's victims together, in order."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors}
    facts: Mapping[str, Any] = {
        **first.facts,
        "seconds": sum(part.facts["seconds"] for part in parts),
        "row_iterations": sum(part.facts["row_iterations"] for part in parts),
        "plan": [rows for part in parts for rows in part.facts["plan"]],
    }
    return replace(
        first, tensors=tensors, facts=dict(facts), statuses=tuple(s for part in parts for s in part.statuses)
    )
