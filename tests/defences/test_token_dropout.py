"""Token dropout replaces tokens of texts, at its rate, and nothing else."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks import Knowledge, Observation, make_attack
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.preflight import open_experiment
from gradveil.client import Client, Local, transformed_batch
from gradveil.core import Batch, Domain, Key
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.defences import TokenDropout, examine, parse
from gradveil.nn.models import build
from gradveil.spaces import TextSpace

REVIEWS = load("reviews", limit_private=4)
SPACE = REVIEWS.private.space
DOMAIN = Domain(SPACE, 2)
BATCH = Batch(REVIEWS.private.inputs, REVIEWS.private.targets)
UNKNOWN = 3


def client(text: str, width: int = 64, **options) -> Client:
    model = build("small-encoder", classes=2, generator=Key(0).generator(), example=SPACE.model_facts(), width=width)
    return parse(text)(Client(model, domain=DOMAIN, **options))


def test_tokens_are_replaced_at_the_rate_and_marks_stay():
    defended, ids = client("token-dropout(0.4)"), torch.randint(4, 200, (200, 32))
    ids[:, 0], ids[:, 30], ids[:, 31] = SPACE.start, SPACE.end, SPACE.padding
    batch = Batch(ids, torch.zeros(200, dtype=torch.long))
    noise = defended.noise_spec(defended.params(), batch).sample(Key(1))
    assert list(noise) == ["batch.0.kept"]
    made = transformed_batch(defended, batch, noise).inputs
    replaced = made != ids
    assert (made[replaced] == UNKNOWN).all()
    assert not replaced[:, [0, 30, 31]].any()
    assert abs(float(replaced[:, 1:30].double().mean()) - 0.4) < 4 * (0.4 * 0.6 / (200 * 29)) ** 0.5


def test_the_update_is_that_of_the_masked_texts():
    defended, plain = client("token-dropout(0.4)"), client("none")
    params = defended.params()
    noise = defended.noise_spec(params, BATCH).sample(Key(1))
    masked = transformed_batch(defended, BATCH, noise)
    sent, _ = defended.update(params, BATCH, noise, {})
    torch.testing.assert_close(sent, plain.update(params, masked, {}, {})[0])
    neutral = defended.noise_spec(params, BATCH).neutral()
    torch.testing.assert_close(defended.update(params, BATCH, neutral, {})[0], plain.update(params, BATCH, {}, {})[0])


def test_every_local_step_draws_anew_and_a_rate_of_zero_draws_nothing():
    local = Local(batch=4, lr=0.1, steps=3)
    defended = client("token-dropout(0.4)", local=local)
    noise = defended.noise_spec(defended.params(), BATCH).sample(Key(1))
    kept = noise["batch.0.kept"]
    assert kept.shape == (3, 4, 32)
    assert not torch.equal(kept[0], kept[1])
    assert [*client("token-dropout(0)").noise_spec(defended.params(), BATCH)] == []


def test_another_token_takes_the_place():
    made = TokenDropout(0.5, mask="the")
    drawn = torch.zeros(BATCH.inputs.shape)
    masked = made.apply(BATCH, {"kept": drawn}, DOMAIN).inputs
    words = (BATCH.inputs != SPACE.padding) & (BATCH.inputs != SPACE.start) & (BATCH.inputs != SPACE.end)
    assert isinstance(SPACE, TextSpace)
    assert {SPACE.vocabulary[i] for i in masked[words].tolist()} == {"the"}


@pytest.mark.parametrize(
    ("domain", "text", "said"),
    [
        (None, "token-dropout", "needs to know the vocabulary"),
        (DOMAIN, 'token-dropout(mask="[GONE]")', "no token of the vocabulary"),
        (Domain(TextSpace((4,), ("[0]", "[1]")), 2), "token-dropout", "the vocabulary has none of"),
    ],
)
def test_what_it_needs_is_told(domain, text, said):
    one = client("none")
    with pytest.raises(GradveilError, match=said):
        parse(text)(replace(one, domain=domain)).noise_spec(one.params(), BATCH)


def test_images_are_refused_with_a_remedy():
    settings = {"data": {"name": "faces", "size": 32}, "model": {"name": "lenet-zhu"}, "target_clients": 1}
    with pytest.raises(GradveilError, match="needs tokens, and the data are images") as caught:
        open_experiment(RunConfig(name="r", **settings, attacks=["ig"], defences=["token-dropout"]))
    assert all("choose one for images" in problem.remedy for problem in caught.value.problems)


def test_noise_after_it_keeps_its_guarantee():
    assert examine(client("token-dropout + dp(sigma=2)"), BATCH).sound


def test_an_adaptive_attacker_reads_what_was_trained_on_and_guesses_the_rest():
    defended = client("token-dropout(0.2)", width=96)
    params, known = defended.params(), Knowledge(SPACE, 2, public=Batch(REVIEWS.public.inputs, REVIEWS.public.targets))
    before, after = [], []
    for place in range(4):
        own = Batch(*(value[place : place + 1] for value in BATCH))
        noise = defended.noise_spec(params, own).sample(Key(place))
        sent, _ = defended.update(params, own, noise, {})
        seen = Observation(params, {name: value.unsqueeze(0) for name, value in sent.items()}, 1, (0,))
        found = make_attack("span-rank")([seen], defended, known, Key(0))
        masked, truth = transformed_batch(defended, own, noise).inputs.unsqueeze(0), own.inputs.unsqueeze(0)
        assert found.before_undoing is not None
        assert float(SPACE.scores(found.before_undoing, masked)["exact"]) == 1
        assert not (found.inputs == UNKNOWN).any()
        before.append(float(SPACE.scores(found.before_undoing, truth)["tokens"]))
        after.append(float(SPACE.scores(found.inputs, truth)["tokens"]))
        unguided = make_attack("span-rank")([seen], defended, Knowledge(SPACE, 2), Key(0))
        assert torch.equal(unguided.inputs, found.before_undoing)
    assert sum(before) < sum(after) < 4
