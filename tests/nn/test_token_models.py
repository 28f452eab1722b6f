"""Models of transformers answer what attacks on texts ask, and work under vmap(grad)."""

from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

from gradveil.attacks.sequences.token_span import token_span
from gradveil.core.errors import GradveilError
from gradveil.gradients.objective import cross_entropy
from gradveil.nn.models.hugging_face_text import FAMILIES, HuggingFaceText
from gradveil.nn.models.token_transformers import small_encoder
from gradveil.nn.token_layout import next_token_loss, own_loss

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
ENCODERS |= {"ernie": "Ernie", "modernbert": "ModernBert"}
NAMES = {"gpt_bigcode": "GPTBigCode", "gpt_neo": "GPTNeo", "gptj": "GPTJ", "opt": "OPT", "gpt_neox": "GPTNeoX"}
NAMES |= {"gemma3_text": "Gemma3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "stablelm": "StableLm"}
NAMES |= {"smollm3": "SmolLM3", "gpt_oss": "GptOss"}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KEYS = {"num_key_value_heads": 2, "head_dim": 8, **SPECIAL}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
OWN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt_bigcode": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        **SPECIAL,
    },
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], **SPECIAL},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **SPECIAL},
    "bloom": {"n_layer": 2, "n_head": 4, **SPECIAL},
    "falcon": SPECIAL,
    "phi": SPECIAL,
    "modernbert": {**SPECIAL, "cls_token_id": 1, "sep_token_id": 2},
    "qwen2_moe": {**KEYS, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**KEYS, **EXPERTS},
    "mixtral": {**KEYS, **FEW_EXPERTS},
    "gpt_oss": {**KEYS, **FEW_EXPERTS},
}
"""Settings that a family has besides, or by another name."""


def inner(family: str, classifies: bool = False) -> Any:
    """Build a small model of a family with random weights: a decoder, or a classifier."""
    torch.manual_seed(0)
    if family in ENCODERS:
        name, config = ENCODERS[family], {**SIZES, **NO_DROPOUT, **OWN.get(family, {})}
    elif family == "electra":
        name, config = "Electra", {**SIZES, **NO_DROPOUT, "embedding_size": 32}
    elif family == "distilbert":
        name = "DistilBert"
        config = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0}
        config |= {"attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    elif family == "gpt2":
        name, config = "GPT2", {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 49}
        config |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        name = NAMES.get(family, family.capitalize())
        unlike = {"intermediate_size"} if family in ("falcon", "bloom") else set()
        if "n_embd" in OWN.get(family, {}):
            unlike |= {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        config = {key: value for key, value in SIZES.items() if key not in unlike}
        config |= OWN.get(family, {} if family == "gpt_neox" else KEYS)
    kind = "ForCausalLM" if FAMILIES[family]["causal"] and not classifies else "ForSequenceClassification"
    kind = "LMHeadModel" if family == "gpt2" and kind == "ForCausalLM" else kind
    settings = "Gemma3TextConfig" if family == "gemma3_text" else f"{name}Config"
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, settings)(**config))


def wrapped(family: str, classifies: bool = False) -> HuggingFaceText:
    return HuggingFaceText(inner(family, classifies), 8)


def drawn(rows: int, length: int) -> torch.Tensor:
    return torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_first_inputs_point_where_those_of_a_forward_pass_do(family):
    model = wrapped(family)
    layout, params = model.layout, {name: value.detach() for name, value in model.named_parameters()}
    ids = drawn(2, 6)
    seen = layout.inputs(model, params, ids, 0)
    for position in range(6):
        expected = layout.first_inputs(model, params, position, ids[:, position])
        assert torch.cosine_similarity(seen[:, position], expected).min() > 1 - 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_wrapper_computes_what_the_model_does(family):
    own = inner(family)
    model, ids = HuggingFaceText(own, 8), drawn(2, 6)
    logits = own(input_ids=ids).logits
    expected = next_token_loss(logits, ids, model.layout.padding) if model.layout.predicts_words else logits
    assert torch.allclose(model(ids), expected, atol=1e-5)


