"""Rounds in which somebody speaks first: the engine knows no defence, and everybody sends within the mask."""

import pytest
import torch
from torch import nn

from gradveil.client import Client, proposer
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.federated.engine import ClientShare, Federation, train
from gradveil.nn.initial_weights import initialise
from gradveil.wire.codec import encoded_size

CLIENTS = 4


def federation(defence: str, **settings):
    generator = Key(0, ("data",)).generator()
    inputs = torch.randn(CLIENTS, 6, 12, generator=generator)
    targets = torch.randint(3, (CLIENTS, 6), generator=generator)
    model = initialise(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)), Key(0).generator())
    shares = [ClientShare(Batch(*pair)) for pair in zip(inputs, targets, strict=True)]
    return Federation(parse(defence)(Client(model)), shares, shares[0].train, **settings)


def masks(of: Federation, standing, number: int):
    answers, _ = of.chosen(number)
    heard, spoken = of.announced(standing, answers, number)
    return {name.removeprefix("send.prune.mask."): mask for name, mask in heard.messages.items()}, spoken


@pytest.mark.parametrize("text", ["adgp", "adgp(speaker=turns)"])
def test_announced_mask_comes_from_the_broadcaster_of_the_round(text):
    of = federation(text)
    standing = of.start()
    for number in (1, 2, 3):
        chosen, spoken = masks(of, standing, number)
        (speaker,) = of.speaking(of.chosen(number)[0], number)
        message, _ = of.local_update(standing, speaker, number, proposer(of.client))
        entries = sum(value.numel() for value in standing.params.values())
        assert spoken == pytest.approx(entries / 8, abs=len(chosen))
        for name, mask in chosen.items():
            assert torch.equal(mask, message[f"prune.mask.{name}"].bool())
        after = of.round(standing)
        assert set(after.mean) == set(chosen)
        assert all(not after.mean[name][~mask].any() for name, mask in chosen.items())
        standing = after


def test_speakers_are_drawn_in_each_round_or_take_turns():
    answers = (3, 5, 8, 9)
    turns, drawn = federation("adgp(speaker=turns)"), federation("clip(1) + adgp")
    assert [turns.speaking(answers, number) for number in range(1, 6)] == [[3], [5], [8], [9], [3]]
    speakers = [drawn.speaking(answers, number)[0] for number in range(1, 401)]
    assert speakers[:40] == [federation("adgp").speaking(answers, number)[0] for number in range(1, 41)]
    assert all(80 <= speakers.count(client) <= 120 for client in answers)
    assert len({tuple(speakers[i : i + 4]) for i in range(0, 400, 4)}) > 50
    other = federation("adgp", key=Key(1))
    assert [other.speaking(answers, number)[0] for number in range(1, 41)] != speakers[:40]
    voters = federation("adgp(selection=vote, voters=3)")
    assert all(len({*voters.speaking(answers, number)}) == 3 for number in range(1, 9))


def test_announced_mask_comes_from_the_last_mean():
    of = federation("adgp(selection=previous)")
    first = of.round(of.start())
    assert masks(of, of.start(), 1) == ({}, 0)
    chosen, spoken = masks(of, first, 2)
    assert spoken == 0
    for name, mask in chosen.items():
        largest = first.mean[name].abs().flatten().argsort()[-1]
        assert bool(mask.flatten()[largest])
    second = of.round(first)
    assert all(not second.mean[name][~mask].any() for name, mask in chosen.items())


def test_round_counts_the_bytes_of_messages():
    """Against the same training with a mask of everything: a bit an entry, to and from."""
    spoken, silent = (train(federation(text), 1).records[0] for text in ("adgp", "adgp(selection=previous)"))
    of = federation("adgp")
    bits = sum(-(-value.numel() // 8) for value in of.start().params.values())
    assert spoken.bytes_down - silent.bytes_down == CLIENTS * bits
    heard, _ = of.announced(of.start(), range(CLIENTS), 1)
    sent = [of.local_update(of.start(), client, 1, heard)[0] for client in range(CLIENTS)]
    assert spoken.bytes_up == bits + sum(encoded_size(update, heard.messages) for update in sent)
    assert spoken.bytes_up < bits + sum(map(encoded_size, sent))


def test_announced_proposal_has_the_clients_noise():
    """The mask that a noisy client proposes shows its noisy update, and nothing of the clean one."""
    of = federation("gaussian(10) + adgp(feedback=false)")
    message, _ = of.local_update(of.start(), 0, 1, proposer(of.client))
    noise = of.client.noise_spec(of.start().params, of.shares[0].train).sample(of.key.child("client", 0, "round", 1))
    for name, value in noise.items():
        size = value.abs().flatten()
        mask = message[name.replace("send.noise", "prune.mask")].flatten().bool()
        if 0 < int(mask.sum()) < len(mask):
            assert float(size[mask].min()) > float(size[~mask].max()) - 1


def test_federation_with_too_few_voters_raises():
    with pytest.raises(GradveilError, match="selects 4 of 4 clients per round, but 5 must send public messages"):
        federation("adgp(selection=vote)")
    with pytest.raises(GradveilError, match="selects 2 of 4 clients per round, but 3 must send"):
        federation("adgp(selection=vote, voters=3)", participation=0.5)
    assert federation("adgp(selection=vote, voters=4)").round
    with pytest.raises(GradveilError, match="give a whole number of at least 3"):
        parse("adgp(selection=vote, voters=2)")


def test_round_records_the_number_of_voters():
    of = federation("adgp(selection=vote, voters=4)", absent=0.5)
    answered = [len(of.chosen(number)[0]) for number in range(1, 7)]
    assert 0 < min(answered) < 4
    records = train(of, 6).records
    assert [record.spoke for record in records] == [(count, 4) if count else None for count in answered]
    assert all(record.spoke is None for record in train(federation("dgp", absent=0.5), 2).records)
    assert train(federation("adgp", absent=0.5), 1).records[0].spoke == (1, 1)
