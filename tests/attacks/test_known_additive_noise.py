"""Known additive noise is subtracted from the update if and only if it does not depend on the images."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.knowledge import Known, Neutral
from gradveil.attacks.protocol import Prospect
from gradveil.audit.attack_selection import trials
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.trial import recover
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from tests.audit.runs import config

SUBTRACTED = "wiig(additive=subtracted)"


def seen_by(defence, attack=SUBTRACTED, **changes):
    """Return the inversion problem of two digits, the client, its updates and the ground truth."""
    base = {"data": {"name": "digits"}, "model": {"name": "lenet-zhu"}, "iterations": 5}
    scene = open_experiment(config(**{**base, "defences": [defence], "attacks": [attack], **changes}))
    (trial,) = trials(scene.config)
    client = scene.client(0, trial.defence, 0)
    seen, truth = observe(scene, trial, client, range(2))
    attack = scene.attacks[trial.attack]
    knowledge, _, _ = grant(scene, attack, client, client.params(), truth)
    return InversionProblem(attack, seen, client, knowledge, Key(0)), client, seen, truth


def silent(client, seen, truth):
    """Recompute the update of each round without additive noise, with the same masks."""
    spec, state = client.noise_spec(seen[0].params, type(truth.raw)(*(v[0] for v in truth.raw))), {}
    state = {n: v.expand(2, *v.shape) for n, v in client.init(seen[0].params).items()}
    sent = []
    for number, observation in enumerate(seen):
        own = {n: truth.noise[f"round{number}.{n}" if number else n] for n in spec}
        own = {n: torch.zeros_like(v) if ".noise" in n else v for n, v in own.items()}
        pinned = {n: v for n, v in torch.func.vmap(client.evidence)(observation.update).items() if ".mask." in n}
        update, state = client.updates(observation.params, truth.raw, {**own, **pinned}, state)
        sent.append(update)
    return sent


@pytest.mark.parametrize(
    ("defence", "changes"),
    [
        ("dp(clip=0.5, sigma=0.1)", {}),
        ("dp(clip=0.5, sigma=0.1)", {"client": {"batch": 3}}),
        ("gaussian(0.1) + prune(0.7)", {}),
        ("laplace(0.1) + gaussian(0.01) + dgp", {}),
        ("gaussian(0.1) + topk(0.3, feedback=true)", {"rounds": 2}),
    ],
)
def test_subtraction_leaves_the_update_without_noise(defence, changes):
    attack = SUBTRACTED.replace(")", ", rounds=all)") if "rounds" in changes else SUBTRACTED
    rows, client, seen, truth = seen_by(defence, attack, **changes)
    for r, quiet, noisy in zip(rows.rounds, silent(client, seen, truth), seen, strict=True):
        for name, value in quiet.items():
            assert (r.observed[name] - value).norm() < 1e-4 * (noisy.update[name] - value).norm()
    assert all(isinstance(how, Neutral) for name, how in rows.how.items() if ".noise" in name)
    assert not any(".noise" in name for name in rows.known)


@pytest.mark.parametrize(
    ("defence", "changes"),
    [
        ("optimal-noise(std=0.1)", {}),
        ("gaussian(0.1) + standin", {}),
        ("gaussian(0.1) + quantise(bits=4)", {}),
        ("fed-cdp(clip=1, sigma=0.1)", {"client": {"batch": 4, "local": {"lr": 0.5, "steps": 2, "batch": 2}}}),
    ],
)
def test_noise_that_depends_on_images_is_simulated(defence, changes):
    rows, _, seen, _ = seen_by(defence, **changes)
    for r, observation in zip(rows.rounds, seen, strict=True):
        for name, value in observation.update.items():
            assert torch.equal(r.observed[name], value)
    noisy = [name for name in rows.spec if rows.spec[name].law.__class__.__name__ in ("Normal", "Laplace")]
    assert noisy
    assert all(isinstance(rows.how[name], Known) for name in noisy)


def test_unknown_noise_is_not_subtracted():
    rows, _, seen, _ = seen_by("dp(clip=0.5, sigma=0.1)", "cdia")
    assert all(torch.equal(rows.rounds[0].observed[n], v) for n, v in seen[0].update.items())


def test_subtraction_by_a_non_adaptive_attack_raises():
    with pytest.raises(GradveilError, match="additive=subtracted: is about a defence"):
        make_attack("ig(additive=subtracted)")
    rows, client, seen, _ = seen_by("gaussian(0.1)", "ig(additive=subtracted, simulated_client=full)")
    assert not any(torch.equal(rows.rounds[0].observed[n], v) for n, v in seen[0].update.items())
    from_python = replace(make_attack("ig"), subtract=True)
    (problem,) = from_python.problems(Prospect(client, (1, 16, 16), 1, 10, 0))
    assert "ignores the defence" in problem.what


@pytest.mark.parametrize(
    "setting", ["additive=told", "additive=optimised", "objective=likelihood", "pruned=ordered", "whiten=true"]
)
def test_settings_about_an_ignored_defence_raise(setting):
    with pytest.raises(GradveilError, match=f"{setting}: is about a defence"):
        make_attack(f"ig({setting})")
    make_attack(f"ig({setting}, simulated_client=full)")
    make_attack(f"cdia({setting})")
    with pytest.raises(GradveilError, match=setting):
        make_attack(f"cdia({setting}, simulated_client=naive)")


@pytest.mark.parametrize("name", ["wiig", "cdia", "dpia"])
def test_each_word_sets_additive_noise_but_not_masks(name):
    words = {"told": Known, "subtracted": Known, "neutral": Neutral}
    for word, way in words.items():
        attack = make_attack(f"{name}(additive={word})")
        for tensor, kind in {"send.noise.w": way, "step.noise.w": way}.items():
            first = next(how for pattern, how in attack.knowledge.items() if fnmatchcase(tensor, pattern))
            assert isinstance(first, kind), (name, word, tensor)
        assert attack.subtract == (word == "subtracted")
    masks = [how for pattern, how in make_attack(f"{name}(additive=told)").knowledge.items() if "mask" in pattern]
    assert masks == [how for pattern, how in make_attack(name).knowledge.items() if "mask" in pattern]


def test_subtraction_equals_the_attack_on_an_undefended_client():
    """Every step is equal, though the noise is as long as a hundred gradients."""
    found = {}
    for defence, attack in (
        ("none", "ig-scheliga"),
        ("dp(clip=1, sigma=0.3)", SUBTRACTED),
        ("dp(clip=1, sigma=0.3)", "wiig"),
    ):
        changes = {"data": {"name": "digits"}, "model": {"name": "lenet-zhu"}, "iterations": 30, "precision": "float64"}
        scene = open_experiment(config(defences=[defence], attacks=[attack], **changes))
        (trial,) = trials(scene.config)
        found[attack] = recover(scene, trial, range(2), lambda _: None).tensors
    naive, off, added = (found[name]["inputs"] for name in ("ig-scheliga", SUBTRACTED, "wiig"))
    torch.testing.assert_close(off, naive, rtol=0, atol=1e-3)
    assert (added - naive).abs().mean() > 0.1
