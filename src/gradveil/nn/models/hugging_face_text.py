"""Text models of transformers behind one tensor of token numbers: classifiers, and language models that are causal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.errors import Problem, refuse
from gradveil.nn.module_paths import put
from gradveil.nn.surgery import replace_layernorm
from gradveil.nn.token_layout import TokenLayout, TokenModel, next_token_loss


def _encoder(stem: str, attention: str, types: bool, offset: int = 0) -> dict[str, Any]:
    distilled = "transformer" in attention
    names = ("q_lin", "k_lin", "v_lin") if distilled else ("query", "key", "value")
    layer = f"{stem}.{attention.partition('.attention')[0]}"
    middle = ("attention.output.LayerNorm", "intermediate")
    if distilled:
        middle = ("sa_layer_norm", "ffn.lin1", "ffn.activation")
    return {
        "words": f"{stem}.embeddings.word_embeddings",
        "positions": f"{stem}.embeddings.position_embeddings",
        "types": f"{stem}.embeddings.token_type_embeddings" if types else None,
        "norm": f"{stem}.embeddings.LayerNorm",
        "attention": tuple(f"{stem}.{attention}.{name}" for name in names),
        "out": f"{layer}.attention.out_lin" if distilled else f"{layer}.attention.output.dense",
        "middle": tuple(f"{layer}.{name}" for name in middle),
        "down": f"{layer}.ffn.lin2" if distilled else f"{layer}.output.dense",
        "carries_normalised": True,
        "offset": offset,
        "causal": False,
    }


def _rotary(stem: str = "model", words: str = "embed_tokens", attention: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe decoders whose first layer sees words without positions."""
    parts = attention or tuple(f"self_attn.{name}_proj" for name in "qkv")
    return {
        "words": f"{stem}.{words}",
        "norm": f"{stem}.layers.0.input_layernorm",
        "attention": tuple(f"{stem}.layers.{{}}.{part}" for part in parts),
        "causal": True,
    }


def _absolute(norm: str, attention: tuple[str, ...], inputs_first: bool = False) -> dict[str, Any]:
    """Describe decoders that are built as GPT-2 is, with learned positions."""
    return {
        "words": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": f"transformer.h.0.{norm}",
        "attention": tuple(f"transformer.h.{{}}.attn.{part}" for part in attention),
        "inputs_first": inputs_first,
        "causal": True,
    }


