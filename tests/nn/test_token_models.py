"""Models of transformers answer what attacks on texts ask, and work under vmap(grad)."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from gradveil.core.errors import GradveilError
from gradveil.nn.models.hugging_face_text import HuggingFaceText

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def wrapped(family: str) -> HuggingFaceText:
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=4, eos_token_id=49, bos_token_id=49,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        return HuggingFaceText(transformers.GPT2LMHeadModel(config), 8)
    if family == "distilbert":
        config = transformers.DistilBertConfig(
            vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=64,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )  # fmt: skip
        return HuggingFaceText(transformers.DistilBertForSequenceClassification(config), 8)
    name = {"bert": "Bert", "roberta": "Roberta"}[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, **NO_DROPOUT)
    return HuggingFaceText(getattr(transformers, f"{name}ForSequenceClassification")(config), 8)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2"])
def test_first_inputs_are_those_of_a_forward_pass(family):
    model = wrapped(family)
    layout, params = model.layout, {name: value.detach() for name, value in model.named_parameters()}
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    seen = layout.inputs(model, params, ids, 0)
    for position in range(6):
        expected = layout.first_inputs(model, params, position, ids[:, position])
        assert torch.allclose(seen[:, position], expected, atol=1e-5)


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


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_padding_changes_nothing(family):
    model = wrapped(family)
    ids = torch.randint(3, 40, (1, 5), generator=torch.Generator().manual_seed(0))
    longer = torch.cat([ids, torch.full((1, 3), model.layout.padding)], 1)
    assert torch.allclose(model(ids), model(longer), atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradients_of_single_texts_are_batched(family):
    model = wrapped(family)
    params = {name: value.detach() for name, value in model.named_parameters()}
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))

    def loss(p, row):
        return functional_call(model, p, (row.unsqueeze(0),)).square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(params, ids)
    alone = grad(loss)(params, ids[1])
    name = model.layout.attention[0].format(0) + ".weight"
    assert torch.allclose(batched[name][1], alone[name], atol=1e-5)


def test_an_unknown_family_is_refused_with_the_list():
    config = transformers.AlbertConfig(**SIZES, embedding_size=16)
    with pytest.raises(GradveilError, match="bert, electra, roberta"):
        HuggingFaceText(transformers.AlbertForSequenceClassification(config), 8)
