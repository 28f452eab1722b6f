"""Mixed and transformed batches, and locks, met by one who knows what was done, but not with which numbers."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.attacks.small_experiments import pictures, psnr


def against_raw(text: str, settings: str, examples: int, target_clients: int):
    """What the naive and the knowing attacker recover of the images themselves, in decibel, by equal means."""
    experiment = pictures("scheliga-cnn", "digits", target_clients, examples)
    known, raw = experiment.knowledge, experiment.truth
    client = parse(text)(experiment.client, Key(0))
    params = client.params()
    spec = client.noise_spec(params, Batch(raw.inputs[0], raw.targets[0]))
    noise = stack([spec.sample(Key(0).child("client", target_client)) for target_client in range(target_clients)])
    state = {name: value.expand(target_clients, *value.shape) for name, value in client.init(params).items()}
    sent, _ = client.updates(params, raw, noise, state)
    observation = replace(experiment.observation, params=params, update=sent)
    result = {}
    for name in ("ig-scheliga", "cdia"):
        attack = make_attack(f"{name}({settings})")
        simulated_client = client if attack.simulated_client == "full" else client.undefended_update()
        guess = attack([observation], simulated_client, replace(known, tensors=attack.knowledge), Key(0)).inputs
        assert bool(torch.isfinite(guess).all())
        result[name] = psnr(guess, raw.inputs, *known.space.bounds(raw.inputs)).mean()
    return result


@pytest.mark.parametrize(
    ("defence", "examples", "settings", "gain"),
    [
        ("mixup(8)", 2, "iterations=60, restarts=2", 0),
        ("instahide(k=2)", 2, "iterations=60, restarts=2", 0.5),
        ('ats(policy="3-1-7")', 1, "iterations=40, restarts=2", 2),
        ("ats", 1, "iterations=60, restarts=3", 0.3),
    ],
)
def test_adaptive_attack_on_changed_images_recovers_more(defence: str, examples: int, settings: str, gain: float):
    result = against_raw(defence, f"{settings}, lr=0.1", examples, target_clients=6)
    assert result["cdia"] > result["ig-scheliga"] + gain, result


def test_keylock_hides_little_from_an_optimised_key():
    """Against the same search where there is no lock."""
    settings = "iterations=50, lr=0.1"
    result, without = (against_raw(defence, settings, 1, target_clients=4) for defence in ("keylock", "none"))
    assert result["cdia"] > without["cdia"] - 2.5, (result, without)
