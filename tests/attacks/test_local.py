"""Updates after local training: the fit depends on knowledge of the order and the step size."""

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.audit.attack_selection import trials
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.trial import recover
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.settings import literal
from tests.attacks.small_experiments import psnr
from tests.audit.runs import config

FEDAVG = {"batch": 4, "local": {"lr": 0.5, "epochs": 2, "batch": 2, "momentum": 0.5}}


def at_truth(settings, **changes):
    base = {"data": {"name": "digits", "size": 16}, "precision": "float64", "client": FEDAVG, "defences": ["none"]}
    scene = open_experiment(config(**{**base, "attacks": [f"ig(tv=0, {settings})"], **changes}))
    trial = trials(scene.config)[0]
    client, attack = scene.client(0, "none", 0), scene.attacks[trial.attack]
    seen, truth = observe(scene, trial, client, range(2))
    knowledge, grants, _ = grant(scene, attack, client, seen[0].params, truth)
    return attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise), grants


def test_order_of_examples_matters():
    told, grants = at_truth("order=told")
    assert bool((told < 1e-9).all())
    assert "schedule: its true value" in grants
    for order in ("in-order", "drawn"):
        guessed, grants = at_truth(f"order={order}")
        assert bool((guessed > 1e-7).all())
        assert not any("schedule" in name for name in grants)


def test_wrong_step_size_raises_the_objective():
    assert bool((at_truth("order=told, step_size=0.5")[0] < 1e-9).all())
    assert bool((at_truth("order=told, step_size=2")[0] > 1e-4).all())
    one = {"batch": 2, "local": {"lr": 0.5, "steps": 1}}
    for size in (0.5, 2.0):  # the direction of a single step does not depend on its size
        assert bool((at_truth(f"order=told, step_size={size}", client=one)[0] < 1e-9).all())


@pytest.mark.parametrize("distance", ["l2", "l2-and-norm", "l1"])
@pytest.mark.parametrize("members", [1, 2])
def test_one_small_step_is_as_hard_to_invert_as_its_gradient(distance, members):
    """Priors and tolerances are tuned for gradients; unscaled, GI recovered nothing at lr 0.001."""
    found = []
    for local in ({}, {"local": {"lr": 1e-3, "steps": 1}}):
        scene = open_experiment(
            config(
                attacks=[f"ig(objective={literal(distance)}, sign=plain, labels=joint, tolerance=1e-4, iterations=20)"],
                defences=["none"], client={"batch": 2, "members": members, **local}, precision="float64",
            )
        )  # fmt: skip
        found.append(recover(scene, trials(scene.config)[0], range(2), lambda _: None).tensors)
    for name in ("inputs", "objective", "initial", "at_truth"):
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("local", "gain"),
    [({"lr": 0.05, "steps": 3}, 1), ({"lr": 0.05, "epochs": 2, "batch": 1, "momentum": 0.9}, -1)],
)
def test_images_are_recovered_from_local_training(local, gain):
    """Steps of one example each with momentum blur them: no closer than the public mean, but each nearest to itself."""
    text = "ig-scheliga(iterations=60, order=told)"
    scene = open_experiment(
        config(
            data={"name": "digits"}, model={"name": "scheliga-cnn"}, client={"batch": 2, "local": local},
            attacks=[text], defences=["none"], target_clients=1,
        )
    )  # fmt: skip
    found = recover(scene, trials(scene.config)[0], range(1), lambda _: None).tensors["inputs"]
    truth = scene.batch(scene.examples(0, range(1))).inputs
    lower, upper = scene.private.space.bounds(scene.private.inputs)
    mean = scene.public.inputs.mean(0).expand_as(truth)
    own, baseline, wrong = (float(psnr(x, truth, lower, upper)) for x in (found, mean, found.flip(1)))
    assert own > baseline + gain
    assert own > wrong + 3


def test_images_are_recovered_from_a_partly_frozen_model():
    scene = open_experiment(
        config(
            data={"name": "digits"}, model={"name": "scheliga-cnn"}, client={"trainable": ["body.*"]},
            attacks=["ig-scheliga(iterations=60)"], defences=["none"],
        )
    )  # fmt: skip
    trial = trials(scene.config)[0]
    client = scene.client(0, "none", 0)
    assert not any(name.startswith("head") for name in observe(scene, trial, client, range(2))[0][0].update)
    found = recover(scene, trial, range(2), lambda _: None).tensors["inputs"]
    truth = scene.batch(scene.examples(0, range(2))).inputs
    lower, upper = scene.private.space.bounds(scene.private.inputs)
    mean = scene.public.inputs.mean(0).expand_as(truth)
    own, baseline, wrong = (psnr(x, truth, lower, upper) for x in (found, mean, found.flip(0)))
    assert bool((own > baseline + 1).all()), (own, baseline)
    assert bool((own > wrong + 5).all()), (own, wrong)


def test_unknown_order_raises():
    with pytest.raises(GradveilError, match="order"):
        make_attack("ig(order=random)")
