"""Observations of the server: the clients' updates, round after round, and the ground truth behind them.

The target clients of a run are the clients of one federation. Each has the same examples in every round; the server
moves the global parameters by the mean update. With one round nothing moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from gradveil.attacks.protocol import Observation
from gradveil.client import Client, announced, proposer, scheduled, speakers, transformed_batch
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, stack, take, tmap
from gradveil.core.types import Batch
from gradveil.defences.error_feedback import residual_of
from gradveil.federated.held_back import Compressed, HeldBack, held_back
from gradveil.federated.training_state import Standing

if TYPE_CHECKING:
    from gradveil.audit.attack_selection import TrialAddress
    from gradveil.audit.experiment import Experiment


_UPDATE_VALUES = 2**26
"""How many numbers of updates are computed at once."""
_GRADIENT_LR, _LOCAL_LR = 0.1, 1.0


@dataclass(frozen=True)
class Truth:
    """What really went into the updates, target clients first. Only the audit holds it; no attack ever receives it."""

    raw: Batch
    """[V, B, ...] the examples themselves."""
    transformed: Batch
    """What a batch defence made of them in the last round; the same as `raw` where there is none."""
    noise: Tensors
    """Every random tensor of the client, leading V; those of round r > 0 are `round<r>.<name>`."""
    last: Tensors
    """The noise of the last round, under its plain names."""
    state: Tensors
    """The client's state before the last round, leading V."""
    held_back: tuple[HeldBack, ...] = ()
    """What error feedback held back in each round, over all clients; empty without it."""


def in_round(number: int, name: str) -> str:
    """Name a tensor of a round: the first round's names are the client's own."""
    return f"round{number}.{name}" if number else name


def plain_name(name: str) -> str:
    """Cut the round off a name.

    >>> plain_name("round3.model.drop.mask"), plain_name("model.drop.mask")
    ('model.drop.mask', 'model.drop.mask')
    """
    return re.sub(r"^round\d+\.", "", name)


def observe(
    experiment: Experiment,
    trial: TrialAddress,
    client: Client,
    numbers: range,
    standing: Standing | None = None,
    resent: Callable[[int], Tensors] | None = None,
) -> tuple[list[Observation], Truth]:
    """Run the rounds, and return what the server sees of these target clients and the truth about them.

    In more than one round every target client of the run takes part, also those whose turn another share of the trial
    is. The client that speaks before a round is no target client, and in every round the same: one with the images that
    follow the target clients', which sends too. (A training draws the speaker of each round; a target client that
    spoke would name the positions of its own largest entries.) Where the run follows a training, the rounds begin
    where it stands. A malicious server may say which parameters it sends in the rounds after the first (`resent`).
    """
    rounds, first, count = (
        experiment.config.rounds,
        experiment.config.first_target_client,
        experiment.config.target_clients,
    )
    target_clients = range(count) if rounds > 1 else numbers
    mine = slice(numbers.start - target_clients.start, numbers.stop - target_clients.start)
    others = slice(len(target_clients), None)
    everybody = [*target_clients, *range(count, count + speakers(client))]
    params, raw = client.params(), experiment.batch(experiment.examples(trial.client, everybody, trial.seed))
    state, mean, past = _start(experiment, client, everybody, standing)
    rate = experiment.config.server_lr
    rate = (_LOCAL_LR if client.local else _GRADIENT_LR) if rate is None else rate
    seen: list[Observation] = []
    noise: Tensors = {}
    now: Tensors = {}
    before = state
    held: list[HeldBack] = []
    for number in range(rounds):
        before = state
        params = resent(number) if resent and number else params
        now = draw(experiment, trial, client, raw, everybody, number)
        if "kept.joined" in state:  # whoever has taken part in a round has drawn for good what it keeps to itself
            now |= client.pipeline.kept(now, state)
        theirs = Batch(*(value[others] for value in raw))
        said = _said(scheduled(client, past + number), params, theirs, take(now, others), take(state, others))
        told = announced(client, said, mean, past + number)
        sent, state = updates(told, params, raw, now, state)
        held += _held_back(client, sent, before, state)
        own = take(now, mine)
        noise |= {in_round(number, name): value for name, value in own.items()}
        ids = tuple(first + n for n in numbers)
        seen.append(Observation(params, take(sent, mine), raw.inputs.shape[1], ids, number, dict(told.messages), past))
        mean = tmap(lambda value: value.mean(0), sent)
        params = {name: value - rate * mean[name] if name in mean else value for name, value in params.items()}
    mine_raw, last = Batch(*(value[mine] for value in raw)), take(now, mine)
    return seen, Truth(mine_raw, _transformed(client, mine_raw, last), noise, last, take(before, mine), tuple(held))


