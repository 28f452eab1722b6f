"""Public messages in an audit: who speaks, what is announced, and that an attacker hears it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gradveil
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.audit.grants import grant
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.client import proposer
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from tests.audit.runs import config
from tests.audit.test_rounds import FEW, opened


def test_the_broadcaster_is_a_client_of_its_own():
    experiment, trial, client = opened("adgp", rounds=2)
    (first, second), truth = observe(experiment, trial, client, range(2))
    other = experiment.batch(experiment.examples(0, [2]))
    speaks = Batch(other.inputs[0], other.targets[0])
    said, _ = proposer(client).update(first.params, speaks, {}, client.init(first.params))
    names = {f"send.prune.mask.{name}" for name in client.trained()}
    assert set(first.messages) == set(second.messages) == names
    for name, mask in first.messages.items():
        assert torch.equal(mask, said[name.removeprefix("send.")].bool())
    for name, value in first.update.items():
        assert value.shape[0] == 2
        assert not value[:, ~first.messages[f"send.prune.mask.{name}"]].any()
    assert any(not torch.equal(first.messages[name], second.messages[name]) for name in names)
    assert truth.raw.inputs.shape[0] == 2


@pytest.mark.parametrize("selection", ["broadcast", "vote", "previous"])
def test_shares_of_the_target_clients_hear_the_same(selection: str):
    experiment, trial, client = opened(f"adgp(selection={selection})", rounds=3, target_clients=3)
    whole, _ = observe(experiment, trial, client, range(3))
    part, _ = observe(experiment, trial, client, range(1, 2))
    for ours, theirs in zip(part, whole, strict=True):
        assert set(ours.messages) == set(theirs.messages)
        assert all(torch.equal(ours.messages[name], mask) for name, mask in theirs.messages.items())
        assert all(torch.equal(ours.update[name], value[1:2]) for name, value in theirs.update.items())
    assert bool(whole[0].messages) == (selection != "previous")
    assert whole[2].messages


def objective_at_truth(text: str, selection: str, deaf: bool = False):
    """What an attacker who computes the masks himself has left to explain, at the true images."""
    experiment, trial, client = opened(f"adgp(selection={selection})", rounds=3)
    attack = make_attack(text)
    seen, truth = observe(experiment, trial, client, range(2))
    knowledge, _, _ = grant(experiment, attack, client, client.params(), truth)
    heard = [replace(one, messages={}) for one in seen] if deaf else seen
    return attack.evaluate(heard, client, knowledge, Key(0), truth.raw.inputs, truth.noise)


@pytest.mark.parametrize("selection", ["broadcast", "vote", "previous"])
def test_an_attacker_hears_the_messages_of_every_round(selection: str):
    """`dia` does not read masks off the zeros: it computes them, for which it needs the public one."""
    told = objective_at_truth("dia(rounds=all, simulated_client=full, tv=0)", selection)
    deaf = objective_at_truth("dia(rounds=all, simulated_client=full, tv=0)", selection, deaf=True)
    assert bool((told < 1e-9).all()), told
    assert bool((deaf > 1e-3).all()), deaf


def test_an_attacker_who_reads_the_masks_needs_no_message():
    assert bool((objective_at_truth("cdia(rounds=all, tv=0)", "broadcast", deaf=True) < 1e-9).all())


def test_a_group_votes_as_its_members_do():
    """Under secure aggregation nobody sees one member's mask: a position counts where most of the members name it."""
    experiment, trial, client = opened("adgp", client={"members": 3}, target_clients=1)
    (seen,), _ = observe(experiment, trial, client, range(1))
    group = experiment.batch(experiment.examples(0, [1]))
    alone = replace(client, members=1)
    votes = [
        proposer(alone).update(seen.params, Batch(x[None], y[None]), {}, alone.init(seen.params))[0]
        for x, y in zip(group.inputs[0], group.targets[0], strict=True)
    ]
    for name in client.trained():
        most = sum(said[f"prune.mask.{name}"] for said in votes) >= 2
        mask = seen.messages[f"send.prune.mask.{name}"]
        assert int((mask & most).sum()) == min(int(mask.sum()), int(most.sum()))


def test_who_learns_simulates_what_was_heard():
    experiment, trial, client = opened("adgp", "learned(epochs=1, width=4, features=64)", data=FEW)
    (seen,), truth = observe(experiment, trial, client, range(2))
    attack = experiment.attacks[trial.attack]
    knowledge, _, _ = grant(experiment, attack, client, client.params(), truth)
    found = [attack([one], client, knowledge, Key(0)).objective for one in (seen, replace(seen, messages={}))]
    assert not torch.equal(*found)


def test_a_speaker_without_an_image_is_told_before_the_first_trial():
    size = 600  # target clients' digits
    with pytest.raises(GradveilError, match=r"5 other clients speak before a round.*selection=previous"):
        open_experiment(
            config(data={"name": "digits", "size": 16}, defences=["adgp(selection=vote)"], target_clients=size - 4)
        )
    open_experiment(
        config(data={"name": "digits", "size": 16}, defences=["adgp(selection=vote)"], target_clients=size - 5)
    )


def test_python_leaves_images_for_those_who_speak():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(2 * 12 * 12, 3))
    batch = torch.rand(3, 1, 14, 14, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1])
    result = gradveil.audit(model, batch, defences=["none", "adgp"], attacks=["ig"], iterations=2)
    assert [len(trial.records) for trial in result.trials] == [2, 2]
    alone = tuple(part[:1] for part in batch)
    with pytest.raises(GradveilError, match=r"one other client speaks before a round: .* 2 images, there are 1"):
        gradveil.audit(model, alone, defences=["adgp"], attacks=["ig"], iterations=2)
