"""Every attack must succeed on its easiest case, and only on the target client it attacks."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from tests.attacks.small_experiments import observed, pictures, psnr
from tests.attacks.test_many_rounds import PUBLIC, watched


@pytest.mark.parametrize(
    ("attack", "model", "data", "iterations", "decibel"),
    [
        ("dlg", "lenet-zhu", "faces", 150, 25),
        ("idlg", "lenet-zhu", "faces", 150, 25),
        ("sapag", "lenet-zhu", "digits", 300, 25),
        ("ig", "scheliga-cnn", "digits", 400, 20),
        ("ig-scheliga", "scheliga-cnn", "patches", 400, 15.5),
        ("gi", "scheliga-cnn", "digits", 600, 18),
        ("grnn(width=8)", "lenet-zhu", "digits", 100, 18),
        ("gias(width=4, lessons=60)", "lenet-zhu", "digits", 80, 20),
        ("ggl(width=4, lessons=300, population=12)", "lenet-zhu", "digits", 150, 18),
    ],
)
def test_attack_recovers_its_easiest_case(attack, model, data, iterations, decibel):
    experiment = pictures(model, data, 2)
    settings = make_attack(attack)
    settings = replace(settings, descent=replace(settings.descent, iterations=iterations))
    settings = settings if settings.evolves else replace(settings, restarts=1)
    public = load(data).public
    knowledge = replace(experiment.knowledge, public=Batch(public.inputs, public.targets))
    found = settings([experiment.observation], experiment.client, knowledge, Key(0))
    lower, upper = experiment.knowledge.space.bounds(experiment.truth.inputs)
    right = psnr(found.inputs, experiment.truth.inputs, lower, upper)
    wrong = psnr(found.inputs, experiment.truth.inputs.flip(0), lower, upper)
    baseline = psnr(
        experiment.truth.inputs.mean(0, keepdim=True).expand_as(found.inputs), experiment.truth.inputs, lower, upper
    )
    assert bool((right > decibel).all()), right
    assert bool((right > baseline + 3).all()), "not above the baseline of the mean image"
    assert bool((wrong < right - 5).all()), "as good as on the mismatch control"
    assert torch.equal(found.targets, experiment.truth.targets)


def test_fishing_recovers_an_image_that_a_batch_search_misses():
    experiment = pictures("scheliga-cnn", "digits", 2, 8)
    truth = experiment.truth
    lower, upper = experiment.knowledge.space.bounds(truth.inputs)
    fishing, plain = make_attack("fishing(target=8, iterations=250)"), make_attack("ig(iterations=250)")
    crafted = fishing.craft(experiment.client, experiment.knowledge, Key(1))
    seen = observed(crafted, truth, 10, experiment.knowledge.space).observation
    found = fishing([seen], crafted, replace(experiment.knowledge, targets=None), Key(0))
    caught = truth.inputs[truth.targets == 8]  # one of each batch
    right, wrong = (psnr(found.inputs[:, 0], images, lower, upper) for images in (caught, caught.flip(0)))
    assert bool((right > 16).all()), right
    assert bool((wrong < right - 3).all()), "as good as on the mismatch control"
    first = replace(
        experiment.observation, update={n: v[:1] for n, v in experiment.observation.update.items()}, target_clients=(0,)
    )
    searched = plain(
        [first], experiment.client, replace(experiment.knowledge, targets=truth.targets[:1]), Key(0)
    ).inputs[0]
    assert float(psnr(searched, caught[:1].expand_as(searched), lower, upper).max()) < right[0] - 3


def test_sampling_defence_leaks_over_many_rounds():
    experiment, glaus = pictures("scheliga-cnn", "digits", 2), make_attack("glaus(iterations=150)")
    client, seen = watched(experiment, "minmax(0.9)", 10)
    truth = experiment.truth.inputs
    lower, upper = experiment.knowledge.space.bounds(truth)
    known = replace(experiment.knowledge, public=PUBLIC)
    once, often = (glaus(rounds, client, known, Key(0)).inputs for rounds in (seen[:1], seen))
    right, wrong = (psnr(often, images, lower, upper) for images in (truth, truth.flip(0)))
    assert bool((right > 14.5).all()), right
    assert bool((psnr(once, truth, lower, upper) < right - 2).all())
    assert bool((wrong < right - 5).all()), "as good as on the mismatch control"
