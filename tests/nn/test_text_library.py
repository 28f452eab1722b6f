"""Text models of transformers by name: types with random weights, folders with pretrained ones."""

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.nn.models import build
from gradveil.nn.models.hugging_face_text import HuggingFaceText
from gradveil.nn.models.unlisted_text import UnlistedText

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
FACTS = {"vocabulary": 60, "length": 8, "padding": 0}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def made(name, facts=None, **options):
    generator = torch.Generator().manual_seed(0)
    return build(name, example=facts or FACTS, classes=3, generator=generator, **options)


@pytest.fixture
def folder(tmp_path):
    """Save a model and a tokenizer, as a user's folder."""
    torch.manual_seed(1)
    config = transformers.BertConfig(**SMALL, vocab_size=60)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(57)} | {"[PAD]": 57, "a": 58, "[UNK]": 59}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_type_gets_drawn_weights_for_the_words_and_classes_of_the_data():
    model, again = made("hf:bert", **SMALL), made("hf:bert", **SMALL)
    assert isinstance(model, HuggingFaceText)
    assert model(torch.tensor([[5, 6, 0]])).shape == (1, 3)
    assert (model.vocabulary_size, model.layout.padding, model.training) == (60, 0, False)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("predicts", "shape"), [("words", (2,)), ("classes", (2, 3))])
def test_a_decoder_predicts_words_or_classes(predicts, shape):
    model = made("hf:llama", **SMALL, predicts=predicts)
    assert model(torch.tensor([[5, 6, 0], [7, 8, 9]])).shape == shape


@pytest.mark.parametrize(("name", "predicts", "shape"), [("albert", "classes", (2, 3)), ("olmo2", "words", (2,))])
def test_a_type_whose_layers_are_not_known_is_built_too(name, predicts, shape):
    model = made(f"hf:{name}", **SMALL, predicts=predicts)
    assert isinstance(model, UnlistedText)
    assert model(torch.tensor([[5, 6, 0], [7, 8, 9]])).shape == shape


def test_pretrained_weights_and_the_tokenizer_come_from_a_folder(folder):
    texts = load("reviews", tokenizer=str(folder), tokens=9, limit_private=2).private
    assert texts.space.model_facts() == {"vocabulary": 60, "length": 9, "padding": 57}
    model = made(f"hf:{folder}", texts.space.model_facts(), pretrained=True)
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    expected = saved.bert.embeddings.word_embeddings.weight
    assert torch.equal(model.get_submodule(model.layout.words).weight, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "place"),
    [
        ("hf:bert", {"pretrained": True}, "model.options.pretrained"),
        ("hf:bert", {"predicts": "words"}, "model.options.predicts"),
        ("hf:bert", {"hidden": 3}, "model.options.hidden"),
        ("hf:nowhere", {}, "model.name"),
        ("hf:vit", {}, "model.name"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_place(name, options, place):
    with pytest.raises(GradveilError) as caught:
        made(name, **options)
    assert [problem.where for problem in caught.value.problems] == [place]


def test_pretrained_weights_need_the_vocabulary_of_their_tokenizer(folder):
    with pytest.raises(GradveilError, match="tokenizer"):
        made(f"hf:{folder}", {**FACTS, "vocabulary": 2000}, pretrained=True)
