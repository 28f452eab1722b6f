"""The result of attacking recorded updates: scores where the truth was recorded, and what does not fit the belief."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradveil.audit.cell import Address, Recovered
from gradveil.audit.observed import sighting
from gradveil.audit.records import Observed, fitted
from gradveil.audit.rounds import updates
from gradveil.audit.scene import Scene
from gradveil.audit.score import Named, info_of, score
from gradveil.audit.store import Cell
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, norm, stack, take
from gradveil.core.types import Batch
from gradveil.core.words import listing, number, percent, plural
from gradveil.federated.config import UNSEEN
from gradveil.federated.wire import Layout, inspect

NO_SCORE = "no score: the truth was not recorded, so nobody here can tell how near the reconstructions are"
"""What is said where a rate would stand."""
_APART = 0.25
"""Shares (of zeros, of different values) that are farther apart than this do not come from the same client."""
_SCALE = 30.0
_DRAWS = 8
_MANY = 1000
"""A tensor with fewer entries that are not zero is too small to tell a grid from chance."""


def score_observed(scene: Scene, cell: Address, found: Recovered, named: Named) -> Cell:
    """Score what came back where the truth was recorded; elsewhere keep it with the attacker's own objective."""
    observed = scene.source
    assert isinstance(observed, Observed)
    result = score(scene, cell, found, named) if observed.scored else _unscored(scene, cell, found, named)
    first = scene.config.first_victim
    sent = [record.facts for record in observed.records[first : first + scene.config.victims]]
    whose = [{"run": facts.run, "round": facts.round, "client": facts.client} for facts in sent]
    notes = list(doubts(scene, observed, cell, found.tensors["inputs"]))
    told = {"observed": whose, "recorded_defence": sent[0].defence, "notes": notes}
    return replace(result, info={**result.info, **told})


def _unscored(scene: Scene, cell: Address, found: Recovered, named: Named) -> Cell:
    """Keep reconstructions, labels and objectives; there are no controls where nothing is compared."""
    tensors = found.tensors
    info = {**info_of(scene, cell, found, named), "controls": {}, "missing": {}, "unscored": NO_SCORE}
    records = [
        {
            "victim": scene.config.first_victim + v,
            "predicted": tensors["targets"][v].tolist(),
            "status": status,
            "iterations": int(tensors["iterations"][v]),
            "objective": float(tensors["objective"][v]),
            "initial": float(tensors["initial"][v]),
            "restart": int(tensors["restart"][v]),
        }
        for v, status in enumerate(found.statuses)
    ]
    kept = {"reconstruction": scene.pixels(tensors["inputs"]).float().nan_to_num(0.5).contiguous()}
    return Cell(info, records, None, kept if scene.config.images else {})


def doubts(scene: Scene, observed: Observed, cell: Address, inputs: Tensor) -> Iterator[str]:
    """Say what of the records contradicts the believed client, and what was never said and had to be assumed."""
    config, first = scene.config, scene.config.first_victim
    records = observed.records[first : first + config.victims]
    facts, client = records[0].facts, config.client[cell.client]
    yield from _otherwise(facts.model_dump(), cell.defence, client.model_dump(), client.examples)
    left = fitted(records[0], scene.client(cell.client, cell.defence, cell.seed)).left_out
    if left:
        named = listing([*left[:3], *([f"{len(left) - 3} more"] if len(left) > 3 else [])])
        yield f"{plural(len(left), 'buffer')} sent too ({named}): no attack reads them"
    narrow = {
        str(e.values).removeprefix("torch.") for r in records for e in inspect(r.sent, Layout.of(r.update)).entries
    }
    narrow -= {str(v.dtype).removeprefix("torch.") for r in records for v in r.update.values()}
    if narrow:
        yield f"values travelled as {listing(sorted(narrow))}: what rounding took away is lost to attackers too"
    believed, seen = sighting(scene, observed, cell, range(1))
    yield from _unlike(_simulated(scene, cell, believed, seen.params), {n: v[0] for n, v in seen.update.items()})
    if config.data.name == UNSEEN and config.data.mean is None:
        lower, upper = (bound.to(inputs) for bound in scene.victims.bounds)
        share = float(((inputs <= lower) | (inputs >= upper)).double().mean())
        told = "data.mean and data.std were not said: inputs were taken as pixels from 0 to 1"
        yield f"{told}, and {percent(share)} of what was reconstructed lies on these bounds"


