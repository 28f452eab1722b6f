"""Attacking recorded updates: as simulated ones are attacked, with what was received and sent in place of a simulation.

Nobody recorded what a client drew in secret. What needs it (the objective at the truth, the distance to an update
without the defence) is left out for clients who draw something.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradveil.attacks.base import Observation, Progress
from gradveil.audit.cell import Address, Made, Recovered, attacked, judged, recovered, tensors_of
from gradveil.audit.plans import UNPLANNED, Plans
from gradveil.audit.records import Observed, fitted
from gradveil.audit.rounds import Truth, updates
from gradveil.audit.scene import Scene
from gradveil.audit.utility import worth
from gradveil.client import Client
from gradveil.core.tree import Tensors, stack
from gradveil.core.types import Batch
from gradveil.metrics import cosine, relative_distance
from gradveil.nn.weights import put_weights


def recover_observed(
    scene: Scene, cell: Address, numbers: range, progress: Callable[[Progress], None], plans: Plans = UNPLANNED
) -> Recovered:
    """Attack the recorded updates of these victims, who all have the same global model (`Observed.together`)."""
    observed = scene.source
    assert isinstance(observed, Observed)
    client, seen = sighting(scene, observed, cell, numbers)
    raw = scene.batch(scene.examples(cell.client, numbers))
    # Of what is secret a record holds the examples at most: nothing else can be granted, and the scene has refused
    # attacks that ask for it.
    truth = Truth(raw, raw, {}, {}, {})
    made = attacked(scene, cell, client, [seen], truth, numbers, progress, plans)
    unknown = torch.full((len(numbers),), torch.nan, dtype=torch.float64)
    compared = ("at_truth", "distance", "cosine", "first_order_utility", "second_order_utility")
    tensors = {**tensors_of(made.found, seen), **dict.fromkeys(compared, unknown)}
    if observed.scored:
        tensors |= _beside_truth(made, client, seen, raw)
    return recovered(scene, client, made, seen.update, truth, tensors, {"unbounded": "the updates were recorded"})


def sighting(scene: Scene, observed: Observed, cell: Address, numbers: range) -> tuple[Client, Observation]:
    """Return the client that is believed in, as it was in the round, and what the server saw of these victims."""
    client, first = scene.client(cell.client, cell.defence, cell.seed), scene.config.first_victim
    records = [observed.records[first + number] for number in numbers]
    fits = [fitted(record, client) for record in records]
    put_weights(client.model, fits[0].received)
    params = client.params()
    like = next(iter(params.values()))
    sent = stack([{name: value.to(like) for name, value in fit.update.items()} for fit in fits])
    examples, messages = scene.config.client[cell.client].examples, dict(records[0].messages)
    seen = Observation(
        params, sent, examples, tuple(first + n for n in numbers), 0, messages, max(0, records[0].facts.round - 1)
    )
    return seen.believed(client), seen


def _beside_truth(made: Made, client: Client, seen: Observation, raw: Batch) -> Tensors:
    """Compare with the truth as far as the examples alone determine it: nothing that is drawn changes the result."""
    own, plain = Batch(raw.inputs[0], raw.targets[0]), client.undefended_update()
    found: Tensors = {}
    if _determined(made.belief, seen.params, own):
        noise = _off(made.belief, seen.params, raw)
        found |= judged(made, [seen], Truth(raw, raw, noise, noise, {}))
    if _determined(plain, seen.params, own):
        state = {name: value.expand(len(raw.targets), *value.shape) for name, value in plain.init(seen.params).items()}
        bare = updates(plain, seen.params, raw, _off(plain, seen.params, raw), state)[0]
        found |= {"distance": relative_distance(seen.update, bare), "cosine": cosine(seen.update, bare)}
        found |= worth(seen.update, bare)
    return found


def _determined(client: Client, params: Tensors, own: Batch) -> bool:
    """Say whether an update follows from its examples: none of it is drawn, or only the order within a whole batch."""
    drawn = set(client.noise_spec(params, own))
    if client.local is not None and client.local.batch == len(own.targets):
        drawn -= {"schedule"}
    return not drawn


def _off(client: Client, params: Tensors, raw: Batch) -> Tensors:
    spec = client.noise_spec(params, Batch(raw.inputs[0], raw.targets[0]))
    return {name: n.off().expand(len(raw.targets), *n.shape) for name, n in spec.items()}
