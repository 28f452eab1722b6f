"""Every attack must succeed on its easiest case, and only on the victim it attacks."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.presets import ATTACKS
from gradveil.core.noise import Key
from tests.attacks.scenes import pictures, psnr


@pytest.mark.parametrize(
    ("attack", "model", "data", "iterations", "decibel"),
    [
        ("dlg", "lenet-zhu", "faces", 500, 25),
        ("idlg", "lenet-zhu", "faces", 500, 25),
        ("sapag", "lenet-zhu", "digits", 600, 25),
        ("ig", "scheliga-cnn", "digits", 600, 20),
        ("ig-scheliga", "scheliga-cnn", "patches", 600, 16),
        ("gi", "scheliga-cnn", "digits", 600, 18),
    ],
)
def test_attack_recovers_what_it_should(attack, model, data, iterations, decibel):
    scene = pictures(model, data, 2)
    settings = ATTACKS[attack].make()
    settings = replace(settings, descent=replace(settings.descent, iterations=iterations), restarts=2)
    found = settings([scene.observation], scene.client, scene.knowledge, Key(0))
    lower, upper = scene.knowledge.lower, scene.knowledge.upper
    right = psnr(found.inputs, scene.truth.inputs, lower, upper)
    wrong = psnr(found.inputs, scene.truth.inputs.flip(0), lower, upper)
    floor = psnr(scene.truth.inputs.mean(0, keepdim=True).expand_as(found.inputs), scene.truth.inputs, lower, upper)
    assert bool((right > decibel).all()), right
    assert bool((right > floor + 3).all()), "no better than the mean of the victims"
    assert bool((wrong < right - 5).all()), "just as good on somebody else's update"
    assert torch.equal(found.targets, scene.truth.targets)
