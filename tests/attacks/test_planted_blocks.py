"""Planted blocks: an example alone in a measure is recovered exactly; the rest of the model does not change."""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.malicious.planted_block import BIAS, WEIGHT, Imprint, Planted, Trap
from gradveil.attacks.protocol import Active, Observation, Prospect
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.federated.model_inspection import inspect
from gradveil.nn.models import build
from gradveil.nn.surgery import prepare

DIGITS = load("digits")
LOWER, UPPER = DIGITS.private.space.bounds(DIGITS.private.inputs)
SHAPE = tuple(DIGITS.private.inputs.shape[1:])
PUBLIC = Batch(DIGITS.public.inputs, DIGITS.public.targets)


def known(**changes):
    return replace(Knowledge(DIGITS.private.space, 10, public=PUBLIC), **changes)


def digits(count, first=0):
    rows = slice(first, first + count)
    return Batch(DIGITS.private.inputs[rows], DIGITS.private.targets[rows])


def client(name="scheliga-cnn", defence="none"):
    net = build(name, channels=SHAPE[0], size=SHAPE[1], classes=10, generator=Key(0).generator())
    return parse(defence)(Client(prepare(net)[0]))


def robbed(attack, honest, batch, examples=None, seed=0):
    """Craft a model, compute the client's update on it, and run the attack."""
    knowledge = known(targets=batch.targets[None])
    sent = attack.craft(honest, knowledge, Key(seed, ("craft",)))
    params, spec = sent.params(), sent.noise_spec(sent.params(), batch)
    update, _ = sent.update(params, batch, spec.sample(Key(seed, ("client",))), sent.init(params))
    seen = Observation(params, {n: v[None] for n, v in update.items()}, examples or len(batch.targets), (0,))
    return attack([seen], sent.undefended_update(), knowledge, Key(seed)), sent, update


def errors(found, truth):
    """The mean squared error of the nearest recovered image of each true one."""
    return (found.inputs[0].unsqueeze(0) - truth.unsqueeze(1)).square().flatten(2).mean(2).min(1).values


@pytest.mark.parametrize("name", ["scheliga-cnn", "lenet-zhu", "resnet20", "vit-small"])
@pytest.mark.parametrize("text", ["rob", "rob(sparse=true)", "rob(measure=random)", "curious"])
def test_single_image_is_recovered_from_any_model(name, text):
    if name == "vit-small":
        honest = Client(nn.Sequential(nn.Flatten(), nn.LayerNorm(1024), nn.Linear(1024, 10)))
    else:
        honest = client(name)
    attack = make_attack(text)
    assert isinstance(attack, Active)
    batch = digits(1)
    found, _, _ = robbed(attack, honest, batch)
    assert float(errors(found, batch.inputs)) < 1e-6
    assert found.status == ("converged",)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("law", ["normal", "laplace", "empirical"])
def test_images_alone_in_their_bins_are_recovered(sparse, law):
    attack, batch = Imprint(bins=64, sparse=sparse, law=law), digits(24)
    found, sent, _ = robbed(attack, client(), batch)
    assert isinstance(sent.model, Planted)
    measured = sent.model.measure(batch.inputs.flatten(1))
    bins = (measured > 0).sum(1)
    alone = torch.tensor([int((bins == own).sum()) == 1 for own in bins])
    assert 4 <= int(alone.sum()) < 24
    wrong = errors(found, batch.inputs)
    assert float(wrong[alone].max()) < 1e-5
    assert float(wrong[~alone].min()) > 1e-5
    filled = len(set(bins.tolist()))
    assert float(found.objective) == pytest.approx(1 - filled / 24)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("count", [40, 64])
def test_full_bins_are_not_noise(count, sparse):
    attack, batch = Imprint(bins=64, sparse=sparse, law="empirical"), digits(count)
    found, sent, _ = robbed(attack, client(), batch)
    bins = (sent.model.measure(batch.inputs.flatten(1)) > 0).sum(1).tolist()
    alone = torch.tensor([bins.count(own) == 1 for own in bins])
    assert int(alone.sum()) >= 20
    assert float(errors(found, batch.inputs)[alone].max()) < 1e-4
    assert float(found.objective) == pytest.approx(1 - len(set(bins)) / count)


def test_rows_passed_by_one_image_reveal_it():
    attack, batch = Trap(rows=512, share=0.08), digits(8)
    found, sent, _ = robbed(attack, client(), batch)
    assert isinstance(sent.model, Planted)
    passed = sent.model.measure(batch.inputs.flatten(1)) > 0
    shown = passed[:, passed.sum(0) == 1].sum(1)
    assert int((shown > 1).sum()) >= 4
    assert float(errors(found, batch.inputs)[shown > 1].max()) < 1e-4


def test_a_share_is_the_share_of_public_images_that_pass():
    attack = Trap(rows=200, share=0.07)
    sent = attack.craft(client(), known(), Key(1))
    passed = sent.model.measure(PUBLIC.inputs.flatten(1)) > 0
    assert float(passed.double().mean()) == pytest.approx(0.07, abs=0.002)