_FUSED = ("self_attention.query_key_value",)
_SEPARATE = tuple(f"{name}_proj" for name in "qkv")
_ROBERTA = _encoder("roberta", "encoder.layer.{}.attention.self", types=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _encoder("bert", "encoder.layer.{}.attention.self", types=True),
    "electra": _encoder("electra", "encoder.layer.{}.attention.self", types=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _encoder("distilbert", "transformer.layer.{}.attention", types=False),
    "ernie": _encoder("ernie", "encoder.layer.{}.attention.self", types=True),
    "modernbert": {
        "words": "model.embeddings.tok_embeddings",
        "norm": "model.embeddings.norm",
        "attention": ("model.layers.{}.attn.Wqkv",),
        "causal": False,
    },
    "gpt2": _absolute("ln_1", ("c_attn",), inputs_first=True),
    "gpt_bigcode": _absolute("ln_1", ("c_attn",)),
    "gpt_neo": _absolute("ln_1", tuple(f"attention.{part}" for part in _SEPARATE)),
    "gptj": {**_absolute("ln_1", _SEPARATE), "positions": None},
    "bloom": {
        "words": "transformer.word_embeddings",
        "embedded_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.h.0.input_layernorm",
        "attention": tuple(f"transformer.h.{{}}.{part}" for part in _FUSED),
        "causal": True,
    },
    "falcon": {
        "words": "transformer.word_embeddings",
        "norm": "transformer.h.0.input_layernorm",
        "attention": tuple(f"transformer.h.{{}}.{part}" for part in _FUSED),
        "causal": True,
    },
    "opt": {
        "words": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.layers.0.self_attn_layer_norm",
        "attention": tuple(f"model.decoder.layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
        "offset": 2,
        "causal": True,
    },
    "llama": _rotary(),
    "mistral": _rotary(),
    "qwen2": _rotary(),
    "qwen3": _rotary(),
    **{
        name: _rotary()
        for name in (
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi",
            "starcoder2",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "granite",
            "smollm3",
            "stablelm",
            "glm",
            "glm4",
            "helium",
            "ministral",
            "cohere",
            "cohere2",
            "gpt_oss",
        )
    },
    "phi3": _rotary(attention=("self_attn.qkv_proj",)),
    "persimmon": _rotary(attention=("self_attn.query_key_value",)),
    "gpt_neox": _rotary("gpt_neox", "embed_in", ("attention.query_key_value",)),
}
"""Families by `model_type` of their configurations."""
_PATHS = ("words", "positions", "types", "embedded_norm", "norm", "attention", "out", "middle", "down")
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
"""Settings of dropout that is drawn in a function, which nobody can replay."""
_BY_TOKENS = ("bloom", "falcon")
"""Families that take no mask of floats: their masks say which tokens are there, and distances follow from them."""
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Families whose first position is the row after their padding number."""
_PARALLEL_NORM = "transformer.h.0.ln_attn"
"""What normalises the inputs of attention in Falcons that normalise those of the perceptron by themselves."""
INNER = "inner"
"""Name of the model of transformers within its wrapper: all its parameters start with it."""


_PEFT = "base_model.model"
"""Path of the model of transformers within one of peft."""


class HuggingFaceText(TokenModel):
    """A sequence classifier or causal language model of transformers that takes token numbers [B, T] alone.

    It holds a copy, with the LoRA adapters that the package peft put around the model, if any.
    Attention is computed eagerly, behind an additive mask of floats, and LayerNorm by its formula:
    with other masks, with fused attention and with torch's LayerNorm, batched gradients fail or are wrong. Paths in
    the layout start with `inner`, the model of transformers.
    """

    def __init__(self, inner: nn.Module, length: int = 32) -> None:
        """Wrap a model of a known family; others are refused with the list."""
        super().__init__()
        refuse(list(_problems(inner, length)))
        inner = with_plain_functions(inner)
        config: Any = inner.config
        family = dict(FAMILIES[config.model_type])
        if not _has(inner, family["norm"]) and _has(inner, _PARALLEL_NORM):
            family["norm"] = _PARALLEL_NORM
        if getattr(config, "_attn_implementation", "eager") != "eager":
            inner.set_attn_implementation("eager")  # type: ignore[operator]
        self.inner, self.training = inner, inner.training
        self.input_shape = (length,)
        padding = padding_of(config)
        if config.model_type in _AFTER_PADDING:
            family["offset"] = padding + 1
        if (config.pad_token_id is None or config.pad_token_id < 0) and family["causal"]:
            config.pad_token_id = padding  # a classifier looks for the last token before it
        stem = f"{INNER}.{_PEFT}" if _adapted(inner) else INNER
        within = {
            name: tuple(f"{stem}.{path}" for path in value) if isinstance(value, tuple) else f"{stem}.{value}"
            for name, value in family.items()
            if name in _PATHS and value is not None
        }
        others = {name: value for name, value in family.items() if name not in _PATHS}
        self.layout = TokenLayout(
            family=config.model_type,
            layers=config.num_hidden_layers,
            padding=padding,
            predicts_words=_predicts_words(inner),
            heads=config.num_attention_heads,
            **within,
            **others,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K], or the mean next-token losses [B] of a language model."""
        more = {"position_ids": torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)} if self._counted else {}
        mask = torch.ones_like(ids) if self.layout.family in _BY_TOKENS else self.keep_mask(ids)
        outputs = self.inner(input_ids=ids, attention_mask=mask, **more).logits
        return next_token_loss(outputs, ids, self.layout.padding) if self.layout.predicts_words else outputs

    @property
    def _counted(self) -> bool:
        """Whether the family counts its positions along the mask, which is none of zeros and ones here."""
        return self.layout.family == "opt"


def reads_tokens(model: object) -> bool:
    """Return whether a model is one of transformers that reads token numbers, of a family that is known or not."""
    config = getattr(model, "config", None)
    return hasattr(config, "model_type") and hasattr(model, "get_input_embeddings") and hasattr(config, "vocab_size")


def padding_of(config: Any) -> int:
    """Return the number of padding; families without one pad with the token that ends texts."""
    ends = getattr(config, "eos_token_id", None)
    known = [getattr(config, "pad_token_id", None), *(ends if isinstance(ends, list) else [ends])]
    return next((number for number in known if number is not None and 0 <= number < config.vocab_size), 0)


def _predicts_words(inner: Any) -> bool:
    return inner.get_output_embeddings() is not None


def _adapted(inner: nn.Module) -> bool:
    """Return whether peft holds the model: the names of its own attributes are delegated, those of parameters not."""
    return any(name.startswith(f"{_PEFT}.") for name, _ in inner.named_parameters())


def with_plain_functions(inner: nn.Module) -> nn.Module:
    """Return a copy that torch can differentiate in batches: LayerNorm, and BLOOM's GELU, by their formulas."""
    inner = replace_layernorm(inner)
    for path, module in list(inner.named_modules()):
        if type(module).__name__ == "BloomGelu":
            put(inner, path, nn.GELU(approximate="tanh"))
    return inner


def _problems(inner: Any, length: int) -> Iterator[Problem]:
    """Find out why a model cannot be wrapped."""
    config, names = getattr(inner, "config", None), [name for name, _ in inner.named_parameters()]
    if any(name.startswith("base_model.") for name in names) and not any(".lora_A." in name for name in names):
        what = f"{type(inner).__name__} trains no LoRA adapters (A and B), and other gradients are not read"
        yield Problem("model", what, "give a LoraConfig, or audit all parameters of model.unload()")
        return
    inner = inner.get_submodule(_PEFT) if _adapted(inner) else inner
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        what = f"the first layers of '{kind or type(inner).__name__}' are not known"
        yield Problem(
            "model", what, f"choose a model of: {', '.join(FAMILIES)}; or look token numbers up in an nn.Embedding"
        )
        return
    family, fix = FAMILIES[kind], "give a ...ForSequenceClassification, or a causal language model"
    missing = [path for path in (family["words"], family["norm"]) if not _has(inner, path)]
    if missing and not _has(inner, _PARALLEL_NORM):
        yield Problem("model", f"{type(inner).__name__} has no {missing[0]}", fix)
    elif _predicts_words(inner) and (not family["causal"] or "MaskedLM" in type(inner).__name__):
        yield Problem("model", f"{type(inner).__name__} fills in masked words, which is no loss of a client here", fix)
    if any(_has(inner, path) for path in ("electra.embeddings_project", "model.decoder.project_in")):
        what = f"{type(inner).__name__} projects its word embeddings before the first layer"
        yield Problem("model", what, "give a model whose embeddings are as wide as its layers")
    yield from drawn_in_attention(inner)
    window = getattr(config, "sliding_window", None)
    if window and window < length:
        what = f"looks {window} tokens far, and the texts have {length}"
        yield Problem("model", what, "cut the texts, or widen the window of the configuration")
    if kind == "modernbert" and inner.config.classifier_pooling != "cls":
        what = f"pools by '{inner.config.classifier_pooling}', for which it needs another mask"
        yield Problem("model", what, "set config.classifier_pooling = 'cls'")
    if kind == "opt" and not getattr(config, "do_layer_norm_before", True):
        yield Problem("model", "normalises behind its layers (do_layer_norm_before)", "give another size of OPT")


def drawn_in_attention(inner: Any) -> Iterator[Problem]:
    """Refuse dropout that a model in training mode draws where nobody can replay it."""
    drawn = next((name for name in _ATTENTION_DROPOUT if getattr(inner.config, name, 0) and inner.training), None)
    if drawn is not None:
        what = f"draws dropout inside of attention ({drawn} = {getattr(inner.config, drawn)})"
        yield Problem("model", what, f"call model.eval(), or set {drawn}=0; prepare=True keeps all other dropout")


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
