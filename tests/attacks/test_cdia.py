"""CDIA equals the non-adaptive attack on undefended clients, and beats it on defended ones."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.client import Client, announced, proposer, speakers
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from tests.attacks.small_experiments import pictures, psnr


def defended(text, iterations, attacks=("ig-scheliga", "cdia"), target_clients=2):
    """Reconstruct defended digits with a non-adaptive and an adaptive attack.

    Where somebody has to speak in public first, they are clients with other digits.
    """
    scene = pictures("scheliga-cnn", "digits", target_clients)
    client: Client = parse(text)(scene.client, Key(0))
    params = client.params()
    if speakers(client):
        others, drawn = load("digits").public, {n: v.expand(1, *v.shape) for n, v in client.init(params).items()}
        batch = Batch(others.inputs[:1, None], others.targets[:1, None])
        client = announced(client, proposer(client).updates(params, batch, {}, drawn)[0], {}, 0)
        assert client.messages
    spec = client.noise_spec(params, Batch(scene.truth.inputs[0], scene.truth.targets[0]))
    noise = stack([spec.sample(Key(0).child("client", target_client)) for target_client in range(target_clients)])
    state = {name: value.expand(target_clients, *value.shape) for name, value in client.init(params).items()}
    sent, _ = client.updates(params, scene.truth, noise, state)
    observation = replace(scene.observation, params=params, update=sent)
    found = {}
    for name in attacks:
        attack = make_attack(name)
        attack = replace(attack, descent=replace(attack.descent, iterations=iterations))
        simulated_client = client if attack.simulated_client == "full" else client.undefended_update()
        knowledge = replace(scene.knowledge, tensors=attack.knowledge)
        found[name] = attack([observation], simulated_client, knowledge, Key(0))
    return scene, found


def test_undefended_cdia_equals_the_non_adaptive_attack_bit_for_bit():
    _, found = defended("none", 40)
    assert torch.equal(found["cdia"].inputs, found["ig-scheliga"].inputs)
    assert torch.equal(found["cdia"].objectives, found["ig-scheliga"].objectives)


@pytest.mark.parametrize("defence", ["dgp", "adgp", "optimal-prune(0.9)", "precode", "dropout(0.25)"])
def test_knowing_the_defence_helps(defence):
    scene, found = defended(defence, 80)
    lower, upper = scene.knowledge.space.bounds(scene.truth.inputs)
    naive, knowing = (psnr(f.inputs, scene.truth.inputs, lower, upper).mean() for f in found.values())
    assert knowing > naive + 1, (naive, knowing)
