"""Attacks on recorded updates, scored where the ground truth was recorded.

Nobody recorded what a client drew in secret. What needs it (the objective at the truth, the distance to an update
without the defence) is left out for clients who draw something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.labels import class_signs, sign_is_turned
from gradveil.attacks.protocol import Observation, Progress
from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.budgets import UNPLANNED, Plans
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import Truth, updates
from gradveil.audit.recorded.recorded_updates import Observed, fitted
from gradveil.audit.run_directory import Trial
from gradveil.audit.score import TrialNames, info_of, score
from gradveil.audit.trial import Made, Recovered, attacked, judged, recovered, tensors_of, worth
from gradveil.client import Client
from gradveil.core.formatting import listing, number, percent, plural
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, norm, stack, take
from gradveil.core.types import Batch, placed
from gradveil.federated.training_config import UNSEEN
from gradveil.metrics import cosine, relative_distance
from gradveil.nn.weight_files import put_weights
from gradveil.wire.codec import Layout, inspect


def recover_observed(
    experiment: Experiment,
    trial: TrialAddress,
    numbers: range,
    progress: Callable[[Progress], None],
    plans: Plans = UNPLANNED,
) -> Recovered:
    """Attack the recorded updates of these target clients, who all have the same global model (`Observed.together`)."""
    observed = experiment.source
    assert isinstance(observed, Observed)
    client, seen = sighting(experiment, observed, trial, numbers)
    raw = experiment.batch(experiment.examples(trial.client, numbers))
    # Of what is secret a record holds the examples at most: nothing else can be granted, and the experiment has refused
    # attacks that ask for it.
    truth = Truth(raw, raw, {}, {}, {})
    made = attacked(experiment, trial, client, [seen], truth, numbers, progress, plans)
    unknown = torch.full((len(numbers),), torch.nan, dtype=torch.float64)
    compared = ("at_truth", "distance", "cosine", "first_order_utility", "second_order_utility")
    tensors = {**tensors_of(made.found, seen), **dict.fromkeys(compared, unknown)}
    if observed.scored:
        tensors |= _beside_truth(made, client, seen, raw)
    return recovered(experiment, client, made, seen.update, truth, tensors, {"unbounded": "the updates were recorded"})


def sighting(
    experiment: Experiment, observed: Observed, trial: TrialAddress, numbers: range
) -> tuple[Client, Observation]:
    """Return the client that is believed in, as it was in the round, and what the server saw of these targets."""
    client, first = experiment.client(trial.client, trial.defence, trial.seed), experiment.config.first_target_client
    records = [observed.records[first + number] for number in numbers]
    fits = [fitted(record, client) for record in records]
    put_weights(client.model, fits[0].received)
    params = client.params()
    like = next(iter(params.values()))
    sent = stack([{name: value.to(like) for name, value in fit.update.items()} for fit in fits])
    examples, messages = experiment.config.client[trial.client].examples, dict(records[0].messages)
    seen = Observation(
        params, sent, examples, tuple(first + n for n in numbers), 0, messages, max(0, records[0].facts.round - 1)
    )
    return seen.believed(client), seen


def _beside_truth(made: Made, client: Client, seen: Observation, raw: Batch) -> Tensors:
    """Compare with the truth as far as the examples alone determine it: nothing that is drawn changes the result."""
    own, plain = Batch(raw.inputs[0], raw.targets[0]), client.undefended_update()
    found: Tensors = {}
    if _determined(made.simulated_client, seen.params, own):
        noise = _off(made.simulated_client, seen.params, raw)
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


NO_SCORE = (
    "no score: the private examples were not recorded, so no rate can be measured; to get one, record them too "
    "(record(..., truth=...) in Flower, --record-truth of gradveil train), or audit the model without --observed"
)
"""What is said where a rate would stand."""
_APART = 0.25
"""Shares (of zeros, of different values) that are farther apart than this do not come from the same client."""
_SCALE = 30.0
_DRAWS = 8
_MANY = 1000
"""A tensor with fewer entries that are not zero is too small to tell a grid from chance."""


def score_observed(experiment: Experiment, trial: TrialAddress, found: Recovered, named: TrialNames) -> Trial:
    """Score what came back where the truth was recorded; elsewhere keep it with the attacker's own objective."""
    observed = experiment.source
    assert isinstance(observed, Observed)
    result = score(experiment, trial, found, named) if observed.scored else _unscored(experiment, trial, found, named)
    first = experiment.config.first_target_client
    sent = [record.facts for record in observed.records[first : first + experiment.config.target_clients]]
    whose = [{"run": facts.run, "round": facts.round, "client": facts.client} for facts in sent]
    notes = list(doubts(experiment, observed, trial, found.tensors["inputs"]))
    told = {"observed": whose, "notes": notes}
    return replace(result, info={**result.info, **told})


def _unscored(experiment: Experiment, trial: TrialAddress, found: Recovered, named: TrialNames) -> Trial:
    """Keep reconstructions, labels and objectives; there are no controls where nothing is compared."""
    tensors = found.tensors
    info = {**info_of(experiment, trial, found, named), "controls": {}, "missing": {}, "unscored": NO_SCORE}
    records = [
        {
            "target_client": experiment.config.first_target_client + v,
            "predicted": tensors["targets"][v].tolist(),
            "status": status,
            "iterations": int(tensors["iterations"][v]),
            "objective": float(tensors["objective"][v]),
            "initial": float(tensors["initial"][v]),
            "restart": int(tensors["restart"][v]),
        }
        for v, status in enumerate(found.statuses)
    ]
    views, private = experiment.views(tensors["inputs"]), experiment.config.images
    if private and not experiment.space.pictured:
        texts = [[experiment.space.in_words(view) for view in batch] for batch in views]
        records = [{**record, "reconstructions": own} for record, own in zip(records, texts, strict=True)]
    kept = {"reconstruction": views.float().nan_to_num(0.5).contiguous()}
    return Trial(info, records, None, kept if private else {})


