"""Models of transformers that read texts are audited, inverted and trained from Python."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil.cli.app import run

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
WORDS = "[PAD] [CLS] [SEP] [UNK] a good bad film story about the war and his long lost friend in this very small town"
TEXTS = ["a good film about the war", "his long lost friend", "a very bad story", "the good town"]
LABELS = [0, 1, 0, 1]
SIZES = {"vocab_size": 22, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tokenizer():
    numbers = {word: number for number, word in enumerate(WORDS.split())}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=128)
    return transformers.BertForSequenceClassification(config).eval()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=128, pad_token_id=0))


def test_sentences_of_a_classifier_are_recovered_by_default(tokenizer):
    result = gradveil.audit(classifier(), (TEXTS, LABELS), tokenizer=tokenizer, target_clients=2)
    pairs = result.findings.verdicts[0].best.info["sentences"]
    assert [pair["truth"] for pair in pairs] == TEXTS[:2] == [pair["reconstruction"] for pair in pairs]
    assert {row["attack"] for row in result.summary()} == {"span-rank"}
    assert TEXTS[0] in (result._repr_html_() or "")


def test_token_numbers_need_no_tokenizer(tokenizer):
    batch = {**tokenizer(TEXTS, padding=True, return_tensors="pt"), "labels": torch.tensor(LABELS)}
    result = gradveil.audit(classifier(), batch, attacks=["span"], target_clients=1)
    assert result.findings.verdicts[0].recovered == 1


def test_a_language_model_needs_no_labels_and_has_its_own_loss(tokenizer):
    result = gradveil.audit(llama(), TEXTS, attacks=["span"], tokenizer=tokenizer, target_clients=1)
    assert result.findings.verdicts[0].recovered == 1


@pytest.mark.parametrize("known", [True, False])
def test_an_update_of_the_callers_model_is_inverted(tokenizer, known):
    model = classifier()
    inputs = tokenizer(TEXTS[:1], return_tensors="pt")
    model(**inputs, labels=torch.tensor(LABELS[:1])).loss.backward()
    update = {name: value.grad for name, value in model.named_parameters()}
    truth = {"truth": (TEXTS[:1], LABELS[:1])} if known else {}
    found = gradveil.invert(model, update, tokenizer=tokenizer, **truth)
    assert found.texts == TEXTS[:1]
    assert TEXTS[0] in str(found)
    assert TEXTS[0] in (found._repr_html_() or "")
    assert found.metrics.get("exact", 1.0) == 1.0


class Adapter(nn.Module):
    """What peft puts in a linear layer's place: its modules' names, and a later round's B."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, rank = base, 16
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


class Tuned(nn.Module):
    """A model as peft holds it: attributes are delegated, and parameters get the names of where they are."""

    def __init__(self, inner, adapted):
        super().__init__()
        inner.requires_grad_(False)
        for layer in inner.bert.encoder.layer if adapted else ():
            layer.attention.self.query = Adapter(layer.attention.self.query)
            layer.attention.self.value = Adapter(layer.attention.self.value)
        self.base_model = nn.Module()
        self.base_model.model = inner

    def __getattr__(self, name):
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["base_model"].model, name)

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)


def test_the_adapters_of_a_model_that_peft_holds_are_inverted(tokenizer):
    """Modules of the same names as peft's: it is no dependency, and a version from 2026 gave the same."""
    model = Tuned(classifier(), adapted=True).eval()
    inputs = tokenizer(TEXTS[1:2], return_tensors="pt")
    model(**inputs, labels=torch.tensor(LABELS[1:2])).loss.backward()
    update = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight" in update
    assert gradveil.invert(model, update, tokenizer=tokenizer).texts == TEXTS[1:2]


def test_other_adapters_than_lora_are_refused(tokenizer):
    with pytest.raises(gradveil.GradveilError, match=r"LoRA .*unload"):
        gradveil.audit(Tuned(classifier(), adapted=False), (TEXTS, LABELS), tokenizer=tokenizer)


FACTORY = """
import torch, transformers

def make(classes, words=2048, most=64, pads=0):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=words, max_position_embeddings=most, pad_token_id=pads, **sizes)
    return transformers.BertForSequenceClassification(config).eval()
"""


def test_a_factory_of_transformers_is_checked_with_texts(tmp_path, monkeypatch, capsys):
    (tmp_path / "factory_of_texts.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["check", "--model", "factory_of_texts:make", "--data", "reviews"]
    assert run(words) == 0
    assert "apply (adaptive): span-rank, span, embedding-search and embedding-rows" in capsys.readouterr().out
    options = [f"--set=model.options.{each}" for each in ("words=100", "most=16", "pads=3")]
    assert run([*words, *options]) == 2
    told = capsys.readouterr()
    for said in ("knows 100 words", "takes 16 tokens", "pads with token 3"):
        assert said in told.out + told.err


def test_a_classifier_is_trained_on_texts(tokenizer):
    result = gradveil.train(
        classifier(), (TEXTS * 6, LABELS * 6), (TEXTS, LABELS), tokenizer=tokenizer, rounds=1, clients=2
    )
    assert result.accuracy["none"] is not None


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (((TEXTS, LABELS),), "tokenizer"),
        ((TEXTS, LABELS), "loss"),
        ((torch.tensor([[1, 5, 2]]),), "labels"),
        ((([], []),), "batch: holds no texts"),
        (((torch.rand(2, 5), torch.tensor([0, 1])),), "batch: holds no texts"),
    ],
)
def test_texts_that_cannot_be_audited_are_refused(arguments, place):
    with pytest.raises(gradveil.GradveilError, match=place):
        gradveil.audit(classifier(), *arguments)