SINGLE = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Families whose experts compute in single precision alone."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SINGLE])
def test_the_words_of_a_text_are_in_the_span_of_its_gradient(family):
    model, ids = wrapped(family).double(), drawn(1, 6)
    (own_loss if model.layout.predicts_words else cross_entropy)(model(ids), torch.tensor([1])).sum().backward()
    update = {name: value.grad[None] for name, value in model.named_parameters() if value.grad is not None}
    params = {name: value.detach() for name, value in model.named_parameters()}
    span = token_span([value[0] for value in model.layout.gradients(update, 0)], 6, torch.float64)
    assert span.exact
    for position in range(5):  # nothing follows the last word of a language model
        residuals = span.residuals(model.layout.first_inputs(model, params, position))
        assert residuals[ids[0, position]] < 1e-3
        assert residuals.median() > 0.1


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_hidden_units_follow_from_what_the_heads_give(family):
    model = wrapped(family)
    layout, params = model.layout, {name: value.detach() for name, value in model.named_parameters()}
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    entered = []
    for path in (layout.out, layout.down):
        module = model.get_submodule(path.format(0))
        module.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    model(ids)
    contexts, expected = entered[0], entered[1]
    carried = layout.first_carried(model, params, 2, ids[:, 2])
    units = layout.hidden_units(model, params, contexts[:, 2], carried, 0)
    assert torch.allclose(units, expected[:, 2], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family):
    model, ids = wrapped(family), drawn(1, 5)
    longer = torch.cat([ids, torch.full((1, 3), model.layout.padding)], 1)
    assert torch.allclose(model(ids), model(longer), atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2", "opt", "llama"])
def test_gradients_of_single_texts_are_batched(family):
    model, ids = wrapped(family), drawn(2, 6)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(p, row):
        return functional_call(model, p, (row.unsqueeze(0),)).square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(params, ids)
    alone = grad(loss)(params, ids[1])
    name = model.layout.attention[0].format(0) + ".weight"
    assert torch.allclose(batched[name][1], alone[name], atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_decoder_with_classes_returns_logits_of_the_last_word(family):
    model, ids = wrapped(family, classifies=True), drawn(2, 6)
    assert model(ids).shape == (2, 2)
    assert not model.layout.predicts_words
    assert model.layout.causal


def test_an_unknown_family_is_refused_with_the_list():
    config = transformers.AlbertConfig(**SIZES, embedding_size=16)
    with pytest.raises(GradveilError, match="bert, electra, roberta"):
        HuggingFaceText(transformers.AlbertForSequenceClassification(config), 8)


def decoder(kind: str, **settings: Any) -> Any:
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SIZES, **KEYS, **settings)
    )


def test_falcons_with_a_norm_of_their_own_for_attention_are_read():
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    config = transformers.FalconConfig(**sizes, **SPECIAL, new_decoder_architecture=True, num_kv_heads=2)
    model, ids = HuggingFaceText(transformers.FalconForCausalLM(config), 8), drawn(1, 6)
    params = {name: value.detach() for name, value in model.named_parameters()}
    seen = model.layout.inputs(model, params, ids, 0)
    assert torch.allclose(seen[:, 1], model.layout.first_inputs(model, params, 1, ids[:, 1]), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)), "masked"),
        (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).train(), "dropout"),
        (lambda: decoder("Mistral", sliding_window=4), "4 tokens far"),
        (
            lambda: transformers.ElectraForSequenceClassification(
                transformers.ElectraConfig(**SIZES, **NO_DROPOUT, embedding_size=16)
            ),
            "projects",
        ),
    ],
)
def test_a_model_that_attacks_cannot_read_is_refused(make, place):
    with pytest.raises(GradveilError, match=place):
        HuggingFaceText(make(), 8)


def test_a_mask_fits_half_precision():
    model = small_encoder(vocabulary=9, width=8, depth=1, heads=2).half()
    mask = model.keep_mask(torch.tensor([[1, 2, 0]]))
    assert torch.isfinite(mask).all()
    assert torch.softmax(mask.float(), -1)[0, 0, 0].tolist() == [0.5, 0.5, 0.0]