def _held_back(client: Client, sent: Tensors, before: Tensors, after: Tensors) -> list[HeldBack]:
    """Measure a round's error feedback over clients with leading U; nothing without it."""
    then, now = (residual_of(client.send, state) for state in (before, after))
    if not then or not now or client.members > 1:
        return []
    count = len(next(iter(now.values())))
    found = held_back(Compressed(*(tmap(itemgetter(u), part) for part in (sent, then, now))) for u in range(count))
    return [found] if found else []


def _start(
    experiment: Experiment, client: Client, everybody: Sequence[int], standing: Standing | None
) -> tuple[Tensors, Tensors, int]:
    """Return what each client has kept [V], the mean update of the round before, and how many rounds there were."""
    fresh = client.init(client.params())
    if standing is None:
        return {name: value.expand(len(everybody), *value.shape) for name, value in fresh.items()}, {}, 0
    owners = (experiment.source.owner(experiment.config.first_target_client + number) for number in everybody)
    return stack([standing.clients.get(owner, fresh) for owner in owners]), standing.mean, len(standing.records)


def _said(client: Client, params: Tensors, batch: Batch, noise: Tensors, state: Tensors) -> Tensors:
    """Return what those say who speak before a round."""
    return updates(proposer(client), params, batch, noise, state)[0] if len(batch.inputs) else {}


def draw(
    experiment: Experiment, trial: TrialAddress, client: Client, raw: Batch, numbers: Sequence[int], number: int = 0
) -> Tensors:
    """Draw what the clients draw in a round: target by target, so that no share of targets changes another's noise."""
    spec = client.noise_spec(client.params(), Batch(raw.inputs[0], raw.targets[0]))
    keys = (
        Key(trial.seed, (Stream.CLIENT, experiment.config.first_target_client + target_client))
        for target_client in numbers
    )
    rows = [spec.sample(key.child(Stream.ROUND, number) if number else key) for key in keys]
    return {name: value.to(experiment.config.device) for name, value in stack(rows).items()}


def updates(client: Client, params: Tensors, batch: Batch, noise: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """Compute what the clients send and their next states, leading V, a few targets at a time for a large model."""
    size = max(1, _UPDATE_VALUES // sum(value.numel() for value in params.values()))
    parts: list[tuple[Tensors, Tensors]] = []
    for start in range(0, len(batch.inputs), size):
        rows = slice(start, start + size)
        some = Batch(batch.inputs[rows], batch.targets[rows])
        parts.append(client.updates(params, some, take(noise, rows), take(state, rows)))
    joined = [{n: torch.cat([part[i][n] for part in parts]).detach() for n in parts[0][i]} for i in (0, 1)]
    return joined[0], joined[1]


def undefended(client: Client, base: Client, params: Tensors, truth: Truth) -> tuple[Client, Tensors, Tensors]:
    """Return the same model's client without any defence, and what it draws and keeps, leading V.

    Noise that the undefended client (`base`) has by itself is no defence, and stays; the defence's is switched off.
    """
    plain, one = client.undefended_update(), Batch(truth.raw.inputs[0], truth.raw.targets[0])
    spec, own = plain.noise_spec(params, one), base.noise_spec(base.params(), one)
    target_clients = truth.raw.inputs.shape[0]
    noise: Tensors = {}
    for name, described in spec.items():
        off = described.off().to(truth.raw.inputs.device)
        stays = name in own and own[name].shape == described.shape
        noise[name] = truth.last[name] if stays else off.expand(target_clients, *off.shape)
    state = {name: value.expand(target_clients, *value.shape) for name, value in plain.init(params).items()}
    return plain, noise, state


def raw_update(client: Client, base: Client, params: Tensors, truth: Truth) -> Tensors:
    """Return what the same model would have sent of the raw examples without any defence."""
    plain, noise, state = undefended(client, base, params, truth)
    return updates(plain, params, truth.raw, noise, state)[0]


def _transformed(client: Client, raw: Batch, noise: Tensors) -> Batch:
    """Apply the batch defences to every target client's examples."""
    each = [
        transformed_batch(client, Batch(*(value[i] for value in raw)), tmap(lambda value, i=i: value[i], noise))
        for i in range(raw.inputs.shape[0])
    ]
    return Batch(*(torch.stack(values) for values in zip(*each, strict=True))) if client.batch else raw