def doubts(experiment: Experiment, observed: Observed, trial: TrialAddress, inputs: Tensor) -> Iterator[str]:
    """Say what of the records contradicts the simulated client, and what was never said and had to be assumed."""
    config, first = experiment.config, experiment.config.first_target_client
    records = observed.records[first : first + config.target_clients]
    facts, client = records[0].facts, config.client[trial.client]
    yield from _otherwise(facts.model_dump(), trial.defence, client.model_dump(), client.examples)
    left = fitted(records[0], experiment.client(trial.client, trial.defence, trial.seed)).left_out
    if left:
        named = listing([*left[:3], *([f"{len(left) - 3} more"] if len(left) > 3 else [])])
        yield f"{plural(len(left), 'buffer')} sent too ({named}): no attack reads them"
    narrow = {
        str(e.values).removeprefix("torch.") for r in records for e in inspect(r.sent, Layout.of(r.update)).entries
    }
    narrow -= {str(v.dtype).removeprefix("torch.") for r in records for v in r.update.values()}
    if narrow:
        yield f"values travelled as {listing(sorted(narrow))}: what rounding took away is lost to attackers too"
    believed, seen = sighting(experiment, observed, trial, range(1))
    ours = _simulated(experiment, trial, believed, seen.params)
    drawn = "random images" if experiment.space.pictured else f"public {experiment.space.words.plural}"
    yield from _unlike(ours, {n: v[0] for n, v in seen.update.items()}, drawn)
    signs = class_signs(
        believed, seen.update, placed(inputs[0], next(iter(seen.params.values())).device, experiment.dtype)
    )
    if signs is not None and sign_is_turned(signs[1][0], client.examples):
        yield f"'{signs[0]}' has the sign of new minus old parameters: record gradients, or old minus new"
    if config.data.name == UNSEEN and config.data.mean is None:
        lower, upper = experiment.space.bounds(inputs)
        share = float(((inputs <= lower) | (inputs >= upper)).double().mean())
        told = "data.mean and data.std were not said: inputs were taken as pixels from 0 to 1"
        yield f"{told}, and {percent(share)} of what was reconstructed lies on these bounds"


def _otherwise(facts: Mapping[str, Any], defence: str, client: Mapping[str, Any], examples: int) -> Iterator[str]:
    """Say where the simulated client is not what was recorded."""
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


def _simulated(experiment: Experiment, trial: TrialAddress, client: Client, params: Tensors) -> Tensors:
    """Let simulated clients send updates of random images, or of public texts or rows: [V, ...].

    Random tokens would be no texts.
    """
    key, size = Key(trial.seed, (Stream.SIMULATED,)), experiment.config.client[trial.client].examples
    lower, upper = experiment.space.bounds(next(iter(params.values())))
    draw = key.child(Stream.INPUTS).generator()
    if experiment.space.pictured:
        pixels = torch.rand((_DRAWS, size, *experiment.space.shape), generator=draw).to(lower)
        inputs = lower + (upper - lower) * pixels
    else:
        known = (experiment.public or experiment.private).inputs
        chosen = known[torch.randint(len(known), (_DRAWS, size), generator=draw).to(known.device)]
        inputs = placed(chosen, lower.device, experiment.dtype)
    targets = torch.randint(experiment.classes, (_DRAWS, size), generator=draw).to(lower.device)
    batch = Batch(inputs, targets)
    spec = client.noise_spec(params, Batch(batch.inputs[0], targets[0]))
    rows = stack([spec.sample(key.child(i)) for i in range(_DRAWS)])
    noise = {name: value.to(lower.device) for name, value in rows.items()}
    state = {name: value.expand(_DRAWS, *value.shape) for name, value in client.init(params).items()}
    return updates(client, params, batch, noise, state)[0]


def _unlike(believed: Tensors, seen: Tensors, drawn: str) -> Iterator[str]:
    """Say in what an update differs that no examples explain, from updates of those drawn: zeros, values, scale."""
    each = [take(believed, [i]) for i in range(_DRAWS)]
    zeros = [_zeros(update) for update in (believed, seen)]
    if abs(zeros[0] - zeros[1]) > _APART:
        told = f"{percent(zeros[1])} of what was sent is zero, of what the simulated client sends {percent(zeros[0])}"
        yield (
            f"{told}: believe a pruning or compressing defence" if zeros[1] > zeros[0] else f"{told}: nothing pruned it"
        )
    expected, found = _different(each[0]), _different(seen)
    if expected is not None and found is not None and expected - found > _APART:
        yield "what was sent has few different values, and the simulated client sends many: believe a quantising one"
    if expected is not None and found is not None and found - expected > _APART:
        yield "the simulated client sends few different values, and what was sent has many: nothing quantised it"
    size, sizes = float(norm(seen)), [float(norm(update)) for update in each]
    if not min(sizes) / _SCALE < size < max(sizes) * _SCALE:
        told = f"of what was sent the norm is {number(size)}, of what the simulated client sends {number(fmean(sizes))}"
        yield f"{told} for {drawn}: look at the step size, the number of steps, and whether it clips"


def _zeros(update: Tensors) -> float:
    return sum(int((v == 0).sum()) for v in update.values()) / sum(v.numel() for v in update.values())


def _different(update: Tensors) -> float | None:
    """Return the share of different values among those of the largest tensor that are not zero."""
    largest = max(update.values(), key=lambda value: value.numel())
    values = largest[largest != 0]
    return len(values.abs().unique()) / len(values) if len(values) >= _MANY else None
