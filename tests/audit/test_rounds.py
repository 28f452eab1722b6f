"""Several rounds, and sums over clients: what the server sees, and what an attacker makes of it."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.knowledge import Known, Sample
from gradveil.audit.attack_selection import trials
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe, plain_name
from gradveil.audit.preflight import obstacles, open_experiment
from gradveil.audit.trial import recover
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.audit.runs import config


def opened(defence="none", attack="ig", **changes):
    """A experiment of two digits, its only trial and its client, in double precision."""
    base = {"data": {"name": "digits", "size": 16}, "precision": "float64", "defences": [defence], "attacks": [attack]}
    experiment = open_experiment(config(**{**base, **changes}))
    trial = trials(experiment.config)[0]
    return experiment, trial, experiment.client(0, trial.defence, 0)


def test_one_round_is_the_first():
    experiment, trial, client = opened("gaussian(0.1)")
    (once,), truth = observe(experiment, trial, client, range(2))
    several, more = observe(*opened("gaussian(0.1)", rounds=3)[:2], client, range(2))
    assert [seen.round for seen in several] == [0, 1, 2]
    for name, value in once.update.items():
        torch.testing.assert_close(several[0].update[name], value)
    for name, value in truth.noise.items():
        assert torch.equal(more.noise[name], value)
        assert not torch.equal(more.noise[f"round2.{name}"], value)
        assert torch.equal(more.last[name], more.noise[f"round2.{name}"])
    assert {plain_name(name) for name in more.noise} == set(truth.noise)


@pytest.mark.parametrize(("rate", "expected"), [(None, 0.1), (0.0, 0.0), (2.0, 2.0)])
def test_the_server_moves_by_the_mean_update(rate, expected):
    experiment, trial, client = opened("prune(0.5, feedback=true)", rounds=2, server_lr=rate)
    (first, second), _ = observe(experiment, trial, client, range(2))
    for name, value in first.params.items():
        torch.testing.assert_close(second.params[name], value - expected * first.update[name].mean(0))


def test_the_clients_state_runs_through_the_rounds():
    experiment, trial, client = opened("prune(0.5, feedback=true)", rounds=2)
    seen, truth = observe(experiment, trial, client, range(2))
    state = client.init(seen[0].params)
    for number, observation in enumerate(seen):
        example = Batch(truth.raw.inputs[1], truth.raw.targets[1])
        sent, state = client.update(observation.params, example, {}, state)
        for name, value in sent.items():
            torch.testing.assert_close(observation.update[name][1], value, msg=f"{name} in round {number}")


def test_a_share_of_the_target_clients_sees_the_same_federation():
    experiment, trial, client = opened("gaussian(0.1) + prune(0.5, feedback=true)", rounds=3, target_clients=3)
    whole, everything = observe(experiment, trial, client, range(3))
    part, truth = observe(experiment, trial, client, range(1, 3))
    for ours, theirs in zip(part, whole, strict=True):
        assert ours.target_clients == (1, 2)
        for name, value in theirs.update.items():
            assert torch.equal(ours.update[name], value[1:])
        for name, value in theirs.params.items():
            assert torch.equal(ours.params[name], value)
    assert torch.equal(truth.raw.inputs, everything.raw.inputs[1:])


def objective_at_truth(which, **changes):
    experiment, trial, client = opened("prune(0.8, feedback=true)", f"cdia(rounds={which}, tv=0)", **changes)
    attack = experiment.attacks[trial.attack]
    seen, truth = observe(experiment, trial, client, range(2))
    knowledge, _, _ = grant(experiment, attack, client, client.params(), truth)
    return attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise)


def test_an_attacker_who_saw_every_round_accounts_for_the_residual():
    """Under error feedback a later update holds what earlier rounds left out: alone it does not fit the images."""
    assert bool((objective_at_truth("all", rounds=3) < 1e-9).all())
    assert bool((objective_at_truth("first", rounds=3) < 1e-9).all())
    assert bool((objective_at_truth("last", rounds=3) > 1e-3).all())


def test_noise_that_is_told_is_that_of_its_round():
    experiment, trial, client = opened("gaussian(0.1)", "wiig(rounds=all, tv=0)", rounds=3)
    attack = experiment.attacks[trial.attack]
    seen, truth = observe(experiment, trial, client, range(2))
    knowledge, grants, _ = grant(experiment, attack, client, client.params(), truth)
    assert sum(name.startswith("round2.send.") for name in grants) == len(client.trained())
    value = attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise)
    assert bool((value < 1e-9).all())


def test_averaging_rounds_beats_zero_mean_noise():
    """A model that hardly moves sends the same gradient with fresh noise: eight rounds together say more than one."""
    error = {}
    for rounds in ("last", "all"):
        text = f"ig-scheliga(rounds={rounds}, iterations=50)"
        experiment, trial, _ = opened(
            "gaussian(0.02)", text, rounds=8, server_lr=0.001, precision="float32", model={"name": "scheliga-cnn"},
            data={"name": "digits"},
        )  # fmt: skip
        found = recover(experiment, trial, range(2), lambda _: None).tensors["inputs"]
        truth = experiment.batch(experiment.examples(0, range(2))).inputs
        error[rounds] = float((found - truth).square().mean())
    assert error["all"] < 0.7 * error["last"], error


def test_a_sum_over_clients_is_the_mean_of_their_updates():
    settings = {"client": {"batch": 2, "members": 3}, "target_clients": 2}
    experiment, trial, client = opened("prune(0.5, feedback=true) + dropout(0.5)", **settings)
    assert (client.members, experiment.config.images_needed) == (3, 12)
    (seen,), truth = observe(experiment, trial, client, range(2))
    assert seen.examples == 6
    alone: Client = parse(trial.defence)(experiment.undefended(0, 0), Key(0, ("model",)))
    alone = Client(alone.model, send=alone.send)
    for target_client in range(2):
        sent = []
        for member in range(3):
            part = slice(2 * member, 2 * member + 2)
            example = Batch(truth.raw.inputs[target_client, part], truth.raw.targets[target_client, part])
            noise = {name: value[target_client, member] for name, value in truth.noise.items()}
            sent.append(alone.update(seen.params, example, noise, alone.init(seen.params))[0])
        for name, value in seen.update.items():
            torch.testing.assert_close(value[target_client], sum(part[name] for part in sent) / 3)
    assert not client.intermediates(seen.params)


def test_clients_of_unequal_size_are_refused():
    _, _, client = opened(client={"batch": 2, "members": 3}, target_clients=1)
    batch = Batch(torch.zeros(4, 1, 16, 16), torch.zeros(4, dtype=torch.long))
    with pytest.raises(GradveilError, match="4 examples do not divide"):
        client.update(client.params(), batch, {}, {})


def test_each_image_of_a_sum_is_found_in_its_members_place():
    experiment, trial, _ = opened(
        attack="ig-scheliga(iterations=150)", client={"members": 2}, target_clients=1, precision="float32",
        model={"name": "scheliga-cnn"}, data={"name": "digits"},
    )  # fmt: skip
    found = recover(experiment, trial, range(1), lambda _: None).tensors["inputs"]
    truth = experiment.batch(experiment.examples(0, range(1))).inputs
    own, swapped = ((guess - truth).square().mean() for guess in (found, found.flip(1)))
    assert own < 0.5 * swapped, (own, swapped)


LEARNER = "learned(epochs=1, width=8, features=16)"
FEW = {"name": "digits", "size": 16, "public": 60}


@pytest.mark.parametrize("client", [{}, {"members": 2}], ids=["one", "sum"])
@pytest.mark.parametrize("attack", ["ig(iterations=2)", "cdia(rounds=all, iterations=2)", LEARNER])
def test_what_a_client_keeps_is_the_same_in_every_round(attack, client):
    """A lock is drawn in the first round, and is the truth in the second one too; in a sum each member has its own."""
    experiment, trial, client = opened("keylock", attack, rounds=2, client=client, data=FEW)
    seen, truth = observe(experiment, trial, client, range(2))
    kept = [name for name in truth.noise if ".lock." in name and not name.startswith("round")]
    assert kept
    assert all(torch.equal(truth.state[f"kept.{name}"], truth.noise[name]) for name in kept)
    assert all(torch.equal(truth.noise[name], truth.noise[f"round1.{name}"]) for name in kept)
    assert len(seen) == 2
    found = recover(experiment, trial, range(2), lambda step: None)
    assert bool(torch.isfinite(found.tensors["distance"]).all())


@pytest.mark.parametrize("which", ["first", "last", "all"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_lock_that_local_training_moved_is_told_as_it_was_before_each_round(which, members):
    """Who is told of it explains each round exactly; who has a lock of his own does not."""
    local = {"batch": 2, "members": members, "local": {"lr": 0.05, "steps": 3, "batch": 1}}
    experiment, trial, client = opened(
        "keylock(width=16)", f"wiig(rounds={which}, tv=0)", rounds=2, target_clients=2, client=local
    )
    attack = experiment.attacks[trial.attack]
    seen, truth = observe(experiment, trial, client, range(2))
    (secret,) = (name for name in truth.noise if ".lock." in name and not name.startswith("round"))
    assert float((truth.noise[secret] - truth.noise[f"round1.{secret}"]).abs().max()) > 1e-3
    assert torch.equal(truth.noise[f"round1.{secret}"], truth.state[f"kept.{secret}"])
    knowledge, _, _ = grant(experiment, attack, client, client.params(), truth)
    told = attack.evaluate(seen, client, knowledge, Key(0), truth.raw.inputs, truth.noise)
    assert bool((told < 1e-12).all())
    drawn = replace(knowledge, tensors={"model.*": Sample(every_iteration=False), **knowledge.tensors})
    own = attack.evaluate(seen, client, drawn, Key(0), truth.raw.inputs, truth.noise)
    assert bool((own > 1e-6).all())


@pytest.mark.parametrize("client", [{"batch": 2}, {"batch": 2, "local": {"lr": 0.05, "steps": 3, "batch": 1}}])
def test_public_images_that_a_defence_mixes_with_are_named_and_not_which_it_drew(client):
    experiment, trial, defended = opened("instahide(mix=public)", "cdia(iterations=2)", client=client)
    assert experiment.public is not None
    assert torch.equal(defended.domain.public, experiment.public.inputs.double())
    attack = experiment.attacks[trial.attack]
    seen, truth = observe(experiment, trial, defended, range(2))
    assert truth.transformed.inputs.shape == truth.raw.inputs.shape
    assert not torch.equal(truth.transformed.inputs, truth.raw.inputs)
    knowledge, grants, _ = grant(experiment, attack, defended, defended.params(), truth)
    told = f"public: the {len(experiment.public)} images that the defence mixes with, not which it drew"
    assert [grant for grant in grants if grant.startswith(("public", "batch"))] == [told]
    guessed = attack.evaluate(seen, defended, knowledge, Key(0), truth.raw.inputs, truth.noise)
    assert bool((guessed > 0.01).all())
    names = {name: Known(value) for name, value in truth.noise.items()}
    exact = replace(knowledge, tensors=names)
    assert bool((attack.evaluate(seen, defended, exact, Key(0), truth.raw.inputs, truth.noise) < guessed).all())


def test_without_public_images_such_a_defence_is_refused():
    experiment, _, _ = opened("instahide(mix=public)", "cdia(iterations=2)")
    (problem,) = obstacles(replace(experiment, public=None)).problems
    assert problem.where == "defences[0] 'instahide(mix=public)', client"
    assert "mixes with public images, and there are none" in problem.what


@pytest.mark.parametrize(
    ("attack", "used"),
    [
        ("cdia(iterations=1)", [2]),
        ("cdia(iterations=1, rounds=first)", [0]),
        ("averaging(iterations=1)", [0, 1, 2]),
    ],
)
def test_a_trial_says_which_rounds_its_attack_used(attack, used):
    experiment, trial, _ = opened(attack=attack, rounds=3)
    assert recover(experiment, trial, range(1), lambda step: None).facts["rounds_used"] == used
