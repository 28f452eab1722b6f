"""The learned attack beats the baseline without the update, under every defence."""

from dataclasses import replace

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
from gradveil.core.types import Batch
from tests.attacks.small_experiments import tiny
from tests.audit.runs import config

QUICK = "learned(epochs=5, width=300, features=1024, lr=0.004)"


def learned(defence, text=QUICK, target_clients=8, public=600, **changes):
    """Attack some digits; squared errors of the reconstruction, of the class's mean image, and for another target."""
    base = {
        "data": {"name": "digits", "size": 16, "public": public},
        "model": {"name": "mlp", "options": {"width": 24, "depth": 1}},
        "attacks": [text],
        "defences": [defence],
        "target_clients": target_clients,
    }
    scene = open_experiment(config(**{**base, **changes}))
    found = recover(scene, trials(scene.config)[0], range(target_clients), lambda _: None)
    batch = scene.batch(scene.examples(0, range(target_clients)))
    assert scene.public is not None
    classes = torch.stack([scene.public.inputs[scene.public.targets == c].mean(0) for c in range(10)])
    inputs = found.tensors["inputs"]

    def error(candidate):
        return float((candidate - batch.inputs).square().mean())

    return error(inputs), error(classes[batch.targets]), error(inputs.roll(1, 0)), found


@pytest.mark.parametrize("defence", ["none", "dp(clip=20, sigma=1e-3) + prune(0.5)", "dgp"])
def test_network_learns_to_invert_the_simulated_client(defence):
    own, guess, other, found = learned(defence)
    assert own < 0.7 * guess, (own, guess)
    assert own < 0.5 * other, (own, other)
    assert found.facts["grants"][-1].startswith("public: ")


@pytest.mark.parametrize("defence", ["prune(0.8, feedback=true)", "standin", "adgp(selection=previous)"])
def test_observed_rounds_determine_the_client_state(defence):
    """Without the earlier rounds, the last round would be simulated as the first."""
    scene = open_experiment(
        config(
            data={"name": "digits", "size": 16}, attacks=["learned(epochs=1, width=8, features=16)"],
            defences=[defence], rounds=3, precision="float64",
        )
    )  # fmt: skip
    trial = trials(scene.config)[0]
    attack, client = scene.attacks[trial.attack], scene.client(0, trial.defence, 0)
    seen, truth = observe(scene, trial, client, range(2))
    knowledge = replace(grant(scene, attack, client, client.params(), truth)[0], targets=truth.raw.targets)
    at_truth = attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise)
    alone = attack.evaluate(seen[-1:], client, knowledge, Key(0), truth.raw.inputs, truth.noise)
    assert bool((at_truth < 1e-9).all())
    assert bool((alone > 1e-4).all())


def test_round_of_a_client_with_state_is_inverted():
    own, guess, other, _ = learned("standin", rounds=2)
    assert own < 0.8 * guess, (own, guess)
    assert own < 0.6 * other, (own, other)


def test_chunks_of_simulated_updates_change_nothing(monkeypatch):
    text = "learned(epochs=1, width=50, features=256)"
    whole = learned("dropout + gaussian(0.01)", text, 2, public=60)[3].tensors["inputs"]
    monkeypatch.setattr("gradveil.attacks.simulated_updates._VALUES", 10**6)
    chunks = learned("dropout + gaussian(0.01)", text, 2, public=60)[3].tensors["inputs"]
    torch.testing.assert_close(chunks, whole, rtol=1e-3, atol=1e-3)


def test_same_key_gives_the_same_images():
    text = "learned(epochs=1, width=50, features=256)"
    first, again = (learned("dropout", text, 2, public=60)[3].tensors["inputs"] for _ in range(2))
    assert torch.equal(first, again)


def test_batches_keep_the_order_of_their_labels():
    own, guess, _, found = learned("none", client={"batch": 2}, target_clients=4)
    assert own < guess
    assert found.tensors["inputs"].shape[:2] == (4, 2)


def test_nan_update_diverges():
    scene = tiny()
    public = Batch(torch.rand(20, 1, 6, 6, generator=Key(1).generator()), torch.arange(20) % 4)
    knowledge = replace(scene.knowledge, public=public)
    scene.observation.update["0.weight"][1] = torch.nan
    found = make_attack("learned(epochs=2, width=20)")([scene.observation], scene.client, knowledge, Key(0))
    assert found.status == ("budget", "diverged", "budget")
    assert bool(torch.isfinite(found.inputs).all())


def test_two_updates_are_enough_for_training():
    scene = tiny(examples=2)
    every = Batch(torch.rand(4, 1, 6, 6, generator=Key(1).generator()), torch.arange(4))
    attack = make_attack("learned(epochs=2, width=20)")
    knowledge = replace(scene.knowledge, public=every)
    found = attack([scene.observation], scene.client, knowledge, Key(0))
    assert not torch.equal(found.inputs, torch.full_like(found.inputs, 0.5))
    knowledge = replace(scene.knowledge, public=Batch(every.inputs[:3], every.targets[:3]))
    with pytest.raises(GradveilError, match=r"attack learned.*public images.*: 3"):
        attack([scene.observation], scene.client, knowledge, Key(0))


def test_missing_public_images_raise():
    scene = tiny()
    with pytest.raises(GradveilError, match="no public images"):
        make_attack("learned")([scene.observation], scene.client, scene.knowledge, Key(0))