def _otherwise(facts: Mapping[str, Any], defence: str, client: Mapping[str, Any], examples: int) -> Iterator[str]:
    """Say where the belief is not what was recorded."""
    if facts["defence"] is not None and facts["defence"] != defence:
        yield f"recorded as sent with the defence '{facts['defence']}', attacked as if with '{defence}'"
    if facts["defence"] is None:
        yield f"which defence the client has was not recorded: '{defence}' is believed"
    if facts["examples"] is None:
        yield f"how many examples an update is made from was not recorded: {examples} are believed"
    elif facts["examples"] != examples:
        yield f"recorded as made from {plural(facts['examples'], 'example')}, attacked as if from {examples}"
    if facts["local"] is not None and facts["local"] != client["local"]:
        yield "the local training that is believed is not the one that was recorded"


def _simulated(scene: Scene, cell: Address, client: Client, params: Tensors) -> Tensors:
    """Let believed clients send updates of random images, leading V: what sort of values they send."""
    key, size = Key(cell.seed, (Stream.SIMULATED,)), scene.config.client[cell.client].examples
    data = scene.victims
    lower, upper = (bound.to(next(iter(params.values()))) for bound in data.bounds)
    draw = key.child(Stream.INPUTS).generator()
    pixels = torch.rand((_DRAWS, size, *data.inputs.shape[1:]), generator=draw).to(lower)
    targets = torch.randint(scene.classes, (_DRAWS, size), generator=draw).to(lower.device)
    batch = Batch(lower + (upper - lower) * pixels, targets)
    spec = client.noise_spec(params, Batch(batch.inputs[0], targets[0]))
    rows = stack([spec.sample(key.child(i)) for i in range(_DRAWS)])
    noise = {name: value.to(lower.device) for name, value in rows.items()}
    state = {name: value.expand(_DRAWS, *value.shape) for name, value in client.init(params).items()}
    return updates(client, params, batch, noise, state)[0]


def _unlike(believed: Tensors, seen: Tensors) -> Iterator[str]:
    """Say in what an update differs that no images explain: zeros, values on a grid, scale."""
    each = [take(believed, [i]) for i in range(_DRAWS)]
    zeros = [_zeros(update) for update in (believed, seen)]
    if abs(zeros[0] - zeros[1]) > _APART:
        told = f"{percent(zeros[1])} of what was sent is zero, of what the believed client sends {percent(zeros[0])}"
        yield (
            f"{told}: believe a pruning or compressing defence" if zeros[1] > zeros[0] else f"{told}: nothing pruned it"
        )
    expected, found = _different(each[0]), _different(seen)
    if expected is not None and found is not None and expected - found > _APART:
        yield "what was sent has few different values, and the believed client sends many: believe a quantising one"
    if expected is not None and found is not None and found - expected > _APART:
        yield "the believed client sends few different values, and what was sent has many: nothing quantised it"
    size, sizes = float(norm(seen)), [float(norm(update)) for update in each]
    if not min(sizes) / _SCALE < size < max(sizes) * _SCALE:
        told = f"of what was sent the norm is {number(size)}, of what the believed client sends {number(fmean(sizes))}"
        yield f"{told} for random images: look at the step size, the number of steps, and whether it clips"


def _zeros(update: Tensors) -> float:
    return sum(int((v == 0).sum()) for v in update.values()) / sum(v.numel() for v in update.values())


def _different(update: Tensors) -> float | None:
    """Return the share of different values among those of the largest tensor that are not zero."""
    largest = max(update.values(), key=lambda value: value.numel())
    values = largest[largest != 0]
    return len(values.abs().unique()) / len(values) if len(values) >= _MANY else None
