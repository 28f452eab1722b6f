"""Models of transformers whose attention is not described: their tables and masks are found, and words come back."""

from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

import gradveil
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.defences.feature_hiding import Soteria
from gradveil.nn.models.own_text import reading_tokens
from gradveil.nn.models.unlisted_text import UnlistedText
from gradveil.nn.token_layout import next_token_loss

transformers = pytest.importorskip("transformers")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
BOTH = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "scale_embedding": True}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
OWN: dict[str, dict[str, Any]] = {
    "Albert": {**SIZES, "embedding_size": 16},
    "DebertaV2": {**SIZES, **RELATIVE},
    "MPNet": SIZES,
    "LayoutLM": SIZES,
    "T5": {"vocab_size": 60, **T5},
    "Bart": {"vocab_size": 60, **BOTH, "decoder_start_token_id": 2},
    "Olmo2": SIZES,
    "OpenAIGPT": {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Mamba": {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "Longformer": {**SIZES, "attention_window": 8},
    "XLM": {"vocab_size": 60, "emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "XLNet": {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "EuroBert": SIZES,
    "IBert": SIZES,
}
IDS = torch.tensor([[3, 9, 17, 33, 41, 2]])
ONE_BY_ONE = ("Longformer", "XLM", "XLNet", "EuroBert")
"""Classifiers that torch cannot batch."""
CLASSIFIERS = ("Albert", "DebertaV2", "MPNet", "LayoutLM", "T5", "Bart", *ONE_BY_ONE)


def made(name: str, kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**OWN[name], **SPECIAL)
    return getattr(transformers, f"{name}{kind}")(config).eval()


def updated(name: str) -> Any:
    """Return a classifier, a label, and the gradients of a text; zeros for parameters that it leaves out."""
    own, labels = made(name, "ForSequenceClassification"), torch.tensor([1])
    own(input_ids=IDS, labels=labels).loss.backward()
    grads = {key: value.grad if value.grad is not None else value * 0 for key, value in own.named_parameters()}
    return own, labels, {key: value.detach() for key, value in grads.items()}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_wrapper_computes_what_the_classifier_does(name):
    own = made(name, "ForSequenceClassification")
    model, _ = reading_tokens(own, IDS)
    assert isinstance(model, UnlistedText)
    padded = torch.cat([IDS, torch.zeros(1, 2, dtype=torch.long)], 1)
    assert torch.allclose(model(IDS), own(input_ids=IDS).logits, atol=1e-5)
    assert torch.allclose(model(padded), own(input_ids=padded, attention_mask=(padded != 0).long()).logits, atol=1e-5)
    assert model.get_parameter(f"{model.layout.words}.weight").shape[0] == 60


@pytest.mark.parametrize("name", ["Olmo2", "OpenAIGPT", "Mamba"])
def test_the_wrapper_has_the_loss_of_the_language_model(name):
    own = made(name, "LMHeadModel" if name == "OpenAIGPT" else "ForCausalLM")
    model = UnlistedText(own, 6)
    assert torch.allclose(model(IDS), next_token_loss(own(input_ids=IDS).logits, IDS, 0), atol=1e-5)
    assert model.layout.predicts_words


@pytest.mark.parametrize("name", ["DebertaV2", "T5", *ONE_BY_ONE])
def test_gradients_of_single_texts_are_batched(name):
    model, rows = UnlistedText(made(name, "ForSequenceClassification"), 6), torch.cat([IDS, IDS])
    rows[1, 2] = 50
    params = {key: value.detach() for key, value in model.named_parameters()}

    def loss(p, row):
        return functional_call(model, p, (row.unsqueeze(0),)).square().sum()

    batched, alone = vmap(grad(loss), in_dims=(None, 0))(params, rows), grad(loss)(params, rows[1])
    word = f"{model.layout.words}.weight"
    assert torch.allclose(batched[word][1], alone[word], atol=1e-6)


@pytest.mark.parametrize("name", ["XLM", "Longformer", "XLNet"])
def test_soteria_differentiates_the_features_of_a_model_that_torch_cannot_batch(name):
    own = made(name, "ForSequenceClassification")
    client = Client(UnlistedText(own, 6))
    context = client.pipeline.gradient.context(client.params(), Batch(IDS, torch.tensor([1])), {})
    layer, relevance = Soteria().relevance(context)
    taken: list[Any] = []
    own.get_submodule(layer.removeprefix("inner.")).register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    own.get_input_embeddings().register_forward_hook(lambda _, __, words: taken.append(words))
    own(input_ids=IDS)
    words, features = taken[0], taken[-1][0]
    slopes = [torch.autograd.grad(one, words, retain_graph=True)[0].norm() for one in features]
    assert torch.allclose(relevance, torch.stack(slopes) / (features.abs() + 0.1), rtol=1e-3)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_words_of_an_update_come_back(name):
    own, labels, update = updated(name)
    found = gradveil.invert(own, update, truth=(IDS, labels), attack="embedding-rows")
    assert found.metrics["recall"] == 1


@pytest.mark.parametrize("name", ["Albert", "DebertaV2", "XLM", "Longformer"])
def test_the_search_orders_the_words(name):
    own, _, update = updated(name)
    assert torch.equal(gradveil.invert(own, update, length=6).images, IDS)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("IBert", "ForSequenceClassification", "gives no gradients .* one example after the other"),
        ("T5", "ForConditionalGeneration", "turns one text"),
        ("Albert", "ForMaskedLM", "sees later words"),
        ("Albert", "ForTokenClassification", r"logits \[2, 6, 2\]"),
        ("Albert", "Model", "no logits"),
    ],
)
def test_a_model_that_cannot_be_audited_is_refused_with_its_reason(name, kind, said):
    with pytest.raises(GradveilError, match=said) as caught:
        UnlistedText(made(name, kind), 6)
    assert caught.value.problems[0].remedy


def test_dropout_that_is_drawn_one_example_after_the_other_is_refused():
    with pytest.raises(GradveilError, match=r"draws dropout .* -> call model\.eval"):
        UnlistedText(made("XLM", "ForSequenceClassification").train(), 6)
    model = UnlistedText(made("XLM", "ForSequenceClassification"), 6)
    with pytest.raises(GradveilError, match="draws dropout"):
        model.train()
    assert not model.eval().training
