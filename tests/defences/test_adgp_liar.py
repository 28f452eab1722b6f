"""ADGP trains on digits although one of ten clients publishes a wrong importance."""

from functools import cache
from typing import Literal

import pytest
import torch
from torch import nn

from gradveil.client import Client, announced, proposer, speakers
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, take, tmap
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.nn.initial_weights import initialise

USERS, ROUNDS, BATCH, LR = 10, 60, 16, 0.5
LIAR = 0


@cache
def digits():
    splits = load("digits", size=8)
    assert splits.public is not None
    return splits.public, splits.private


def lie(honest: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Mark as many positions as the honest client, but those where the mean gradient is smallest."""
    useless = torch.zeros_like(gradient).flatten()
    useless[gradient.abs().flatten().argsort()[: int((honest != 0).sum())]] = 1
    return useless.reshape(gradient.shape)


def accuracy(text: str, lying: bool, speaking: Literal["first", "random", "turns"] = "first") -> float:
    """Train in rounds, and return the accuracy on digits of later writers.

    The liar is the first client. Where nobody speaks, it sends large values at useless positions instead.
    """
    data, test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    client = parse(text)(Client(initialise(model, Key(0).generator())))
    plain = client.undefended_update()
    params, mean = client.params(), {}
    state: Tensors = {name: value.expand(USERS, *value.shape) for name, value in client.init(params).items()}
    share = len(data) // USERS
    for number in range(ROUNDS):
        draw = Key(0, ("round", number)).generator()
        indices = torch.stack([u * share + torch.randperm(share, generator=draw)[:BATCH] for u in range(USERS)])
        batch = Batch(data.inputs[indices], data.targets[indices])
        order = {
            "first": list(range(USERS)),
            "random": torch.randperm(USERS, generator=Key(0, ("speakers", number)).generator()).tolist(),
            "turns": [(i + number) % USERS for i in range(USERS)],
        }
        members = order[speaking][: speakers(client)]
        true = tmap(lambda g: g.mean(0), plain.updates(params, batch, {}, {})[0])
        message: Tensors = {}
        if members:
            message, _ = proposer(client).updates(
                params, Batch(*(part[members] for part in batch)), {}, take(state, members)
            )
            if lying and LIAR in members:
                for name, masks in message.items():
                    masks[members.index(LIAR)] = lie(masks[members.index(LIAR)], true[name.removeprefix("prune.mask.")])
        sent, state = announced(client, message, mean, number).updates(params, batch, {}, state)
        if lying and not members:
            for name, value in sent.items():
                value[LIAR] = true[name].abs().max() * lie(value[LIAR], true[name])
        mean = tmap(lambda value: value.mean(0), sent)
        params = {name: value - LR * mean[name] for name, value in params.items()}
    outputs = torch.func.functional_call(model, params, (test.inputs,))
    return float((outputs.argmax(1) == test.targets).float().mean())


def test_adgp_lying_broadcaster_stops_learning_and_a_vote_does_not():
    honest = accuracy("adgp", lying=False)
    assert honest > 0.85
    assert accuracy("adgp", lying=True) < 0.3
    assert accuracy("adgp(selection=vote)", lying=True) > honest - 0.03
    assert accuracy("adgp(selection=previous)", lying=True) > honest - 0.03


@pytest.mark.parametrize("speaking", ["random", "turns"])
def test_adgp_residual_compensates_for_a_liar_who_speaks_in_one_round_of_ten(speaking):
    assert accuracy("adgp", lying=True, speaking=speaking) > 0.85