@pytest.mark.parametrize(("law", "reference"), [("normal", stats.norm()), ("laplace", stats.laplace(scale=0.5**0.5))])
def test_bins_are_the_quantiles_of_their_law(law, reference):
    sent = Imprint(bins=10, law=law, gain=1.0).craft(client(), known(), Key(0))
    values = ((PUBLIC.inputs - LOWER) / (UPPER - LOWER)).flatten(1).mean(1)
    expected = values.mean() + values.std(correction=0) * torch.tensor(reference.ppf([i / 10 for i in range(1, 10)]))
    span = float(UPPER - LOWER)
    cuts = -sent.model.measure.bias[1:].double() - float(LOWER) / span
    torch.testing.assert_close(cuts, expected.clamp(-1e-3, 1 + 1e-3), rtol=0, atol=1e-5)


def test_small_measures_survive_a_clip_and_sparse_rows_survive_pruning():
    batch = digits(8)
    private, pruned = client(defence="dp(clip=1, sigma=0.001)"), client(defence="prune(0.9)")
    loud, plain = (errors(robbed(Imprint(gain=g, sparse=True), private, batch)[0], batch.inputs) for g in (1e-3, 1.0))
    assert float(loud.median()) < 0.1 < float(plain.median())
    own, shared = (errors(robbed(Imprint(sparse=s), pruned, batch)[0], batch.inputs) for s in (True, False))
    assert float(own.median()) < 0.1 < float(shared.median())


def test_defence_that_prunes_the_largest_entries_removes_decoys():
    batch, defended = digits(8), client(defence="dgp")
    lured, plain = (
        errors(robbed(Imprint(bins=512, sparse=True, decoys=d), defended, batch)[0], batch.inputs) for d in (64, 0)
    )
    assert float(lured.median()) < 0.01 < float(plain.median())
    honest, _, _ = robbed(Imprint(bins=512, sparse=True, decoys=64), client(), batch)
    assert float(errors(honest, batch.inputs).median()) < 1e-4
    before, after = (
        Imprint(bins=16, gain=1.0, decoys=d).craft(client(), known(), Key(0)).model(batch.inputs) for d in (0, 8)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def test_craft_leaves_the_honest_client_unchanged():
    honest = replace(client(), trainable=("*.weight",))
    before = {name: value.clone() for name, value in honest.params().items()}
    sent = Imprint().craft(honest, known(), Key(0))
    assert all(torch.equal(value, before[name]) for name, value in honest.params().items())
    assert all(torch.equal(sent.params()[f"model.{name}"], value) for name, value in before.items())
    assert sent.trained() == [WEIGHT, BIAS, "back.weight", "back.bias", *(f"model.{n}" for n in honest.trained())]


def test_layers_in_evaluation_mode_stay_in_it():
    honest = Client(nn.Sequential(nn.BatchNorm2d(SHAPE[0]).eval(), nn.Flatten(), nn.Linear(1024, 10)))
    assert honest.model.training
    sent = Imprint().craft(honest, known(), Key(0))
    assert sent.model.training
    assert not honest.model[0].training


def test_aggregation_group_is_read_as_one_batch():
    honest = replace(client(), members=4)
    batch = digits(4)
    attack = Imprint(bins=256, law="empirical")
    found, _, _ = robbed(attack, honest, batch)
    assert int((errors(found, batch.inputs) < 1e-4).sum()) >= 3


@pytest.mark.parametrize("attack", [Imprint(), Imprint(sparse=True), Trap()])
def test_empty_and_nan_updates_return_grey_images(attack):
    honest, knowledge = client(), known(targets=torch.zeros(2, 3, dtype=torch.long))
    sent = attack.craft(honest, knowledge, Key(0))
    update = {name: torch.zeros(2, *value.shape) for name, value in sent.params().items()}
    update[WEIGHT][1, 0, 0] = torch.nan
    found = attack([Observation(sent.params(), update, 3, (0, 1))], sent, knowledge, Key(0))
    assert found.status == ("converged", "diverged")
    assert found.objective.tolist() == [1.0, torch.inf]
    assert bool(found.inputs.isfinite().all())


def test_inspection_reports_the_planted_block():
    for attack, family in (
        (Imprint(gain=1.0), "imprint"),
        (Imprint(), "imprint"),
        (Trap(gain=1.0), "trap"),
        (Trap(), "trap"),
    ):
        sent = attack.craft(client(), known(), Key(0))
        assert (family, WEIGHT) in {(found.family, found.where) for found in inspect(sent.model, sent.params())}


def test_unsuitable_data_raise_with_a_fix():
    batch = digits(1)
    honest = client()
    update = {n: v[None] for n, v in honest.update(honest.params(), batch, {}, {})[0].items()}
    seen = Observation(honest.params(), update, 1, (0,))
    with pytest.raises(GradveilError, match="was not in the model that the client trained"):
        make_attack("rob")([seen], honest, known(targets=batch.targets[None]), Key(0))
    odd = make_attack("rob(decoys=3)").problems(Prospect(honest, SHAPE, 1, 10, public=8))
    assert [(p.where, p.remedy) for p in odd] == [("decoys", "give 2 or 4")]
    blind = Prospect(honest, SHAPE, 1, 10, public=False)
    assert [p.where for p in make_attack("rob").problems(blind)] == ["data.public"]
    assert not list(make_attack("curious").problems(blind))
    assert [p.where for p in make_attack("curious(share=0.1)").problems(blind)] == ["data.public"]
    with pytest.raises(GradveilError, match="no public images"):
        make_attack("rob").craft(honest, known(public=None), Key(0))
