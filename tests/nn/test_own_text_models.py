"""A user's module of token numbers: the word table and positions are found, and the rest is refused with a remedy."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.nn.models import build
from gradveil.nn.models.own_text import OwnText, reading_tokens
from tests.nn.own_text_models import (
    Cells,
    Columns,
    Convolution,
    LastWord,
    Masked,
    Normalised,
    OwnClassifier,
    Packed,
    Recurrent,
    Tied,
    Transformer,
)

WORDS, LENGTH = 60, 8
FACTS = {"vocabulary": WORDS, "length": LENGTH, "padding": 0}


def texts(count: int = 1):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(WORDS - 1, generator=generator)[:LENGTH] + 1 for _ in range(count)]
    return torch.stack(rows), torch.arange(count) % 2


def update(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor):
    model.zero_grad()
    nn.functional.cross_entropy(model(ids), labels).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_tables_are_told_apart_by_what_they_are_given():
    ids, _ = texts()
    model = OwnText(Transformer(WORDS, LENGTH), ids)
    assert (model.layout.words, model.layout.positions) == ("inner.table", "inner.places")
    assert (model.layout.offset, model.layout.padding, model.vocabulary_size) == (0, 0, WORDS)
    assert reading_tokens(model, ids) == (model, ())


@pytest.mark.parametrize("model", [Columns(WORDS), nn.Sequential(OwnClassifier(WORDS), nn.Linear(3, 3))])
def test_a_model_that_reads_no_texts_is_refused_with_its_reason(model):
    with pytest.raises(GradveilError) as caught:
        OwnText(model, texts()[0])
    assert caught.value.problems[0].where == "model"
    assert caught.value.problems[0].remedy


@pytest.mark.parametrize("kind", [Transformer, Convolution, Recurrent, Cells])
def test_the_words_of_an_update_come_back(kind):
    torch.manual_seed(0)
    model, (ids, labels) = kind(WORDS, LENGTH), texts()
    found = gradveil.invert(model, update(model, ids, labels), truth=(ids, labels), prepare=True)
    assert found.metrics["recall"] == 1
    if kind is Transformer:  # positions give the order
        assert found.metrics["exact"] == 1


def test_logits_that_are_read_off_the_word_table_prove_no_labels_and_hide_no_words():
    torch.manual_seed(0)
    model, (ids, labels) = Tied(WORDS), texts()
    found = gradveil.invert(model, update(model, ids, labels), truth=(ids, labels))
    assert found.metrics["recall"] == 1
    assert "found anywhere 100%" in found.verdict


@pytest.mark.parametrize("prepare", [False, True])
def test_packed_sequences_are_refused_with_the_remedy_that_helps(prepare):
    model, (ids, labels) = Packed(WORDS), texts()
    with pytest.raises(GradveilError) as caught:
        gradveil.invert(model, update(model, ids, labels), truth=(ids, labels), prepare=prepare)
    assert all("without pack_padded_sequence" in problem.remedy for problem in caught.value.problems)


def test_a_table_that_shortens_its_rows_is_refused_until_they_are_short():
    torch.manual_seed(0)
    model, (ids, labels) = OwnClassifier(WORDS), texts()
    model.table.max_norm = 1.0
    sent = update(model, ids, labels)
    with pytest.raises(GradveilError) as caught:
        gradveil.invert(model, sent, truth=(ids, labels))
    (problem,) = caught.value.problems
    assert problem.where.startswith("module 'inner.table'")
    model.table.weight.data.renorm_(2, 0, 1)
    model.table.max_norm = None
    assert gradveil.invert(model, sent, truth=(ids, labels)).metrics["recall"] == 1


def test_batch_norm_is_not_run_on_a_single_text_and_keeps_its_statistics():
    model = OwnText(Normalised(WORDS), texts()[0])
    assert model.inner.get_submodule("norm").training
    assert int(model.inner.get_buffer("norm.num_batches_tracked")) == 0
    torch.manual_seed(0)
    ids, labels = texts(2)
    found = gradveil.invert(model.inner, update(model.inner, ids, labels), truth=(ids, labels), prepare=True)
    assert found.metrics["recall"] >= 0.5  # which of two sentences a word is from is hardly told


def test_an_update_of_unknown_texts_needs_their_length_alone():
    torch.manual_seed(0)
    model, (ids, labels) = Masked(WORDS, LENGTH).eval(), texts()
    sent = update(model, ids, labels)
    assert torch.equal(gradveil.invert(model, sent, length=LENGTH, prepare=True).images, ids)
    with pytest.raises(GradveilError) as caught:
        gradveil.invert(model, sent, prepare=True)
    assert caught.value.problems[0].where == "shape"
    assert "length" in caught.value.problems[0].remedy


@pytest.mark.parametrize("broken", [lambda v: v * torch.nan, lambda v: v.to_sparse()])
def test_an_update_that_overflowed_or_is_sparse_is_refused(broken):
    model, (ids, labels) = OwnClassifier(WORDS), texts()
    sent = update(model, ids, labels)
    sent["table.weight"] = broken(sent["table.weight"])
    with pytest.raises(GradveilError) as caught:
        gradveil.invert(model, sent, length=LENGTH)
    assert [problem.where for problem in caught.value.problems] == ["update['inner.table.weight']"]


def test_a_bag_of_words_identifies_its_sentence_though_no_order_is_known():
    torch.manual_seed(0)
    ids, labels = texts(36)
    result = gradveil.audit(OwnClassifier(WORDS), (ids, labels), target_clients=8, attacks=["embedding-rows"])
    assert result.verdicts[0].level == "leaks"


def test_one_word_of_each_sentence_that_comes_back_is_a_leak_and_is_counted_in_the_table():
    torch.manual_seed(0)
    result = gradveil.audit(LastWord(WORDS), texts(40), target_clients=8, attacks=["embedding-rows"])
    (verdict,) = result.verdicts
    assert (verdict.level, verdict.identifiable, verdict.leaked) == ("leaks", 0, "8 of 64 tokens found")
    assert "It has 8 of 64 tokens found." in verdict.sentence
    assert "8/64 found" in str(result)


def test_adaptive_leaves_out_what_needs_the_inputs_of_attention():
    torch.manual_seed(0)
    ids, labels = texts(18)
    result = gradveil.audit(
        OwnClassifier(WORDS), (ids, labels), target_clients=1, attacks=["adaptive"], defences=["prune(0.5)"]
    )
    on_it = (trial for trial in result.trials if trial.info["defence"] == "prune(0.5)")
    apply = {trial.info["attack"]: trial.failed is None for trial in on_it}
    assert apply == {"embedding-search": True, "embedding-rows": True}


def test_a_factory_of_a_users_text_model_is_wrapped_and_has_to_embed_all_words():
    def made(path: str) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        return build(f"tests.nn.own_text_models:{path}", example=FACTS, classes=2, generator=generator)

    assert isinstance(made("Transformer"), OwnText)
    with pytest.raises(GradveilError, match="knows 30 words"):
        made("small")
