"""Gradients of low-rank adapters give texts back where their rank suffices, and decide nothing where it does not."""

import pytest
import torch

from gradveil.attacks import Knowledge, Observation, make_attack
from gradveil.attacks.sequences.adapter_span import adapter_span
from gradveil.attacks.sequences.token_candidates import rank_words
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.findings import findings_of
from gradveil.client import Client
from gradveil.core import Batch, Key
from gradveil.data import load
from gradveil.nn.lora import LoraLinear, adapters
from gradveil.nn.models import build
from tests.audit.runs import execute

REVIEWS = load("reviews", limit_private=1)


def adapted(rank, later=False, name="small-encoder", **options):
    generator = torch.Generator().manual_seed(0)
    facts = REVIEWS.private.space.model_facts()
    model = build(name, classes=2, generator=generator, example=facts, lora=rank, **options)
    for module in model.modules():
        if later and isinstance(module, LoraLinear):
            torch.nn.init.normal_(module.lora_B.weight, std=0.01, generator=generator)
    return model


def update_of(model):
    client = Client(model)
    params = client.params()
    sent, _ = client.update(params, Batch(REVIEWS.private.inputs, REVIEWS.private.targets), {}, {})
    return client, params, sent


def test_adapters_change_nothing_at_first_and_train_alone_with_the_head():
    plain = build(
        "small-encoder", classes=2, generator=torch.Generator().manual_seed(0),
        example=REVIEWS.private.space.model_facts(), width=32,
    )  # fmt: skip
    model = adapted(4, width=32)
    assert torch.equal(plain(REVIEWS.private.inputs), model(REVIEWS.private.inputs))
    assert {name.rpartition("lora_")[2] for name in Client(model).trained()} == {
        "A.weight", "B.weight", "head.weight", "head.bias",
    }  # fmt: skip


@pytest.mark.parametrize("later", [False, True])
def test_a_sentence_is_recovered_where_the_rank_suffices(later):
    client, params, sent = update_of(adapted(40, later, width=96))
    seen = Observation(params, {name: value.unsqueeze(0) for name, value in sent.items()}, 1, (0,))
    found = make_attack("span")([seen], client, Knowledge(REVIEWS.private.space, 2), Key(0))
    space, truth = REVIEWS.private.space, REVIEWS.private.inputs[0]
    assert space.text(found.inputs[0, 0]) == space.text(truth)  # type: ignore[attr-defined]


def test_true_inputs_lie_in_the_span_and_a_small_rank_is_not_decisive():
    for rank, decisive in ((40, True), (6, False)):
        model = adapted(rank, later=True, width=96)
        _, params, sent = update_of(model)
        span = adapter_span(sent, model.layout, params, 0, torch.float32)
        assert span is not None
        assert span.exact == decisive
        inputs = model.layout.inputs(model, params, REVIEWS.private.inputs, 0)[0]
        words = (REVIEWS.private.inputs[0] != 0).nonzero().flatten()
        assert (span.residuals(inputs[words]) < 1e-4).all() == decisive


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("rank", [4, 40])
def test_a_shortlist_ranks_as_all_words_are_ranked(rank, later):
    model = adapted(rank, later, width=96)
    _, params, sent = update_of(model)
    span = adapter_span(sent, model.layout, params, 0, torch.float32)
    assert span is not None
    best = rank_words(model, model.layout, params, span, 6, 8)
    for position, (words, residuals) in enumerate(zip(best.words, best.residuals, strict=True)):
        whole = span.residuals(model.layout.first_inputs(model, params, position))
        whole[model.layout.padding] = torch.inf
        torch.testing.assert_close(residuals, whole.topk(8, largest=False).values)
        torch.testing.assert_close(whole[words], residuals)


@pytest.mark.parametrize("attack", ["span-rank", "embedding-search(steps=1)"])
def test_words_are_ranked_in_the_first_round_however_small_the_rank(attack):
    client, params, sent = update_of(adapted(4, width=96))
    seen = Observation(params, {name: value.unsqueeze(0) for name, value in sent.items()}, 1, (0,))
    found = make_attack(attack)([seen], client, Knowledge(REVIEWS.private.space, 2), Key(0))
    assert (found.inputs[0, 0] != 0).any()


def test_names_of_peft_are_read():
    tensors = {f"{path}.lora_{part}.default.weight": torch.ones(1) for path in ("q", "v") for part in "AB"}
    assert [one.path for one in adapters(tensors, ["k", "q", "v"])] == ["q", "v"]


def test_a_failed_test_of_the_span_never_says_not_broken(tmp_path):
    model = {"name": "small-encoder", "options": {"lora": 4, "width": 64}}
    config = RunConfig(
        name="lora", data={"name": "reviews"}, model=model, target_clients=1, attacks=["span"],
        defences=["none", "gaussian(1e-3)"],
    )  # fmt: skip
    recorded, _ = execute(config, tmp_path / "run")
    assert {verdict.level for verdict in findings_of(recorded).verdicts} <= {"inconclusive", "not tested"}
